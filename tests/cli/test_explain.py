"""Why has this message not arrived? One test for each place where a message can be."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from anyio import to_thread

from postdate import DelayedMessage, Headers, LocalTransport, SqliteStore, ports
from postdate.backends.sqlite.transport import LocalReceiver
from postdate.config import load_settings
from postdate.core.changes import Pending
from postdate.core.limits import change_limits, limit_change
from postdate.core.recoverability import Host, delayed_retry_headers, error_headers
from postdate.errors import QueueNotFound, TransportUnavailable
from postdate.messages import Envelope
from postdate.operations import Explanation, MessageState, explain, list_messages, show_message
from postdate.wiring import OpenDeployment, open_deployment

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@dataclass
class Scene:
    """A store with a queue ``orders``."""

    deployment: OpenDeployment
    sqlite: SqliteStore
    transport: LocalTransport

    async def store(self, due: datetime = NOW + 10 * MINUTE, destination: str = "orders", **fields) -> DelayedMessage:
        message = DelayedMessage("m1", due, destination, {Headers.MESSAGE_ID: "m1"}, b"{}", **fields)
        await self.sqlite.store(message, NOW - MINUTE)
        return message

    async def claim(self, **fields) -> Sequence[ports.Claim]:
        """Store a message that is due, and claim it."""
        await self.store(due=NOW - MINUTE, **fields)
        return await self.sqlite.claim_due(NOW, 1)

    @asynccontextmanager
    async def received(self) -> AsyncGenerator[tuple[LocalReceiver, ports.Received]]:
        """Deliver a message to its queue, and receive it from there."""
        await self.store(due=NOW - MINUTE)
        await self.sqlite.move_due(NOW, 10)
        receiver = self.transport.receiver("orders")
        (received,) = await receiver.receive(1)
        yield receiver, received
        await receiver.close()

    async def explain(self, message_id: str = "m1", now: datetime = NOW) -> Explanation:
        return await explain(self.deployment, message_id, now)


@asynccontextmanager
async def scene(recording: str = "all"):
    settings = load_settings(None, {"POSTDATE_STORE__RECORDING": recording, "POSTDATE_STORE__SYNCHRONOUS": "normal"})
    async with open_deployment(settings, create=True) as deployment:
        assert isinstance(deployment.store, SqliteStore)
        assert isinstance(deployment.transport, LocalTransport)
        await deployment.store.setup()
        await deployment.transport.create_queues(["orders", "error", "postdate.timeouts"])
        yield Scene(deployment, deployment.store, deployment.transport)


async def test_it_waits_until_it_is_due():
    async with scene() as here:
        await here.store()
        found = await here.explain()
    assert found.state is MessageState.WAITING
    assert found.headline == "it waits until it is due at 2026-01-31T12:10:00Z, in 10m"
    assert found.facts == ("no service is running; no recent delivery from this store is recorded",)
    assert found.advice == ("start the service: postdate run",)
    assert [event.what for event in found.history] == ["scheduled"]


async def test_a_missing_queue_and_an_expiry_are_said_beforehand():
    async with scene() as here:
        await here.store(destination="nowhere", expires_at=NOW + 20 * MINUTE)
        found = await here.explain()
    assert any("its queue 'nowhere' does not exist" in fact and "--queue nowhere" in fact for fact in found.facts)
    assert "it expires at 2026-01-31T12:20:00Z" in found.facts


async def test_it_is_overdue_because_no_service_is_running():
    async with scene() as here:
        await here.store(due=NOW - 90 * MINUTE)
        found = await here.explain()
    assert found.state is MessageState.OVERDUE
    expected = "it was due at 2026-01-31T10:30:00Z, 1h30m ago, and no service is running to deliver it"
    assert found.headline == expected
    assert found.advice == ("start the service: postdate run",)


async def test_it_is_being_retried_and_the_reason_is_said():
    async with scene() as here:
        (claim,) = await here.claim()
        reason = "transport_unavailable: no answer"
        await here.sqlite.retry_later(claim, NOW + timedelta(seconds=4), NOW, reason)
        found = await here.explain()
    assert found.state is MessageState.RETRYING
    assert found.headline == (
        "delivering it to 'orders' failed 1 time, the last time because of transport_unavailable: no answer; "
        "the next attempt is at 2026-01-31T12:00:04Z, in 4s"
    )


async def test_a_process_that_died_holds_it():
    async with scene() as here:
        await here.claim()
        await here.sqlite.file.write(lambda tx: tx.execute("UPDATE delayed_message SET claimant = 4711"))
        found = await here.explain()
    assert found.state is MessageState.BEING_DELIVERED
    assert found.headline == "the process that was delivering it to 'orders' has died"


async def test_it_is_in_its_queue_and_nobody_receives():
    async with scene() as here:
        await here.store(due=NOW - MINUTE)
        await here.sqlite.move_due(NOW - timedelta(seconds=59), 10)
        found = await here.explain()
    assert found.state is MessageState.IN_QUEUE
    assert found.headline == "it is in queue 'orders', waiting for a consumer"
    assert "no process receives from it" in found.facts
    assert "it was delivered there at 2026-01-31T11:59:01Z, 1s after it was due" in found.facts
    assert found.advice == ("start the endpoint that receives from 'orders'",)


async def test_a_delivery_before_its_due_time_is_not_late():
    """The clock of the service that delivered it was behind."""
    async with scene() as here:
        claims = await here.claim()
        await here.sqlite.finish(claims, ports.Outcome.DELIVERED, NOW - MINUTE - timedelta(seconds=5))
        found = await here.explain()
    early = "5s before it was due, because clocks differ"
    assert f"it was delivered there at 2026-01-31T11:58:55Z, {early}" in found.facts


async def test_it_is_in_its_queue_and_past_its_use():
    async with scene() as here:
        await here.store(due=NOW - 2 * MINUTE, expires_at=NOW - MINUTE)
        await here.sqlite.move_due(NOW - 90 * timedelta(seconds=1), 10)
        found = await here.explain()
    assert found.state is MessageState.IN_QUEUE
    assert any("it expired at" in fact and "will be discarded" in fact for fact in found.facts)


async def test_handling_it_failed_and_it_is_in_its_queue_again():
    async with scene() as here:
        async with here.received() as (receiver, received):
            await receiver.roll_back(received)
        found = await here.explain()
    assert "handling it failed 1 time so far" in found.facts


async def test_it_is_in_the_intake_queue():
    async with scene() as here:
        envelope = Envelope("postdate.timeouts", "m1", {Headers.TIMEOUT_DESTINATION: "orders"})
        assert await here.transport.send([envelope], NOW) == [None]
        found = await here.explain()
    assert found.state is MessageState.IN_INTAKE
    assert found.headline == "it is in the intake queue 'postdate.timeouts', and no service is running to store it"


@pytest.mark.parametrize(
    ("recording", "end", "state", "headline", "fact"),
    [
        ("all", ports.HANDLED, "HANDLED", "it arrived: handled from queue 'orders' at 2026-01-31T12:00:00Z", ""),
        (
            "all",
            ports.Completion(ports.RecordKind.DISCARDED, "expired at noon"),
            "DISCARDED",
            "the consumer of 'orders' discarded it at 2026-01-31T12:00:00Z: expired at noon",
            "",
        ),
        (
            "outcomes",
            ports.HANDLED,
            "DELIVERED",
            "it was delivered to queue 'orders' at 2026-01-31T12:00:00Z and has left it",
            "store.recording is 'outcomes'",
        ),
    ],
    ids=["handled", "discarded", "without a record"],
)
async def test_it_has_left_its_queue(recording, end, state, headline, fact):
    async with scene(recording) as here:
        async with here.received() as (receiver, received):
            await receiver.commit(received, NOW, end)
        found = await here.explain(now=NOW + MINUTE)
    assert (found.state, found.headline) == (MessageState[state], headline)
    assert found.advice == () or state == "DISCARDED"
    assert fact in "".join(found.facts)


async def test_handling_it_failed_and_it_is_retried_under_another_id():
    async with scene() as here:
        async with here.received() as (receiver, received):
            headers = delayed_retry_headers(received.envelope.headers, NOW)
            retry = DelayedMessage("r1", NOW + 10 * MINUTE, "orders", headers, b"{}")
            work = [here.sqlite.storing_work([retry], NOW)]
            await receiver.commit(
                received, NOW, ports.Completion(ports.RecordKind.RETRIED, "ValueError: no stock", work=work)
            )
        found = await here.explain()
        assert found.message_id == "m1"
        assert found.state is MessageState.WAITING
        assert found.facts[0] == "handling it failed; it is being retried as message r1"
        assert [event.what for event in found.history] == ["scheduled", "delivered", "retried"]
        await here.sqlite.move_due(NOW + 11 * MINUTE, 10)
        found = await here.explain(now=NOW + 11 * MINUTE)
        assert found.state is MessageState.IN_QUEUE
        assert await here.sqlite.cancel("r1", NOW) is False


async def test_it_is_in_the_error_queue():
    async with scene() as here:
        (claim,) = await here.claim()
        headers = error_headers(claim.message.headers, QueueNotFound("no queue"), "orders", NOW, Host("postdate"))
        work = [here.sqlite.finishing_work([claim], ports.Outcome.FAILED, NOW, "queue_not_found: no queue")]
        await here.transport.send([Envelope("error", "m1", headers, b"{}")], NOW, work=work)
        found = await here.explain()
    assert found.state is MessageState.IN_ERROR_QUEUE
    assert found.headline == "it is in the error queue 'error' because of: no queue"
    assert "postdate errors return m1" in found.advice[-1]


async def test_it_is_in_the_error_queue_without_the_queue_where_it_failed():
    """Another program sent it there."""
    async with scene() as here:
        await here.transport.send([Envelope("error", "m1", {}, b"{}")], NOW)
        found = await here.explain()
    assert found.state is MessageState.IN_ERROR_QUEUE
    assert found.headline == "it is in the error queue 'error' because of: an unknown error"
    assert found.facts == ("it does not say where it failed",)
    assert found.advice[-1] == "fix the cause, then run: postdate errors return m1 --to QUEUE"


@pytest.mark.parametrize(
    ("outcome", "headline"),
    [
        (ports.Outcome.EXPIRED, "it expired before it could be delivered; this was noticed at 2026-01-31T12:00:00Z"),
        (ports.Outcome.CANCELLED, "it was cancelled at 2026-01-31T12:00:00Z"),
        (
            ports.Outcome.FAILED,
            "it failed at 2026-01-31T12:00:00Z because of no answer",
        ),
    ],
)
async def test_it_ended_otherwise(outcome, headline):
    async with scene() as here:
        await here.sqlite.finish(await here.claim(), outcome, NOW, str(TransportUnavailable("no answer")))
        found = await here.explain()
    assert found.state is MessageState[outcome.name]
    assert found.headline.startswith(headline)
    assert "it was due at 2026-01-31T11:59:00Z" in found.headline or outcome is ports.Outcome.FAILED


async def archive(store: SqliteStore, message_id: str) -> None:
    """Leave of the records of a message what an archive of an earlier version has left: the first, marked."""
    mark = "UPDATE record SET detail = 'archived' WHERE message_id = ? AND kind = 1"
    await store.file.write(lambda tx: tx.execute(mark, (message_id,)))
    await store.file.write(lambda tx: tx.execute("DELETE FROM record WHERE message_id = ? AND kind > 1", (message_id,)))


async def test_its_records_were_archived():
    async with scene() as here:
        claims = await here.claim()
        await here.sqlite.finish(claims, ports.Outcome.EXPIRED, NOW)
        await here.sqlite.store(DelayedMessage("m2", NOW, "orders"), NOW)
        await archive(here.sqlite, "m1")
        found = await here.explain()
        other = await here.explain("m2")
    assert found.state is MessageState.ARCHIVED
    assert found.headline == (
        "it ended, and its records were archived; it was scheduled at 2026-01-31T11:59:00Z and due at "
        "2026-01-31T11:59:00Z"
    )
    assert found.advice[0] == "read its records in the Parquet files of the archive, where message_id is 'm1'"
    assert [(event.what, event.detail) for event in found.history] == [("scheduled", "archived")]
    assert other.state is MessageState.WAITING


async def test_it_vanished_without_a_record():
    async with scene() as here:
        await here.store()
        await here.sqlite.file.write(lambda tx: tx.execute("DELETE FROM delayed_message"))
        found = await here.explain()
    assert found.state is MessageState.UNKNOWN
    assert found.headline == "it was last scheduled at 2026-01-31T11:59:00Z, and is not in the store any more"


async def test_it_was_never_here():
    async with scene() as here:
        found = await here.explain("nonsense")
    assert found.state is MessageState.UNKNOWN
    assert found.headline == "it was never scheduled in sqlite:///postdate.db"


async def test_a_header_that_only_looks_like_the_id_is_another_message():
    async with scene() as here:
        await here.store()
        other = Envelope("orders", "x1", {Headers.MESSAGE_ID: "m11", "note": '"NServiceBus.MessageId":"zz"'}, b"")
        await here.transport.send([other], NOW)
        assert (await here.explain("m1")).state is MessageState.WAITING
        assert (await here.explain("zz")).state is MessageState.UNKNOWN
        assert (await here.explain("m11")).state is MessageState.IN_QUEUE


async def test_what_nobody_knows_may_have_been_removed_with_old_records() -> None:
    async with scene() as here:
        assert "never scheduled" in (await here.explain("unknown")).headline
        await here.store(NOW)
        await here.sqlite.finish(await here.sqlite.claim_due(NOW + MINUTE, 1), ports.Outcome.DELIVERED, NOW)
        before = NOW + timedelta(days=40)
        await here.sqlite.store(DelayedMessage("newest", before + MINUTE, "orders"), before)
        for part in here.sqlite.scan_parts("records", 1):
            await to_thread.run_sync(here.sqlite.prune_before, part, before, before)
        found = await here.explain()
    assert found.state is MessageState.UNKNOWN
    assert "has no record of it" in found.headline
    assert "records of messages that ended before 2026-03-12T12:00:00Z have been removed" in found.facts


async def held_ids(here: Scene, now: datetime) -> list[str]:
    """Return the ids of messages that a list calls held; it calls all others overdue."""
    messages = (await list_messages(here.deployment, Pending(), 9, now)).messages
    assert [each.overdue for each in messages] == [not each.held for each in messages]
    return [each.message_id for each in messages if each.held]


async def test_what_failed_and_is_held_says_what_holds_it() -> None:
    async with scene() as here:
        await here.store(NOW)
        (claim,) = await here.sqlite.claim_due(NOW + MINUTE, 1)
        await here.sqlite.retry_later(claim, NOW, NOW, "no")
        await change_limits(here.sqlite, "orders", limit_change(50, ()), NOW)
        found = await here.explain(now=NOW + MINUTE)
        assert found.state is MessageState.HELD
        assert found.headline.endswith("and is held: the limits of its queue 'orders' are: at most 50 a second")
        assert await held_ids(here, NOW + MINUTE) == ["m1"], "a list says the same"
        await change_limits(here.sqlite, "orders", limit_change(None, "13:00-14:00 UTC"), NOW)
        found = await here.explain(now=NOW + MINUTE)
        (stored,) = await here.sqlite.load_limits()
        assert await here.sqlite.store_limits("orders", "{", NOW, stored.limits)
        unreadable = await here.explain(now=NOW + MINUTE)
    assert "cannot be read: they hold everything until new limits are set" in unreadable.headline
    assert "no message is sent to it before 2026-01-31T13:00:00Z" in found.facts
    assert "to change that: postdate destinations limit orders, or resume" in found.advice


async def test_what_waits_for_its_retry_is_not_held_and_what_lay_in_a_lane_has_no_attempt_in_the_year_9000() -> None:
    async with scene() as here:
        await here.store(NOW)
        (claim,) = await here.sqlite.claim_due(NOW + MINUTE, 1)
        await here.sqlite.retry_later(claim, NOW + 5 * MINUTE, NOW, "it is full")
        await change_limits(here.sqlite, "orders", limit_change(50, ()), NOW)
        found = await here.explain(now=NOW + MINUTE)
        assert (found.state, "it is full" in found.headline) == (MessageState.RETRYING, True)
        assert await held_ids(here, NOW + MINUTE) == []
        (kept,) = await here.sqlite.load_limits()
        (claim,) = await here.sqlite.claim_due(NOW + 6 * MINUTE, 1)
        await here.sqlite.release([claim], kept.attempt_time(NOW))
        assert (await here.explain(now=NOW + MINUTE)).state is MessageState.HELD
        assert (await show_message(here.deployment, "m1")).places[0].next_attempt_at is None
        await change_limits(here.sqlite, "orders", limit_change(None, ()), NOW)
        found = await here.explain(now=NOW + MINUTE)
    assert found.state is MessageState.RETRYING
    assert "9000" not in found.headline


async def test_what_a_window_holds_in_a_zone_that_this_machine_does_not_know_is_explained() -> None:
    async with scene() as here:
        await here.store(NOW + MINUTE)
        await here.sqlite.store_limits("orders", '{"windows":["09:00-17:00 Europe/Neverland"]}', NOW)
        found = await here.explain(now=NOW)
    assert found.state is MessageState.WAITING
    assert "the limits of its queue 'orders' are: within 09:00-17:00 Europe/Neverland" in found.facts
    assert any("there is no time zone 'Europe/Neverland'" in fact for fact in found.facts)
