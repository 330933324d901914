"""The liveness of a process: a subscription that ends with the process, and a heartbeat that stops when it freezes.

A process that has claims is a *holder*. Each heartbeat also checks the other holders. A holder is dead without its
subscription and some seconds without a heartbeat. It is frozen after ``holds_at_most`` without a heartbeat. The server
releases the messages of both, and their tokens become invalid. The heartbeat has a thread of its own, because a handler
may block the event loop for long.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, cast

from redis.asyncio.connection import Connection
from redis.exceptions import RedisError
from typing_extensions import override

from postdate.backends.redis.layout import Part, format_instant
from postdate.backends.redis.login import RedisLogin, parse_address
from postdate.backends.redis.server import STORE, RedisConnections, RedisServer, cancel_task, translate
from postdate.clock import SystemClock, steady_seconds
from postdate.errors import ConfigurationError, PostdateError
from postdate.runtime import forks
from postdate.runtime.housekeeping import Chore, Housekeeping
from postdate.runtime.resource import CallHealth, resource_at
from postdate.runtime.threads import run_in_thread

# --- subscriptions, on one connection that is renewed while there is a listener ---------------------------------------


OnMessage = Callable[[bytes | None], None]
"""A callback for the text of a message; it gets ``None`` when messages may have been missed."""

_SPEAK_EVERY_SECONDS: Final = 5.0  # after so long without a message, a PING shows whether the connection lives
_CONNECT_AGAIN_AFTER_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0)  # after each failure in a row, then the last one

log = logging.getLogger("postdate.redis")


class Subscriptions(forks.ForkAware):
    def __init__(self, connections: RedisConnections) -> None:
        self._connections = connections
        self._callbacks: dict[bytes, list[OnMessage]] = {}
        self._subscription_events: dict[bytes, asyncio.Event] = {}
        self._subscribed_at: dict[bytes, float] = {}
        """When the server confirmed each subscription of the present connection, in seconds since boot."""
        self._clock = SystemClock()
        self._connection: Connection | None = None
        self._was_connected = False
        self._task: asyncio.Task[None] | None = None
        self._failure: RedisError | OSError | None = None
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Forget connection, task and listeners, which belong to the parent."""
        forks.prevent_destruction((self._connection, self._task))
        self._connection = self._task = self._failure = None
        self._callbacks, self._subscription_events, self._subscribed_at, self._was_connected = {}, {}, {}, False

    async def listen(self, channel: str, callback: OnMessage) -> Callable[[], None]:
        """Call ``callback`` with each message on a channel from now on; return a function that stops it."""
        name = channel.encode()
        self._callbacks.setdefault(name, []).append(callback)
        subscription_event = self._subscription_events.setdefault(name, asyncio.Event())
        if self._task is None or self._task.done():
            self._failure = None
            self._task = asyncio.create_task(self._run(), name="postdate-redis-listening")
        try:
            if not subscription_event.is_set():
                await self._subscribe(name)  # perhaps again: an earlier call may have timed out
            await self._wait_until_subscribed(subscription_event)
        except BaseException:
            self._forget_callback(name, callback)
            raise
        return lambda: self._forget_callback(name, callback)

    def subscribed_at(self, channel: str) -> float | None:
        """Return the second since boot at which an uninterrupted subscription began; ``None`` without one."""
        return self._subscribed_at.get(channel.encode())

    async def _wait_until_subscribed(self, subscription_event: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self._connections.answers_within.total_seconds()):
                await subscription_event.wait()
        except TimeoutError as error:
            raise self._failure or TimeoutError("a subscription was not answered") from error

    def _forget_callback(self, name: bytes, callback: OnMessage) -> None:
        listeners = self._callbacks.get(name, [])
        if callback in listeners:
            listeners.remove(callback)
        if not listeners:  # the reader ends the subscription at its next pass
            self._callbacks.pop(name, None)

    async def close(self) -> None:
        task, self._task = self._task, None
        await cancel_task(task)
        self._callbacks.clear()
        self._subscription_events.clear()

    async def _run(self) -> None:
        failures, login = 0, self._connections.login
        resource = resource_at(login.identity, login.description)
        calls = resource.calls("no connection to Redis for notifications", log, logging.WARNING)
        while True:
            try:
                await self._listen_on_connection(calls)
            except (RedisError, OSError) as error:
                failures = 0 if self._was_connected else failures + 1
                self._failure = error
                calls.report_failure(translate(error, STORE, login.description), steady_seconds())
            pauses = _CONNECT_AGAIN_AFTER_SECONDS
            await asyncio.sleep(pauses[min(failures, len(pauses) - 1)])

    async def _listen_on_connection(self, calls: CallHealth) -> None:
        """Read from one connection until it is lost."""
        self._was_connected = False
        connection = await self._connections.open_connection()
        try:
            self._was_connected, self._connection = True, connection
            self._subscription_events = {
                name: self._subscription_events.get(name, asyncio.Event()) for name in self._callbacks
            }
            await self._subscribe(*self._callbacks)
            calls.report_success(steady_seconds())
            await self._read_messages(connection)
        finally:
            self._connection = None
            self._subscribed_at.clear()
            await connection.disconnect(nowait=True)

    async def _read_messages(self, connection: Connection) -> None:
        clock = asyncio.get_running_loop().time
        last_read_at = clock()
        while True:
            await self._unsubscribe_unused(connection)
            message = await cast("Any", connection).read_response(timeout=_SPEAK_EVERY_SECONDS)
            if message is not None:
                last_read_at = clock()
                self._on_message(message)
            elif clock() - last_read_at > self._connections.answers_within.total_seconds():
                raise ConnectionError(f"nothing was received for {clock() - last_read_at:.0f} s")
            else:
                await connection.send_command("PING")

    def _on_message(self, message: Sequence[Any]) -> None:
        if len(message) < 3:
            return  # the answer to PING
        kind, name, text = message[:3]
        if kind == b"subscribe":
            self._subscription_events.setdefault(name, asyncio.Event()).set()
            self._subscribed_at.setdefault(name, self._clock.seconds_since_boot())
            text = None  # No message is missed from here on; listeners must poll once.
        elif kind != b"message":
            return
        for callback in list(self._callbacks.get(name, ())):
            callback(text)

    async def _unsubscribe_unused(self, connection: Connection) -> None:
        """End subscriptions whose listeners have all stopped."""
        if names := self._subscription_events.keys() - self._callbacks.keys():
            for name in names:  # Before the command: a listener that joins meanwhile must subscribe again, after it.
                del self._subscription_events[name]
                self._subscribed_at.pop(name, None)
            await connection.send_command("UNSUBSCRIBE", *names)

    async def _subscribe(self, *names: bytes) -> None:
        """Subscribe if connected; otherwise the next connection does it."""
        if (connection := self._connection) is None or not names:
            return
        if not connection.is_connected:  # Sending on it would reconnect it, without a reader.
            return
        try:
            await connection.send_command("SUBSCRIBE", *names)
        except (RedisError, OSError) as error:  # The reader meets the same error, and subscribes again.
            log.debug("a subscription could not be sent: %s", error)


