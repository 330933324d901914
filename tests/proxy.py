"""A TCP link that breaks on demand, between a client under test and a real server."""

import asyncio
import socket
import ssl
import struct
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import ByteStream, SocketAttribute, TaskStatus
from anyio.from_thread import start_blocking_portal
from anyio.streams.tls import TLSListener

LOOPBACK = "127.0.0.1"
_CHUNK_BYTES = 65_536
_CHUNKS_IN_FLIGHT = 256
_OBEYS_WITHIN_SECONDS = 30.0


class FaultyLink:
    """Listens on loopback and forwards to a server; can be cut, stalled, slowed down, made forgetful, and restored.

    It lives in a thread of its own: blocking and asynchronous tests use it alike, and every method returns when its
    effect has taken place. A context manager; at its end nothing listens and every connection is closed.

    Args:
        host: Where the server is.
        port: Its port there.
        tls: What clients see of it is encrypted by this; the server is spoken to in the clear.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target, self._tls = (host, port), tls
        self._port = self._asked = 0
        self._latency_seconds = 0.0
        self._accepted = 0
        self._thread = threading.Thread(target=self._run, name="faulty-link")
        self._started: Future[asyncio.AbstractEventLoop] = Future()

    # --- what a test uses ---

    @property
    def port(self) -> int:
        """Where it listens, on 127.0.0.1; the same for the whole of its life."""
        return self._port

    @property
    def accepted(self) -> int:
        """How many connections clients have opened so far."""
        return self._accepted

    @property
    def asked(self) -> int:
        """How many bytes clients have sent so far."""
        return self._asked

    def cut(self) -> None:
        """Reset all connections, on both sides, and refuse new ones. What was on its way is lost."""
        self._do(self._cut)

    def reset(self) -> None:
        """Reset all connections, on both sides; the next one is accepted."""
        self._do(self._reset)

    def stall(self, *, replies_only: bool = False) -> None:
        """Accept connections and bytes, and forward none: no error, no end, as behind a network that has gone.

        Args:
            replies_only: Let the client's bytes through. The server works, and nobody hears that it did.
        """
        self._do(lambda: self._stall(replies_only=replies_only))

    def forget(self) -> None:
        """Never carry a byte again on the connections that are open now, and go on acknowledging what comes on them.

        As a balancer or a sidecar that was replaced: neither end hears of it, not even of the other's end. New
        connections work. Nothing but :meth:`cut` and :meth:`reset` ends the old ones.
        """
        self._do(self._forget)

    def delay(self, latency: timedelta) -> None:
        """Let everything that is read from now on arrive later by ``latency``, in each direction."""
        self._latency_seconds = latency / timedelta(seconds=1)

    def restore(self) -> None:
        """Listen again, forward what waits, without delay: a faithful link."""
        self._do(self._restore)

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop = self._started.result(_OBEYS_WITHIN_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_OBEYS_WITHIN_SECONDS)
        assert not self._thread.is_alive(), "the link does not end"

    # --- its thread ---

    def _do(self, command: Callable[[], Awaitable[None]]) -> None:
        async def obey() -> None:
            await command()

        asyncio.run_coroutine_threadsafe(obey(), self._loop).result(_OBEYS_WITHIN_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        self._requests, self._replies = asyncio.Event(), asyncio.Event()
        self._connections: dict[socket.socket, asyncio.Task[None]] = {}
        self._forgotten: dict[socket.socket, asyncio.Event] = {}
        self._listener: socket.socket | None = None
        await self._restore()
        self._started.set_result(asyncio.get_running_loop())
        await self._ended.wait()
        await self._cut()

    async def _restore(self) -> None:
        self._latency_seconds = 0.0
        self._requests.set()
        self._replies.set()
        self._listen()

    async def _stall(self, *, replies_only: bool) -> None:
        self._replies.clear()
        if not replies_only:
            self._requests.clear()

    async def _forget(self) -> None:
        for forgotten in self._forgotten.values():
            forgotten.set()

    async def _reset(self) -> None:
        was_cut = self._listener is None
        await self._cut()
        if not was_cut:
            self._listen()

    async def _cut(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()  # resets those that nobody has accepted yet
            self._listener = None
        connections = dict(self._connections)
        for client, task in connections.items():
            _close_with_reset(client)
            task.cancel()
        await asyncio.gather(*connections.values(), return_exceptions=True)
        for client in connections:
            client.close()

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server((LOOPBACK, self._port), backlog=128)
            self._listener.setblocking(False)
            self._port = self._listener.getsockname()[1]
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        # By hand: a server of asyncio's own can have accepted a connection of which it has told nobody yet, and a cut
        # in that moment would leave it open.
        with suppress(BlockingIOError):
            client, _ = listener.accept()
            client.setblocking(False)
            self._accepted += 1
            self._forgotten[client] = forgotten = asyncio.Event()
            task = asyncio.get_running_loop().create_task(self._carry(client, forgotten))
            self._connections[client] = task
            task.add_done_callback(lambda _: (self._connections.pop(client, None), self._forgotten.pop(client, None)))

    async def _carry(self, client: socket.socket, forgotten: asyncio.Event) -> None:
        """Forward one connection until both directions have ended, or one of them breaks."""
        writers: list[asyncio.StreamWriter] = []
        try:
            reader, writer = await self._accepted_by(client)
            writers.append(writer)
            await self._requests.wait()  # on a stalled link the server does not hear of it
            server_reader, server_writer = await asyncio.open_connection(*self._target)
            writers.append(server_writer)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, server_writer, self._requests, forgotten))
                pumps.create_task(self._pump(server_reader, writer, self._replies, forgotten))
        except* (OSError, asyncio.CancelledError):
            _abort(writers)
        finally:
            for end in writers:
                end.close()
            try:
                for end in writers:
                    with suppress(OSError):
                        await end.wait_closed()
            except asyncio.CancelledError:  # cut while one of them says what it has left
                _abort(writers)
            client.close()

    async def _accepted_by(self, client: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, client, ssl=self._tls)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        gate: asyncio.Event,
        forgotten: asyncio.Event,
    ) -> None:
        """Forward one direction until its end, which is forwarded too. What waits at a shut gate is not lost."""
        in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_IN_FLIGHT)
        now = asyncio.get_running_loop().time

        async def take() -> None:
            chunk = b"?"
            while chunk:
                try:
                    chunk = await reader.read(_CHUNK_BYTES)
                except ConnectionError:
                    if not forgotten.is_set():
                        raise
                    chunk = b""
                if gate is self._requests:
                    self._asked += len(chunk)
                await in_flight.put((now() + self._latency_seconds, chunk))

        async def deliver() -> None:
            chunk = b"?"
            while chunk:
                arrives, chunk = await in_flight.get()
                await asyncio.sleep(max(0.0, arrives - now()))
                await gate.wait()
                if chunk and not forgotten.is_set():
                    writer.write(chunk)
                    await writer.drain()
            if forgotten.is_set():  # the other end does not hear that this one has gone
                await asyncio.Event().wait()
            if writer.can_write_eof():
                writer.write_eof()
            else:
                writer.close()

        async with asyncio.TaskGroup() as both:
            both.create_task(take())
            both.create_task(deliver())


def _abort(writers: Iterable[asyncio.StreamWriter]) -> None:
    for each in writers:
        end = each.get_extra_info("socket")
        if end is not None:  # one of TLS has none any more once it is closed
            _close_with_reset(end)
        each.transport.abort()


def _close_with_reset(end: socket.socket) -> None:
    """Let its close be an error for the peer, who could take an orderly end for a server's goodbye."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextmanager
def in_tls(host: str, port: int, context: ssl.SSLContext) -> Generator[int]:
    """Listen on loopback in TLS, for a server that has none; yield the port."""

    async def serve(*, task_status: TaskStatus[int]) -> None:
        async with await anyio.create_tcp_listener(local_host=LOOPBACK) as plain:
            task_status.started(plain.extra(SocketAttribute.local_port))
            await TLSListener(plain, context, standard_compatible=False).serve(carry)

    async def carry(client: ByteStream) -> None:
        async with client, await anyio.connect_tcp(host, port) as server, anyio.create_task_group() as both:
            both.start_soon(pump, client, server)
            await pump(server, client)
            both.cancel_scope.cancel()

    async def pump(source: ByteStream, target: ByteStream) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for chunk in source:
                await target.send(chunk)
            await target.aclose()

    with start_blocking_portal() as portal:
        ending, found = portal.start_task(serve)
        yield found
        ending.cancel()
