"""Plain commands on Redis."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, cast

from redis.exceptions import ResponseError
from typing_extensions import override

from benchmarks.targets.target import BareRow, BenchmarkRun, BenchmarkTarget, Inserter, Mover, Taker
from postdate.backends.redis.login import parse_address
from postdate.backends.redis.scratch import batches, client_of, delete_keys
from postdate.ports.backends import Scratch

_AT_ONCE: Final = 1_000
_MOVE: Final = """
local due = redis.call('ZRANGE', KEYS[1], '-inf', '(' .. ARGV[1], 'BYSCORE', 'LIMIT', 0, ARGV[2])
if #due > 0 then
  redis.call('RPUSH', KEYS[2], unpack(due))
  redis.call('ZREM', KEYS[1], unpack(due))
end
return #due
"""
_TAKE: Final = """
local numbers, found = redis.call('ZRANGE', KEYS[1], 0, ARGV[1] - 1), {}
for place, number in ipairs(numbers) do
  local key = ARGV[2] .. number
  found[place] = redis.call('HMGET', key, 'h', 'b')
  redis.call('DEL', key)
end
if #numbers > 0 then
  redis.call('ZREM', KEYS[1], unpack(numbers))
end
return found
"""

_IS_EMPTY: Final = """
local tag, queue = KEYS[1], ARGV[1]
if redis.call('ZCARD', tag .. ':q:' .. queue .. ':ready') > 0 then
  return 0
end
for _, holder in ipairs(redis.call('ZRANGE', tag .. ':holders', 0, -1)) do
  for _, place in ipairs(redis.call('HVALS', tag .. ':held:' .. holder)) do
    if place == 'q' .. queue then
      return 0
    end
  end
end
return 1
"""


class RedisTarget(BenchmarkTarget):
    """The prefix of the run."""

    def __init__(self, scratch: Scratch, run: BenchmarkRun) -> None:
        super().__init__(scratch, run)
        self.login = parse_address(scratch.address)
        self.client = client_of(self.login)

    @override
    def __exit__(self, *_error: object) -> None:
        self.client.close()

    @override
    def facts(self) -> Mapping[str, str]:
        with suppress(ResponseError):
            return {str(name): str(said) for name, said in self.client.config_get("appendfsync").items()}
        return {}

    @override
    def arrived(self, queue: str) -> Generator[str]:
        for some in batches(self.client.zrange(self._ready(queue), 0, -1)):
            pipe = self.client.pipeline(transaction=False)
            for number in some:
                pipe.hget(self._message + number.decode(), "i")
            yield from (found.decode() for found in pipe.execute() if found is not None)

    @override
    def is_empty(self, queue: str) -> bool:
        return bool(self.client.eval(_IS_EMPTY, 1, self.login.tag, queue))

    def _ready(self, queue: str) -> str:
        return f"{self.login.tag}:q:{queue}:ready"

    @property
    def _message(self) -> str:
        return f"{self.login.tag}:qm:"

    # --- the barest way -----------------------------------------------------------------------------------------

    @property
    def _bare(self) -> str:
        return f"{self.login.tag}:bare"

    @contextmanager
    def _bare_keys(self) -> Generator[None]:
        yield
        delete_keys(self.client, self._bare)

    @override
    @contextmanager
    def mover(self, rows: Iterable[BareRow], at_once: int) -> Generator[Mover]:
        """Moves ids from a sorted set to a list, one script per batch; the messages' hashes stay where they are."""
        with self._bare_keys():
            for some in batches(rows):
                self._prepared(some)()
            move = self.client.register_script(_MOVE)
            keys = [self._bare, f"{self._bare}:queue"]
            yield lambda before: cast("int", move(keys, [before, at_once]))

    @override
    @contextmanager
    def inserter(self) -> Generator[Inserter]:
        with self._bare_keys():
            yield self._prepared

    def _prepared(self, rows: Sequence[BareRow]) -> Callable[[], object]:
        pipe = self.client.pipeline(transaction=True)
        for message_id, due, headers, body in rows:
            pipe.hset(f"{self._bare}:{message_id}", mapping={"h": headers, "b": body})
            pipe.zadd(self._bare, {message_id: due})
        return cast("Callable[[], object]", pipe.execute)

    @override
    @contextmanager
    def taker(self, queue: str) -> Generator[Taker]:
        take = self.client.register_script(_TAKE)
        yield lambda: len(take([self._ready(queue)], [_AT_ONCE, self._message]))