# --- heartbeats -------------------------------------------------------------------------------------------------------


HOLDS_AT_MOST: Final = timedelta(seconds=60)  # default of ``holds_at_most``
_BEATS_EVERY_SECONDS: Final = 1.0
_DEAD_AFTER: Final = timedelta(seconds=3)
"""A holder without subscription and heartbeat for so long is dead; reconnecting takes less time than that."""

_CERTAIN_AFTER_BEAT_SECONDS: Final = _DEAD_AFTER.total_seconds() / 2
"""Until so long after a heartbeat, no other process can have declared this one dead; as much time remains to act."""

Call = tuple[Part, ...]
"""The name of a script, and its arguments."""

_MICROSECOND: Final = timedelta(microseconds=1)


class RedisLiveness(forks.ForkAware):
    """One holder, from its first claim on. After ``holds_at_most`` without a heartbeat, it loses its claims."""

    def __init__(self, connections: RedisConnections, listening: Subscriptions, holds_at_most: timedelta) -> None:
        self._connections = connections  # of the event loop; the heartbeat thread has connections of its own
        self._listening = listening
        self.holds_at_most = holds_at_most
        self._clock = SystemClock()
        self.process_facts: dict[str, Any] = {}
        """What the process reports about itself besides its place; sent with the next heartbeat."""
        self.loss_callbacks: list[Callable[[], None]] = []
        """Functions to call when all claims are void."""
        self._started_at: datetime | None = None
        self._name: str | None = None  # chosen before the registration, which may need several attempts
        self._holder: str | None = None  # the same name after the registration; read by the heartbeat thread
        self._last_beat_at = -math.inf
        """When the last answered heartbeat, or the registration, was requested; in seconds since boot."""
        self._beats: Housekeeping | None = None  # the heartbeat thread
        self._stop_subscription: Callable[[], None] | None = None
        """A function that ends the subscription which shows that ``_name`` is alive."""
        self._registration_lock = asyncio.Lock()  # so that concurrent first claims register one holder
        self.postponed_calls: list[Call] = []
        """Scripts to run with the next heartbeat that the server answers. Any thread may append."""
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Forget the holder, which belongs to the parent: this process becomes another holder with its first claim."""
        forks.prevent_destruction(self._beats)
        self._started_at = self._name = self._holder = self._beats = self._stop_subscription = None
        self._last_beat_at = -math.inf
        self._registration_lock = asyncio.Lock()
        self.postponed_calls = []

    @property
    def current_holder(self) -> str:
        """The name of the holder; empty when there is none."""
        return self._holder or ""

    @property
    def is_in_force(self) -> bool:
        """Return whether, by our own clock, no other process can have claimed our messages."""
        silent_seconds = self._clock.seconds_since_boot() - self._last_beat_at
        return self._holder is not None and silent_seconds < self.holds_at_most.total_seconds()

    @property
    def is_certain(self) -> bool:
        """Return whether the server certainly counts this process as alive, so that no other process has its claims.

        The server does so within seconds of a heartbeat, and as long as the subscription of the last heartbeat stands.
        A subscription that was made after that heartbeat proves nothing: another process may have checked in between.
        """
        if not self.is_in_force:
            return False
        if self._clock.seconds_since_boot() - self._last_beat_at < _CERTAIN_AFTER_BEAT_SECONDS:
            return True
        subscribed_since = self._listening.subscribed_at(self._channel_of(self.current_holder))
        return subscribed_since is not None and subscribed_since <= self._last_beat_at

    def _channel_of(self, holder: str) -> str:
        return f"{self._connections.login.tag}:alive:{holder}"

    async def ensure_holder(self) -> str:
        """Return the current holder's name; register it with the server first if needed."""
        async with self._registration_lock:
            if self._holder is None:
                self._holder = await self._register()
            if self._beats is None:
                self._beats = self._start_heartbeats()
            return self._holder

    async def _register(self) -> str:
        # Kept until it is registered: a second attempt uses the same name.
        holder = self._name = self._name or secrets.token_hex(8)
        if self._stop_subscription is None:  # otherwise an earlier attempt to register failed after this step
            # The subscription itself shows that the process is alive; its messages do not matter.
            self._stop_subscription = await self._listening.listen(self._channel_of(holder), lambda _text: None)
        requested_at = self._clock.seconds_since_boot()
        self._started_at = self._started_at or self._clock.now()
        await self._connections.run("register", holder, self._description(), self.holds_at_most // _MICROSECOND)
        self._last_beat_at = requested_at
        return holder

    def _description(self) -> str:
        started_text = format_instant(self._started_at or self._clock.now())
        return json.dumps(
            {"pid": os.getpid(), "machine": platform.node(), "started": started_text, **self.process_facts}
        )

    def void_holder(self, holder: str) -> None:
        """Void all claims if ``holder``, which the server no longer knows, is the current one."""
        if holder == self._holder:
            place = self._connections.login.description
            log.warning(
                "other processes may claim what this process had claimed in %s: its heartbeat came too late", place
            )
            self._forget_name()
            for callback in list(self.loss_callbacks):
                callback()

    def _forget_name(self) -> None:
        """Stop showing that the holder is alive; the next claim registers another one."""
        self._holder = self._name = None
        if self._stop_subscription is not None:
            self._stop_subscription()
            self._stop_subscription = None

    def _start_heartbeats(self) -> Housekeeping:
        loop, runner = asyncio.get_running_loop(), asyncio.Runner()
        # A heartbeat that hangs must leave time for further ones before the server counts this process as frozen.
        answers_within = min(self._connections.answers_within, self.holds_at_most / 3)
        connections = RedisConnections(self._connections.login, answers_within)

        def send_heartbeat() -> bool:
            holder = self._holder
            if loop.is_closed():  # no handler can run any more
                beats.stop()
            elif holder is not None and not runner.run(self._send_heartbeat(connections, holder)):
                loop.call_soon_threadsafe(self.void_holder, holder)
            return False

        def close_runner() -> None:
            with runner:
                runner.run(connections.close())

        chores = [Chore("cannot write the heartbeat of this process", send_heartbeat)]
        beats = Housekeeping(
            resource_at(connections.login.identity, connections.login.description),
            _BEATS_EVERY_SECONDS,
            chores,
            close_runner,
        )
        beats.start()
        return beats

    async def _send_heartbeat(self, connections: RedisConnections, holder: str) -> bool:
        """Send a heartbeat and run postponed scripts; return whether the holder still has its claims.

        The holder has lost them once :attr:`is_in_force` was false, even if no other process claimed the messages:
        callers that asked then have dropped their claims without a call to the server, which would keep them for ever.
        """
        requested_at = self._clock.seconds_since_boot()
        try:
            is_registered = bool(
                await connections.run("beat", holder, _DEAD_AFTER // _MICROSECOND, self._description())
            )
            if is_registered and not self.is_in_force and holder == self._holder:
                await connections.run("unregister", holder)
                return False
            if is_registered:
                self._last_beat_at = requested_at
            while is_registered and self.postponed_calls:
                name, *arguments = self.postponed_calls[0]
                await connections.run(str(name), *arguments)
                self.postponed_calls.pop(0)
        except (RedisError, OSError) as error:
            raise translate(error, STORE, connections.login.description) from error
        return is_registered

    async def close(self) -> None:
        beats, self._beats = self._beats, None
        if beats is not None:
            beats.stop()
            await run_in_thread(beats.join, _BEATS_EVERY_SECONDS)  # a heartbeat without an answer ends by itself
        holder = self._holder
        self._forget_name()
        if holder is not None:
            try:
                await self._connections.run("unregister", holder)
            except (RedisError, OSError) as error:  # Other processes find the holder dead.
                place = self._connections.login.description
                log.info("what was held in %s is free only when others notice the end: %s", place, error)


# --- claims in the name of a holder -----------------------------------------------------------------------------------


class Claimer(forks.ForkAware):
    """Claims for a store or one receiver, one call at a time.

    A claim whose answer is lost, or whose caller was cancelled, may cover messages that this process does not know. It
    is void from the next claim on, or from the next heartbeat if that comes first. The server then releases its
    messages, even if the claim arrives later.
    """

    def __init__(self, server: RedisServer, liveness: RedisLiveness) -> None:
        self._server, self._liveness = server, liveness
        self._name = secrets.token_hex(4)
        self._number = 0
        self._doubtful_tokens: dict[str, int] = {}
        self._claim_lock = asyncio.Lock()
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        self._name, self._number = secrets.token_hex(4), 0
        self._doubtful_tokens, self._claim_lock = {}, asyncio.Lock()

    async def claim(self, name: str, store_or_queue: str, *arguments: Any) -> tuple[str, Any]:
        """Run a script with ``store_or_queue`` (a store or a queue), holder, token and ``arguments``.

        Returns token and answer. After an error no message stays claimed.
        """
        async with self._claim_lock:
            for _ in range(2):
                holder = await self._server.translate_errors(self._liveness.ensure_holder())
                await self._undo_doubtful_claims(holder)
                self._number += 1
                token = f"{holder}:{self._name}:{self._number}"
                try:
                    answer = await self._server.run(name, store_or_queue, holder, token, *arguments)
                except BaseException:
                    self.void_claim(token)
                    raise
                if answer is not None:
                    return token, answer
                self._liveness.void_holder(holder)
            raise self._server.error_types.unreachable(
                f"{self._server.login.description} lost the registration of this process twice in a row"
            )

    def has_created(self, token: str) -> bool:
        """Return whether a token is from this object; it may be valid or not."""
        return token.split(":")[1] == self._name

    def void_claim(self, token: str) -> None:
        """Void a claim whose messages did not reach the caller, before the next claim and with the next heartbeat.

        There may be no next claim for a long time, as in a store in which nothing else is due.
        """
        holder, number = token.partition(":")[0], int(token.rpartition(":")[2])
        self._doubtful_tokens[token] = number
        self._liveness.postponed_calls.append(("undo", holder, self._name, number, number + 1))

    async def _undo_doubtful_claims(self, holder: str) -> None:
        for token, number in list(self._doubtful_tokens.items()):
            if token.startswith(f"{holder}:"):
                await self._server.run("undo", holder, self._name, number, number + 1)
            self._doubtful_tokens.pop(token, None)

    async def close(self) -> None:
        """Release all messages of its claims; if that fails, a later heartbeat releases them."""
        async with self._claim_lock:
            if not (holder := self._liveness.current_holder) or not self._number:
                return
            arguments = (holder, self._name, 0, self._number + 1)
            try:
                await self._server.run("undo", *arguments)
            except BaseException:
                self._liveness.postponed_calls.append(("undo", *arguments))
                raise

    async def close_or_log(self) -> None:
        """Call `close`, but only log when the server does not answer."""
        try:
            await self.close()
        except PostdateError as error:
            log.info("what was held in %r is given back later: %s", self._server, error)


# --- one database, which a store and queues share ---------------------------------------------------------------------


_TIMES: Final = "pass it to the database object, not to the store or transport that is made from it"


class OpenRedis:
    """One database of a server, opened at first use and closed by its last user. See :class:`Redis`."""

    def __init__(
        self,
        address: str | RedisLogin,
        *,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        self.login = address if isinstance(address, RedisLogin) else parse_address(address)
        self.connections = RedisConnections(self.login, answers_within)
        self.subscriptions = Subscriptions(self.connections)
        self.liveness = RedisLiveness(self.connections, self.subscriptions, holds_at_most or HOLDS_AT_MOST)
        self._users = set[object]()

    @classmethod
    def of(
        cls, address: str | RedisLogin | OpenRedis, holds_at_most: timedelta | None, answers_within: timedelta | None
    ) -> OpenRedis:
        """Return the given database, or a new one at the address.

        Durations must not differ from the given database's.
        """
        if not isinstance(address, OpenRedis):
            return cls(address, holds_at_most=holds_at_most, answers_within=answers_within)
        if holds_at_most not in {None, address.liveness.holds_at_most}:
            raise ConfigurationError(
                f"holds_at_most={holds_at_most!r} is for all of {address.login.description}: {_TIMES}"
            )
        if answers_within not in {None, address.connections.answers_within}:
            raise ConfigurationError(
                f"answers_within={answers_within!r} is for all of {address.login.description}: {_TIMES}"
            )
        return address

    def attach_user(self, user: object) -> None:
        self._users.add(user)

    async def detach_user(self, user: object) -> bool:
        """Remove an adapter that is closed. The last one closes the database: then return ``True``."""
        self._users.discard(user)
        if self._users:
            return False
        await self.liveness.close()
        await self.subscriptions.close()
        await self.connections.close()
        return True
