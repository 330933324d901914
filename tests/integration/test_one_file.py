"""Endpoints and writers on one file, under what applications do to them: each of these went wrong once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
from tests.waiting import patience

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    HandlerContext,
    LocalTransport,
    Recoverability,
    SqliteStore,
)
from postdate.backends.sqlite.access import FileAccess
from postdate.core.recoverability import Host, error_headers
from postdate.errors import MessageError, StoreError
from postdate.ports import Outcome

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@dataclass
class Note:
    number: int


@asynccontextmanager
async def opened(path: Path) -> AsyncGenerator[tuple[SqliteStore, LocalTransport]]:
    store, transport = SqliteStore(path), LocalTransport(path)
    try:
        with patience():
            yield store, transport
    finally:
        await store.close()
        await transport.close()


def endpoint_on(store: SqliteStore, transport: LocalTransport, **settings: object) -> Endpoint:
    return Endpoint("notes", transport=transport, delayed_delivery=DelayedDelivery(store), **settings)  # type: ignore[arg-type]


def message(number: int, due: datetime = NOW) -> DelayedMessage:
    return DelayedMessage(f"m-{number}", due, "notes")


async def test_writers_cancelled_by_asyncio_leave_no_other_writer_waiting(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as (store, _):

        async def impatient(number: int) -> None:
            try:
                async with asyncio.timeout(0.0005 * (number % 3)):
                    await store.store(message(number), NOW)
            except TimeoutError:
                pass

        impatients = [asyncio.create_task(impatient(number)) for number in range(100)]
        patients = [asyncio.create_task(store.store(message(1000 + number), NOW)) for number in range(100)]
        await asyncio.gather(*impatients, *patients)
        stored = {each.message.message_id for each in await store.claim_due(NOW + timedelta(hours=1), 1000)}
        assert {f"m-{1000 + number}" for number in range(100)} <= stored


async def test_a_handler_that_lets_a_foreign_cancellation_out_fails_alone(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as (store, transport):
        policy = Recoverability(immediate_retries=0, delayed_retries=0)
        endpoint = endpoint_on(store, transport, recoverability=policy)
        handled, both = list[int](), anyio.Event()

        @endpoint.handler(Note)
        async def handle(note: Note, _: HandlerContext) -> None:
            if note.number == 0:
                raise asyncio.CancelledError
            handled.append(note.number)
            both.set()

        async with endpoint:
            await endpoint.send(Note(0))
            await endpoint.send(Note(1))
            await both.wait()
        assert handled == [1]
        assert (await transport.queue_lengths())["error"] == 1


async def test_an_endpoint_starts_again_after_it_was_stopped(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as (store, transport):
        endpoint = endpoint_on(store, transport)
        endpoint.stop()
        arrived = anyio.Event()

        @endpoint.handler(Note)
        async def handle(_: Note, __: HandlerContext) -> None:
            arrived.set()

        async with endpoint:
            pass
        async with endpoint:
            await endpoint.send(Note(1), delay=timedelta(milliseconds=20))
            await arrived.wait()


async def test_an_application_that_holds_every_common_thread_can_send(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as (store, transport):
        endpoint = endpoint_on(store, transport, send_only=True)
        async with endpoint:
            await transport.create_queues(["notes"])
            threads = int(anyio.to_thread.current_default_thread_limiter().total_tokens)

            def send() -> None:
                anyio.from_thread.run(lambda: endpoint.send(b"x", destination="notes"))

            async with anyio.create_task_group() as tasks:
                for _ in range(threads):
                    tasks.start_soon(anyio.to_thread.run_sync, send)
        assert (await transport.queue_lengths())["notes"] == threads


async def test_messages_for_a_missing_queue_do_not_hold_up_others(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as (store, transport):
        await transport.create_queues(["error", "notes"])
        bad = [DelayedMessage(f"bad-{number}", NOW, "nowhere") for number in range(3000)]
        await store.store_many([*bad, message(1, NOW + timedelta(seconds=1))], NOW)
        report = await store.move_due(NOW + timedelta(minutes=1), 1000)
        assert (report.delivered, report.needs_claim) == (1, True)


async def test_whatever_a_failure_says_the_message_reaches_the_error_queue(tmp_path: Path) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise TypeError("no text")

    store = SqliteStore(tmp_path / "a.db", largest_message_bytes=2_000)
    transport = LocalTransport(tmp_path / "a.db", largest_message_bytes=2_000)
    policy = Recoverability(immediate_retries=0, delayed_retries=0)
    endpoint = endpoint_on(store, transport, recoverability=policy, error_queue="broken")
    failed = anyio.Event()
    failures = iter([Unspeakable(), ValueError("x" * 100_000)])

    @endpoint.handler(Note)
    async def handle(_: Note, __: HandlerContext) -> None:
        try:
            raise next(failures)
        except ValueError:
            failed.set()
            raise

    async with endpoint:
        await endpoint.send(Note(1))
        await endpoint.send(Note(2))
        with patience():
            await failed.wait()
    assert (await transport.queue_lengths())["broken"] == 2
    await store.close()
    await transport.close()


async def test_the_stack_trace_of_an_error_copy_is_bounded() -> None:
    headers = error_headers({}, ValueError("x" * 100_000), "q", NOW, Host("e"))
    assert sum(map(len, headers.values())) < 40_000


async def test_what_a_handler_sends_after_its_end_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as (store, transport):
        endpoint = endpoint_on(store, transport)
        contexts, arrived = list[HandlerContext](), anyio.Event()

        @endpoint.handler(Note)
        async def handle(_: Note, context: HandlerContext) -> None:
            contexts.append(context)
            arrived.set()

        async with endpoint:
            await endpoint.send(Note(1))
            await arrived.wait()
        with pytest.raises(MessageError, match="has ended"):
            await contexts[0].send(Note(2))


async def test_a_message_that_was_returned_and_handled_is_not_taken_again(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as (store, transport):
        await transport.create_queues(["notes", "error"])
        await store.store(message(1), NOW)
        await store.finish(await store.claim_due(NOW + timedelta(seconds=1), 1), Outcome.FAILED, NOW, "no")
        await store.store(message(1), NOW)  # it comes back
        assert (await store.move_due(NOW + timedelta(seconds=1), 10)).delivered == 1
        with pytest.raises(StoreError, match="stored before"):
            await store.store(message(1), NOW)


async def test_a_stale_claim_gives_back_no_other_message_that_took_its_number(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    await store.store(message(1), NOW)
    (stale,) = await store.claim_due(NOW + timedelta(seconds=1), 1)
    await store.finish([stale], Outcome.DELIVERED, NOW)
    await store.file.write(lambda tx: tx.execute("DELETE FROM record"))  # as an archive takes them out
    await store.store(message(2), NOW)
    (held,) = await store.claim_due(NOW + timedelta(seconds=1), 1)
    assert not await store.retry_later(stale, NOW, NOW, "")
    assert await store.finish([held], Outcome.DELIVERED, NOW) == 1
    await store.close()


async def test_a_closed_handle_is_refused_and_closing_twice_harms_nobody(tmp_path: Path) -> None:
    store, transport = SqliteStore(tmp_path / "a.db"), LocalTransport(tmp_path / "a.db")
    await transport.create_queues(["notes"])
    await store.close()
    await store.close()
    await transport.create_queues(["more"])
    await transport.close()
    with pytest.raises(StoreError, match="was closed"):
        await store.store(message(1), NOW)


async def test_lock_files_that_were_removed_come_back(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as (store, _):
        await store.setup()
        folder = tmp_path / "a.db-claimants"
        shutil.rmtree(folder)
        store.file._upkeep.run_chores()
        assert {each.name for each in folder.iterdir()} == {"1.lock", "1.alive"}
        assert store.file._upkeep.release_dead_claims() == 0


async def test_a_checkpoint_is_over_when_the_next_writer_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement in progress would fail its commit: "SQL statements in progress"."""
    store = SqliteStore(tmp_path / "store.db", synchronous="normal")
    await store.setup()
    turn = FileAccess._lock_for_writing

    @contextmanager
    def then_another_writer(access: FileAccess) -> Generator[None]:
        with turn(access):
            yield
        for statement in ("BEGIN IMMEDIATE", "SAVEPOINT part", "RELEASE part", "COMMIT"):
            assert access._writer is not None
            access._writer.execute(statement)

    monkeypatch.setattr(FileAccess, "_lock_for_writing", then_another_writer)
    store.file.checkpoint_blocking()
    monkeypatch.undo()
    await store.close()
