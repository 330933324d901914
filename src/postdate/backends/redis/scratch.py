"""A place for ``postdate bench`` on Redis: a prefix of keys."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis import Redis
from redis.exceptions import RedisError

from postdate.backends.redis.login import RedisLogin, parse_address
from postdate.backends.redis.server import STORE, translate
from postdate.ports.backends import Scratch

T = TypeVar("T")

_AT_ONCE: Final = 1_000
_ANSWERS_WITHIN_SECONDS: Final = 20.0


@contextmanager
def scratch(address: str, run: str, queues: Sequence[str]) -> Generator[Scratch]:
    """Yield the server with a prefix of the run; delete all keys that begin with it afterwards."""
    del queues  # Queues need no preparation: they are keys with the prefix.
    parts = urlsplit(address)
    options = {**dict(parse_qsl(parts.query)), "prefix": f"postdate-bench-{run}"}
    address = parts._replace(query=urlencode(options)).geturl()
    login = parse_address(address)
    with _connect(login) as client:
        client.ping()
    try:
        yield Scratch(address)
    finally:
        # A new connection, because an interrupted command leaves the old one unusable.
        with _connect(login) as client:
            delete_keys(client, login.tag)


def delete_keys(client: Any, prefix: str) -> None:
    """Delete all keys that begin with ``prefix``."""
    for keys in batches(client.scan_iter(match=f"{prefix}*", count=_AT_ONCE)):
        client.unlink(*keys)


def batches(items: Iterable[T]) -> Generator[list[T]]:
    """Yield the items a thousand at a time."""
    remaining = iter(items)
    while batch := list(islice(remaining, _AT_ONCE)):
        yield batch


def client_of(login: RedisLogin) -> Any:  # the driver leaves its types open
    """Return a blocking client."""
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


@contextmanager
def _connect(login: RedisLogin) -> Generator[Any]:
    with closing(client_of(login)) as client:
        try:
            yield client
        except (RedisError, OSError) as error:
            raise translate(error, STORE, login.description) from error
