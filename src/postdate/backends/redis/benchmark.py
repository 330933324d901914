"""Room for ``postdate bench`` under a prefix of the run, and plain commands to compare with."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Final, Self, TypeVar, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis import Redis
from redis.exceptions import RedisError, ResponseError
from typing_extensions import override

from postdate.backends.redis.login import RedisLogin, parse_address
from postdate.backends.redis.server import STORE, translate
from postdate.ports.benchmarks import BareRow, BenchmarkRun, BenchmarkTarget, Inserter, Mover, Taker

T = TypeVar("T")

_AT_ONCE: Final = 1_000
_ANSWERS_WITHIN_SECONDS: Final = 20.0
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
    """The run's own prefix, whose keys are deleted after it; the address's prefix is not used."""

    def __init__(self, address: str, run: BenchmarkRun) -> None:
        super().__init__(address, run)
        self.login = parse_address(self.address_of(urlsplit(address).scheme))
        self.client = _client(self.login)

    @override
    def address_of(self, scheme: str) -> str:
        parts = urlsplit(self.address)
        options = {**dict(parse_qsl(parts.query)), "prefix": f"postdate-bench-{self.run.name}"}
        return parts._replace(query=urlencode(options)).geturl()

    @override
    def __enter__(self) -> Self:
        try:
            self.client.ping()
        except (RedisError, OSError) as error:
            self.client.close()
            raise translate(error, STORE, self.login.place) from error
        return self

    @override
    def __exit__(self, *_error: object) -> None:
        self.client.close()  # an interrupted command leaves its connection unusable; the next use opens another
        try:
            self._delete(self.login.tag)
        except (RedisError, OSError) as failure:
            raise translate(failure, STORE, f"{self.login.place} kept what was made for the run, and") from failure
        finally:
            self.client.close()

    def _delete(self, begin: str) -> None:
        for keys in _batches(self.client.scan_iter(match=f"{begin}*", count=_AT_ONCE)):
            self.client.unlink(*keys)

    @override
    def facts(self) -> Mapping[str, str]:
        with suppress(ResponseError):
            return {str(name): str(said) for name, said in self.client.config_get("appendfsync").items()}
        return {}

    @override
    def arrived(self, queue: str) -> Generator[str]:
        for some in _batches(self.client.zrange(self._ready(queue), 0, -1)):
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
        self._delete(self._bare)

    @override
    @contextmanager
    def mover(self, rows: Iterable[BareRow], at_once: int) -> Generator[Mover]:
        """Moves ids from a sorted set to a list, one script per batch; the messages' hashes stay where they are."""
        with self._bare_keys():
            for some in _batches(rows):
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


def _batches(items: Iterable[T]) -> Generator[list[T]]:
    left = iter(items)
    while some := list(islice(left, _AT_ONCE)):
        yield some


def _client(login: RedisLogin) -> Any:  # the driver leaves its types open
    return Redis(
        host=login.host,
        port=login.port,
        db=login.database,
        username=login.user,
        password=login.password,
        ssl=login.tls,
        ssl_ca_certs=login.authority,
        socket_timeout=_ANSWERS_WITHIN_SECONDS,
        protocol=2,
    )
