"""A server: its scripts, errors, connections and facts, and the transactions that one script executes."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import Any, Final, TypeVar, cast

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import BlockingConnectionPool, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError
from typing_extensions import override

from postdate import errors
from postdate.backends.redis.layout import Part, size_of
from postdate.backends.redis.login import RedisLogin
from postdate.clock import from_microseconds
from postdate.messages import DelayedMessage, Envelope
from postdate.ports import Claim, ServerFacts
from postdate.runtime import forks

# --- scripts: files of ``lua``, each after the functions of ``common.lua`` --------------------------------------------


_FOLDER: Final = "lua"
_ALLOWED_WHEN_FULL: Final = "#!lua flags=allow-oom\n"
_REFUSED_WHEN_FULL: Final = "#!lua\n"
"""The server refuses it before it begins when the memory is full.

A script without flags can go on if its first write removes something.
"""

_FREEING_SCRIPTS: Final = frozenset(
    {"discard_unreadable", "finish", "mark_unreadable", "move", "release", "remove", "roll_back", "settle", "undo"}
)
_ENABLING_SCRIPTS: Final = frozenset({"beat", "claim", "little", "receive", "register", "retry", "unregister"})
"""Scripts that the scripts above depend on. When the memory is full, the server refuses every other script."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and its SHA-1 in hexadecimal digits. A server knows the script by it after the first run."""

    text: str
    digest: str


@cache
def script(name: str) -> Script:
    """Return a script. ``settle`` is ``transact`` for completing messages, which is allowed when the memory is full."""
    folder = files("postdate.backends.redis") / _FOLDER
    file = "transact" if name == "settle" else name
    parts = [(folder / f"{each}.lua").read_text(encoding="utf-8") for each in ("common", file)]
    flags = (
        _ALLOWED_WHEN_FULL
        if name in _FREEING_SCRIPTS | _ENABLING_SCRIPTS
        else _REFUSED_WHEN_FULL
        if name == "transact"
        else ""
    )
    text = flags + "\n".join(parts)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


# --- errors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RedisErrorTypes:
    """The types of errors that the server's answers become, for a store or for queues.

    ``unreachable`` means no answer, or an answer that the server cannot work now. ``full`` means that its memory or
    disk is full. ``other`` means every other answer, which may be about one key.
    """

    unreachable: type[errors.PostdateError]
    full: type[errors.PostdateError]
    other: type[errors.PostdateError]


STORE: Final = RedisErrorTypes(errors.StoreUnreachable, errors.StoreFull, errors.StoreTroubled)
QUEUES: Final = RedisErrorTypes(errors.TransportUnreachable, errors.TransportUnreachable, errors.TransportUnreachable)

_OTHER_NODE_ERRORS: Final = (exceptions.MovedError, exceptions.AskError)
_OUTAGE_ERRORS: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.InvalidResponse,
)
_TOO_LARGE: Final = re.compile("ERR (?:string exceeds maximum allowed size|Protocol error: invalid bulk length)")
"""The only answers about the content of a message: our commands are constant, and Redis stores any bytes.

They name the setting ``proto-max-bulk-len``.
"""

_SERVER_ERROR: Final = re.compile("(?!WRONGTYPE|BUSYKEY|BUSYGROUP|NOGROUP)[A-Z]{4,} ")
"""The beginning of errors about the server. Any other error may be about one key that somebody else has changed."""


