"""Redis under the conformance suites: every subject has a prefix of its own, with letters and signs of all kinds."""

import itertools
import os

import redis

from postdate.backends.redis.login import RedisLogin, parse_address
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.ports import MovingStore, Recording, Transport
from postdate.testing import Damage, StoreSubject, TransportSubject
from postdate.testing.damaged import Damages, damages_of

_NUMBERS = itertools.count(1)
_DAMAGED_HEADERS = b'{"a": "b'
_BEFORE_THE_CALENDAR = str(-(10**18)).encode()


class Prefix:
    """Room of one test on a server, and a client without us to look into it."""

    def __init__(self, url: str) -> None:
        self.name = f"po:st é*?[ {os.getpid()}.{next(_NUMBERS)}"
        known = parse_address(url)
        self.login = RedisLogin(known.host, known.port, known.database, self.name, known.user, known.password)
        self.client = redis.Redis(known.host, known.port, known.database, known.password, protocol=2)

    def all_keys(self) -> list[bytes]:
        return [key for key in self.client.scan_iter(count=1_000) if key.startswith(self.login.tag.encode())]

    def damage(self, key: str | bytes, damage: Damage) -> bytes:
        """Damage the message under a key by hand; return what stands there now."""
        if damage is Damage.CONTENT:
            self.client.hdel(key, "h", "b")
            return b""
        field, value = {
            Damage.HEADERS: ("h", _DAMAGED_HEADERS),
            Damage.DUE: ("d", _BEFORE_THE_CALENDAR),
            Damage.DESTINATION: ("q", b" "),
        }[damage]
        self.client.hset(key, field, value)
        return value

    def drop(self) -> None:
        keys = self.all_keys()
        if keys:
            self.client.delete(*keys)
        self.client.close()


class RedisStoreSubject(StoreSubject):
    """The store in Redis."""

    def __init__(self, url: str) -> None:
        self.prefix = Prefix(url)
        self._recording = Recording.ALL

    def open(self, *, recording: Recording = Recording.ALL, **settings) -> RedisStore:
        self._recording = recording
        return RedisStore(self.prefix.login, recording=recording, **settings)

    def open_elsewhere(self) -> RedisStore:
        return RedisStore(self.prefix.login)

    def transport(self) -> Transport:
        return RedisTransport(self.prefix.login, recording=self._recording)

    def damages(self) -> Damages:
        return damages_of(self.damage)

    def damage(self, message_id: str, damage: Damage) -> bytes:
        (key,) = [key for key in self.prefix.all_keys() if key.endswith(f":m:{message_id}".encode())]
        return self.prefix.damage(key, damage)

    def drop(self) -> None:
        self.prefix.drop()


class RedisTransportSubject(TransportSubject):
    """The queues in Redis."""

    def __init__(self, url: str) -> None:
        self.prefix = Prefix(url)

    def open(self, **settings) -> RedisTransport:
        return RedisTransport(self.prefix.login, **settings)

    def open_elsewhere(self) -> Transport:
        return RedisTransport(self.prefix.login)

    def store(self) -> MovingStore:
        return RedisStore(self.prefix.login, table="conformance")

    def damages(self) -> Damages:
        return damages_of(self.damage, [each for each in Damage if each is not Damage.DESTINATION])

    def damage(self, message_id: str, damage: Damage) -> bytes:
        (key,) = [
            key
            for key in self.prefix.all_keys()
            if b":qm:" in key and self.prefix.client.hget(key, "i") == message_id.encode()
        ]
        return self.prefix.damage(key, damage)

    def drop(self) -> None:
        self.prefix.drop()
