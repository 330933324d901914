"""Room for one run of ``postdate bench`` on a Redis server, under a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast
from urllib.parse import urlsplit, urlunsplit

from redis import Redis
from redis.exceptions import RedisError
from typing_extensions import override

from postdate.backends.redis.errors import STORE, translate
from postdate.backends.redis.login import RedisLogin, parse_address
from postdate.ports.benchmarks import BenchRoom

_TOLD: Final = ("redis_version", "aof_enabled", "maxmemory_policy")
_TAKE: Final = """
local found = {}
for _, number in ipairs(redis.call('ZRANGE', KEYS[1], 0, ARGV[1] - 1)) do
  local key = ARGV[2] .. number
  found[#found + 1] = redis.call('HGET', key, 'i')
  redis.call('DEL', key)
  redis.call('ZREM', KEYS[1], number)
end
return found
"""


class RedisBenchRoom(BenchRoom):
    """A prefix on a server.

    Args:
        address: of the server.
        run: names the prefix.

    Raises:
        StoreUnavailable: the server does not answer, or refuses us.
    """

    def __init__(self, address: str, run: str) -> None:
        parts = urlsplit(address)
        self._address = urlunsplit(parts._replace(query=f"prefix=postdate-bench-{run}"))
        self._login = parse_address(self._address)
        self._client: Any = _client(self._login)
        self._rows = 0
        try:
            self._client.ping()
        except (RedisError, OSError) as error:
            self._client.close()
            raise translate(error, STORE, self._login.place) from error

    @property
    @override
    def address(self) -> str:
        return self._address

    @property
    @override
    def endpoint(self) -> tuple[str, int]:
        return self._login.host, self._login.port

    @override
    def facts(self) -> Mapping[str, str]:
        info = self._client.info()
        said = {name: str(info[name]) for name in _TOLD if name in info}
        synced = self._client.config_get("appendfsync")
        return {**said, **{str(name): str(value) for name, value in synced.items()}}

    @override
    def insert(self, count: int, body: bytes) -> None:
        pipe = self._client.pipeline(transaction=True)
        for number in range(self._rows, self._rows + count):
            pipe.hset(f"{self._login.tag}:limit:{number}", mapping={"i": str(number), "d": number, "b": body})
            pipe.zadd(f"{self._login.tag}:limit", {str(number): number})
        self._rows += count
        pipe.execute()

    @override
    def put(self, count: int, body: bytes) -> None:
        self._client.rpush(f"{self._login.tag}:put", *([body] * count))

    @override
    def ids(self, queue: str) -> Iterator[str]:
        last = 0
        while numbers := self._client.zrange(self._ready(queue), f"({last}", "+inf", byscore=True, offset=0, num=1_000):
            pipe = self._client.pipeline(transaction=False)
            for number in numbers:
                pipe.hget(self._message + number.decode(), "i")
            yield from (found.decode() for found in pipe.execute() if found is not None)
            last = int(numbers[-1])

    @override
    def take(self, queue: str, limit: int) -> list[str]:
        taken = cast("list[bytes]", self._client.eval(_TAKE, 1, self._ready(queue), limit, self._message))
        return [found.decode() for found in taken]

    def _ready(self, queue: str) -> str:
        return f"{self._login.tag}:q:{queue}:ready"

    @property
    def _message(self) -> str:
        return f"{self._login.tag}:qm:"

    @override
    def close(self) -> None:
        try:
            begin, found = self._login.tag.encode(), list[bytes]()
            for key in self._client.scan_iter(count=1_000):
                if key.startswith(begin):
                    found.append(key)
                if len(found) >= 1_000:
                    self._client.unlink(*found)
                    found.clear()
            if found:
                self._client.unlink(*found)
        finally:
            self._client.close()


def _client(login: RedisLogin) -> Any:
    return Redis(
        host=login.host,
        port=login.port,
        db=login.database,
        username=login.user,
        password=login.password,
        ssl=login.tls,
        ssl_ca_certs=login.authority,
        protocol=2,
    )