def translate(error: Exception, error_types: RedisErrorTypes, server_description: str) -> errors.PostdateError:
    """Return the error for a :class:`redis.exceptions.RedisError` or an :class:`OSError`."""
    answer = errors.first_line(error)
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        kind, text = error_types.unreachable, f"refuses this client: {answer}; check user and password of the address"
    elif isinstance(error, exceptions.NoPermissionError):
        kind, text = (
            error_types.unreachable,
            (f"refuses this client: {answer}; its user needs all commands on keys of the prefix"),
        )
    elif isinstance(error, _OTHER_NODE_ERRORS):
        kind, text = (
            error_types.unreachable,
            f"is a node of a cluster, and the keys of this prefix are on another: {answer}",
        )
    elif _TOO_LARGE.match(answer):
        kind, text = errors.MessageTooLarge, f"accepts no value of this size (proto-max-bulk-len): {answer}"
    elif isinstance(error, exceptions.OutOfMemoryError):
        kind, text = (
            error_types.full,
            (f"has no memory left (maxmemory) and stores nothing until memory is free: {answer}"),
        )
    elif answer.startswith("MISCONF"):
        kind, text = error_types.full, f"cannot write to its disk and stores nothing until it can: {answer}"
    elif isinstance(error, exceptions.ReadOnlyError):
        kind, text = (
            error_types.unreachable,
            "is a read-only replica, maybe after a fail-over; name the master's address",
        )
    elif answer.startswith("BUSY "):
        kind, text = error_types.unreachable, f"is busy with a script of another client: {answer}"
    elif isinstance(error, (*_OUTAGE_ERRORS, OSError)):
        kind, text = error_types.unreachable, f"cannot be reached: {answer}"
    elif _SERVER_ERROR.match(answer):
        kind, text = error_types.unreachable, f"does not work now: {answer}"
    else:
        kind, text = error_types.other, f"refuses the command: {answer}"
    return kind(f"{server_description} {text}")


# --- connections ------------------------------------------------------------------------------------------------------


_CONNECTS_WITHIN_SECONDS: Final = 5.0
_CONNECTIONS: Final = 16
_CANCELLED_AGAIN_AFTER_SECONDS: Final = 0.1  # see `cancel_task`
ANSWERS_WITHIN: Final = timedelta(seconds=30)
"""Default; a call that is not answered for so long fails."""

T = TypeVar("T")


class _ForkAwareConnection:
    """A connection of the driver that the child of a fork cannot use."""

    _writer: asyncio.StreamWriter | None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        forks.register_connection(self)

    def fileno(self) -> int:
        return -1 if self._writer is None else self._writer.get_extra_info("socket").fileno()


class _PlainConnection(_ForkAwareConnection, Connection):
    pass


class _EncryptedConnection(_ForkAwareConnection, SSLConnection):
    pass


class RedisConnections(forks.ForkAware):
    """A pool of connections to one database of a server, opened at first use, in the event loop of the first caller.

    It raises the driver's errors, because a store and queues may share it. :class:`RedisServer` translates them.
    """

    def __init__(self, login: RedisLogin, answers_within: timedelta | None = None) -> None:
        self.login = login
        self.answers_within = answers_within or ANSWERS_WITHIN
        self._client: Redis | None = None
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Leave the connections to the parent; the next call opens new ones."""
        forks.prevent_destruction(self._client)
        self._client = None

    async def run(self, name: str, *arguments: Part) -> Any:
        """Run a script, which is atomic. After a lost connection it may have run, or may still run."""
        source, tag = script(name), self.login.tag
        try:
            return await self.execute_command("EVALSHA", source.digest, 1, tag, *arguments)
        except NoScriptError:  # the server was restarted, or replaced
            return await self.execute_command("EVAL", source.text, 1, tag, *arguments)

    async def execute_command(self, *words: Part) -> Any:
        """Send one command; it may have run after an error, as in :meth:`run`."""
        try:
            return await self._execute(*words)
        except ReadOnlyError:
            if self._client is not None:  # a demoted master: its host name may lead to the new one
                await self._client.connection_pool.disconnect(inuse_connections=False)
            raise

    async def close(self) -> None:
        """Close all connections; the next call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose(close_connection_pool=True)

    @property
    def _execute(self) -> Callable[..., Awaitable[Any]]:
        forks.check_process()
        if self._client is None:
            pool = BlockingConnectionPool(
                max_connections=_CONNECTIONS,
                timeout=self.answers_within.total_seconds(),
                connection_class=self._connection_class,
                **self._settings(),
            )
            self._client = Redis(connection_pool=pool)
            # Answers stay as the server gives them, whatever the driver's version is.
            self._client.response_callbacks.clear()
        return cast("Any", self._client).execute_command  # the driver leaves its types open

    @property
    def _connection_class(self) -> type[Connection]:
        return _EncryptedConnection if self.login.tls else _PlainConnection

    def _settings(self) -> dict[str, Any]:
        login = self.login
        settings: dict[str, Any] = {
            "host": login.host,
            "port": login.port,
            "db": login.database,
            "username": login.user,
            "password": login.password,
            "protocol": 2,
            "socket_connect_timeout": _CONNECTS_WITHIN_SECONDS,
            "socket_timeout": self.answers_within.total_seconds(),
            "socket_keepalive": True,
            "client_name": "postdate",
            # A lost command may have run: the core decides whether to repeat it.
            "retry": Retry(NoBackoff(), 0),
        }
        if login.tls:
            settings |= {"ssl_ca_certs": login.authority, "ssl_check_hostname": True}
        return settings

    async def open_connection(self) -> Connection:
        """Open a connection outside the pool. The caller closes it: a subscribed connection can do nothing else."""
        connection = self._connection_class(**self._settings())
        await connection.connect()
        return connection


class RedisServer:
    """A server as a store or queues use it: `RedisConnections` with errors translated by ``error_types``."""

    def __init__(self, connections: RedisConnections, error_types: RedisErrorTypes) -> None:
        self._connections, self.error_types = connections, error_types
        self.overdrawn_bytes = 0
        """Bytes added minus bytes completed by commits, since the memory is full."""

    def __repr__(self) -> str:
        return f"{self.login.description}, prefix {self.login.prefix!r}"

    @property
    def login(self) -> RedisLogin:
        return self._connections.login

    async def run(self, name: str, *arguments: Part) -> Any:
        """Run a script, which is atomic. After a lost connection it may have run, or may still run."""
        return await self.translate_errors(self._connections.run(name, *arguments))

    async def execute_command(self, *words: Part) -> Any:
        return await self.translate_errors(self._connections.execute_command(*words))

    async def translate_errors(self, call: Awaitable[T]) -> T:
        """Await a call and translate the driver's errors."""
        try:
            return await call
        except (RedisError, OSError) as error:
            raise translate(error, self.error_types, self.login.description) from error


async def cancel_task(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end.

    The cancellation is repeated, because ``asyncio.wait_for`` of Python 3.11 loses one that comes just as the driver's
    wait ends. The task would run for ever.
    """
    while task is not None and not task.done():
        task.cancel()
        await cast("Any", asyncio.wait({task}, timeout=_CANCELLED_AGAIN_AFTER_SECONDS))


# --- the server's clock, version, and the settings that decide about durability ---------------------------------------


_OLDEST: Final = (7, 0)  # the oldest version that is accepted
_REPORTED_SETTINGS: Final = (
    "aof_enabled",
    "aof_last_write_status",
    "maxmemory",
    "maxmemory_policy",
    "rdb_last_bgsave_status",
    "role",
    "connected_slaves",
    "redis_mode",
)


async def server_now(server: RedisServer) -> datetime:
    seconds, microseconds = await server.execute_command("TIME")
    return from_microseconds(int(seconds) * 1_000_000 + int(microseconds))


async def _read_info(server: RedisServer) -> dict[str, str]:
    reply: bytes = await server.execute_command("INFO")
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


async def server_facts(server: RedisServer) -> ServerFacts:
    info = await _read_info(server)
    settings = {name: info[name] for name in _REPORTED_SETTINGS if name in info}
    return ServerFacts(
        "Redis", info.get("redis_version", "without a version"), await server_now(server), None, None, settings
    )


async def check_eviction(server: RedisServer) -> None:
    """Raise `ConfigurationError` when the server is too old, or evicts keys without a time to live."""
    info = await _read_info(server)
    version = info.get("redis_version", "")
    numbers = tuple(int(number) for number in re.findall("[0-9]+", version)[:2])
    if numbers and numbers < _OLDEST:
        raise errors.ConfigurationError(
            f"{server.login.description} is version {version}; Redis 7.0 or newer is needed"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy.startswith("allkeys") and info.get("maxmemory", "0") != "0":
        raise errors.ConfigurationError(
            f"{server.login.description} removes keys when its memory is full (maxmemory-policy {policy}): "
            f"messages "
            f"would be lost; set maxmemory-policy noeviction"
        )


# --- parts that one script does atomically: the native transaction of these queues ------------------------------------


_EACH_BYTES: Final = 512
"""Estimate of a message's memory besides headers and body."""

# The most that commits may add beyond what they complete while the memory is full.
_MOST_OVERDRAWN_BYTES: Final = 1024 * 1024


class RedisTransaction:
    """The parts of one run of ``transact.lua``. Nothing is changed before :meth:`commit`."""

    def __init__(self, database: object) -> None:
        self.database = database
        self.commit_callbacks: list[Callable[[], None]] = []
        """Functions to call after a successful commit, but not when it is refused or its answer is lost."""
        self.ended_messages: list[DelayedMessage | Envelope] = []
        """Messages that the transaction completes.

        With a full memory it is allowed unless it adds many more bytes than it completes.
        """
        self._parts: list[Part] = []
        self._added_messages: list[DelayedMessage | Envelope] = []

    def add(self, *parts: Part, messages: Sequence[DelayedMessage | Envelope] = ()) -> None:
        """Add one part, as ``transact.lua`` describes it, and the messages that the part adds."""
        self._parts += parts
        self._added_messages += messages

    async def commit(self, server: RedisServer) -> Sequence[int]:
        """Execute all parts; return the indexes of messages without a queue, if the send is not strict.

        After `ClaimLost`, `DuplicateMessage` and `QueueNotFound` nothing was changed.
        """
        kind, *values = await self._run_script(server)
        match kind:
            case b"done":
                for each in self.commit_callbacks:
                    each()
                return values[0]
            case b"queue":
                raise errors.QueueNotFound.of(values[0].decode())
            case b"known":
                raise errors.DuplicateMessage.of(values[0].decode(errors="replace"))
            case b"claim":
                raise errors.ClaimLost.of(values[0].decode(errors="replace"))
            case _:
                raise errors.ClaimLost("the message is not claimed by this process any more")

    async def _run_script(self, server: RedisServer) -> Sequence[Any]:
        if self.ended_messages and not self._added_messages:
            return await server.run("settle", *self._parts)
        try:
            answer = await server.run("transact", *self._parts)
        except errors.PostdateError as error:
            added_bytes = max(0, _bytes_of(self._added_messages) - _bytes_of(self.ended_messages))
            is_full = isinstance(error.__cause__, OutOfMemoryError)
            if not (self.ended_messages and is_full and server.overdrawn_bytes + added_bytes <= _MOST_OVERDRAWN_BYTES):
                raise
            # Before the await, because concurrent commits near the limit must see it.
            server.overdrawn_bytes += added_bytes
            answer = await server.run("settle", *self._parts)
            if answer[0] != b"done":
                server.overdrawn_bytes = max(0, server.overdrawn_bytes - added_bytes)
        else:
            server.overdrawn_bytes = 0
        return answer


def _bytes_of(messages: Sequence[DelayedMessage | Envelope]) -> int:
    return sum(_EACH_BYTES + size_of(each) for each in messages)


def transaction_of(transaction: Any, database: object) -> RedisTransaction:
    """Return the transaction; raise `UnsupportedTransactionMode` unless it belongs to this database."""
    if not isinstance(transaction, RedisTransaction) or transaction.database != database:
        raise errors.UnsupportedTransactionMode(
            "a store in Redis shares transactions with queues of its own database only"
        )
    return transaction


def finish_parts(claims: Sequence[Claim]) -> list[Part]:
    """Return claims as script arguments: their number, then id and token of each."""
    return [len(claims), *(part for claim in claims for part in (claim.message.message_id, str(claim.token)))]
