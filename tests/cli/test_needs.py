"""What an operator gets where a store or its queues offer less than the embedded ones."""

from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from postdate import DelayedMessage, Headers, MemoryStore, MemoryTransport, operations
from postdate.config import load_settings
from postdate.core.changes import Pending
from postdate.core.limits import change_limits, limit_change
from postdate.endpoint.send_options import SendOptions
from postdate.errors import MessageNotFound, NotSupported, QueueNotFound, TransportUnreachable
from postdate.messages import Envelope
from postdate.operations import queues
from postdate.ports import HANDLED, Completion, Outcome, Received, TransactionMode
from postdate.wiring import OpenDeployment

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


class UncountedTransport(MemoryTransport):
    """Queues of which nobody can say whether they are there."""

    async def lengths_of(self, names: Sequence[str]) -> Any:
        """Say that it cannot be known."""


class SilentStore:
    """A store that works in batches and answers no questions."""

    def __init__(self) -> None:
        self._inner = MemoryStore()
        for name in ("capabilities", "initialize", "store", "store_many", "fetch_next_due", "remove", "next_due"):
            setattr(self, name, getattr(self._inner, name))
        for name in ("increment_failure_count", "claim_due", "finish", "retry_later", "next_attempt", "listen"):
            setattr(self, name, getattr(self._inner, name))


@asynccontextmanager
async def deployment(transport: MemoryTransport | None = None):
    store, queues = MemoryStore(), transport or UncountedTransport()
    await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
    yield OpenDeployment(load_settings(None, {}), store, queues, None, None)


def message(message_id: str = "m1", due: datetime = NOW + 10 * MINUTE) -> DelayedMessage:
    return DelayedMessage(message_id, due, "orders", {Headers.MESSAGE_ID: message_id}, b"{}")


def failed(message_id: str, queue: str | None = "orders") -> Envelope:
    headers = {} if queue is None else {Headers.FAILED_QUEUE: queue}
    return Envelope("error", message_id, headers, b"{}")


# --- the store shows what waits, and not who uses it ---------------------------------------------------------------


async def test_a_message_is_explained_without_claiming_to_see_processes_or_queues():
    async with deployment() as here:
        await here.required_store.store(message(), NOW)
        found = await operations.explain(here, "m1", NOW)
    assert found.state is operations.MessageState.WAITING
    assert found.facts == (
        "this store does not show whether a service is running: it does not record its processes",
        "Postdate cannot see from here whether its queue 'orders' exists",
    )
    assert found.advice == ()


async def test_what_the_store_never_knew_is_not_said_never_to_have_been_scheduled():
    """Where the intake queue is on a broker, a message may be in it, or may have gone through it without a record."""
    async with deployment() as here:
        found = await operations.explain(here, "m1", NOW)
    assert found.state is operations.MessageState.UNKNOWN
    assert found.headline == "the store sqlite:///postdate.db has no record of it"
    in_intake = "messages that a service has not received from 'postdate.timeouts' are not in the store yet"
    assert found.facts == (
        "a message that is sent without a delay has no record after it is handled",
        f"{in_intake}: their number is unknown",
        (
            "a delayed message that was due already when a service received it was sent to its destination at once, "
            "without a record"
        ),
        "Postdate cannot see whether it is in a queue: the queues at local:///postdate.db cannot be browsed",
    )


async def test_what_is_in_the_intake_queue_is_counted_where_that_can_be_known():
    async with deployment(MemoryTransport()) as here:
        assert "there is no queue 'postdate.timeouts'" in (await operations.explain(here, "m1", NOW)).facts[1]
        await operations.set_up(here)
        assert "0 messages in 'postdate.timeouts'" in (await operations.explain(here, "m1", NOW)).facts[1]
        await here.transport.send([Envelope("postdate.timeouts", "m2")], NOW)
        assert "1 message in 'postdate.timeouts'" in (await operations.explain(here, "m1", NOW)).facts[1]


async def test_an_overdue_message_is_not_blamed_on_a_missing_service():
    async with deployment() as here:
        await here.required_store.store(message(due=NOW - MINUTE), NOW)
        found = await operations.explain(here, "m1", NOW)
    assert found.state is operations.MessageState.OVERDUE
    assert "waits for its turn or is being delivered" in found.headline
    assert "does not show whether a service is running" in found.facts[0]


async def test_no_next_attempt_is_named_that_the_store_does_not_show():
    async with deployment() as here:
        store = here.required_store
        await store.store(message(due=NOW - MINUTE), NOW)
        (claim,) = await store.claim_due(NOW, 1)
        await store.retry_later(claim, NOW + 10 * MINUTE, NOW, "no answer")
        found = await operations.explain(here, "m1", NOW)
        (place,) = (await operations.show_message(here, "m1")).places
    assert found.state is operations.MessageState.RETRYING
    assert "next attempt" not in found.headline
    assert "this store does not show whether a process has claimed it, nor when its next attempt is" in found.facts
    assert place.next_attempt_at is None


async def test_the_error_queue_of_deliveries_is_the_one_of_the_settings():
    async with deployment() as here:
        settings = load_settings(None, {"POSTDATE_DELAYED_DELIVERY__POISON_QUEUE": "poison"})
        store = here.required_store
        await store.store(message(due=NOW - MINUTE), NOW)
        (claim,) = await store.claim_due(NOW, 1)
        await store.finish([claim], Outcome.FAILED, NOW, "no such queue")
        found = await operations.explain(replace(here, settings=settings), "m1", NOW)
    assert found.headline.endswith("its copy went to the error queue 'poison'")
    assert found.advice == ("fix the cause, then run: postdate errors return m1 --queue poison",)


async def test_a_delivered_message_is_not_said_to_have_left_a_queue_that_cannot_be_seen():
    async with deployment() as here:
        await here.required_store.store(message(due=NOW - MINUTE), NOW)
        await here.required_store.finish(await here.required_store.claim_due(NOW, 1), Outcome.DELIVERED, NOW)
        found = await operations.explain(here, "m1", NOW)
    assert found.state is operations.MessageState.DELIVERED
    assert found.headline == "it was delivered to queue 'orders' at 2026-01-31T12:00:00Z"
    assert "cannot see whether it is in a queue" in found.facts[-1]


async def test_a_failed_message_is_not_said_to_have_left_an_error_queue_that_cannot_be_seen():
    async with deployment() as here:
        await here.required_store.store(message(due=NOW - MINUTE), NOW)
        await here.required_store.finish(await here.required_store.claim_due(NOW, 1), Outcome.FAILED, NOW, "no queue")
        found = await operations.explain(here, "m1", NOW)
    assert found.headline.endswith("because of no queue, and its copy went to the error queue 'error'")


async def test_what_waits_is_counted_listed_shown_cancelled_and_rescheduled():
    async with deployment() as here:
        await here.required_store.store_many([message("m1"), message("m2")], NOW)
        counts = await operations.statistics(here, NOW)
        assert (counts.pending, counts.queues, counts.services) == (2, None, None)
        listed = await operations.list_messages(here, Pending(), 9, NOW)
        assert [each.message_id for each in listed.messages] == ["m1", "m2"]
        assert [place.where for place in (await operations.show_message(here, "m1")).places] == ["waiting"]
        assert [(await operations.cancel(here, each, NOW)).done for each in ("m1", "nonsense")] == [True, False]
        assert (await operations.reschedule(here, "m2", NOW + MINUTE, NOW)).done


async def test_setting_up_and_sending_do_not_pretend_to_know_the_queues():
    async with deployment() as here:
        done = await operations.set_up(here, ["orders"])
        assert (done.queues, done.created) == (["postdate.timeouts", "error", "orders"], None)
        sent = await operations.send(here, b"{}", SendOptions("orders", delay=MINUTE))
        assert (sent.queue_exists, sent.services) == (None, None)


async def test_queues_that_can_be_counted_by_name_are_counted():
    async with deployment(MemoryTransport()) as here:
        assert (await operations.set_up(here)).created == ["postdate.timeouts", "error"]
        assert (await operations.set_up(here, ["orders"])).created == ["orders"]
        assert (await operations.send(here, b"{}", SendOptions("nowhere", delay=MINUTE))).queue_exists is False
        assert (await operations.statistics(here, NOW)).queues == {"postdate.timeouts": 1, "error": 0}
        await here.required_store.store(message(), NOW)
        assert not any("exist" in fact for fact in (await operations.explain(here, "m1", NOW)).facts)


# --- what cannot be done is said ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda here: operations.list_errors(here, "error", 9), "cannot list failed messages: the queues at"),
        (lambda here: operations.group_errors(here, "error"), "cannot group failed messages: the queues at"),
    ],
)
async def test_looking_into_queues_that_cannot_be_looked_into_is_an_error_that_says_so(ask, said):
    async with deployment() as here:
        with pytest.raises(NotSupported, match=said):
            await ask(here)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda here: operations.list_messages(here, Pending(), 9, NOW), "cannot list messages: the store"),
        (lambda here: operations.statistics(here, NOW), "cannot count messages: the store"),
        (lambda here: operations.explain(here, "m1", NOW), "cannot explain a message: the store"),
        (lambda here: operations.cancel(here, "m1", NOW), "cannot cancel a message: the store"),
        (lambda here: operations.reschedule(here, "m1", NOW, NOW), "cannot reschedule a message: the store"),
    ],
)
async def test_asking_a_store_that_answers_no_questions_is_an_error_that_says_so(ask, said):
    silent = OpenDeployment(load_settings(None, {}), SilentStore(), UncountedTransport(), None, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotSupported, match=said):
        await ask(silent)


# --- returning from queues that cannot be looked into ---------------------------------------------------------------


@pytest.mark.parametrize("transport", [UncountedTransport, MemoryTransport])
async def test_all_failed_messages_are_returned_and_the_others_stay(transport, monkeypatch):
    monkeypatch.setattr("postdate.operations.queues._LAST_MESSAGE_SECONDS", 0.05)
    async with deployment(transport()) as here:
        await here.transport.create_queues(["error", "orders"])
        await here.transport.send([failed("m1"), failed("m2", None), failed("m3", "nowhere"), failed("m4")], NOW)
        results = await operations.return_all(here, "error", NOW)
        assert [(each.message_id, each.done) for each in results] == [
            ("m1", True), ("m2", False), ("m3", False), ("m4", True),
        ]  # fmt: skip
        assert "name its queue with --to QUEUE" in results[1].remark
        left = await here.transport.receiver("error").receive(9)
        assert sorted(each.envelope.message_id for each in left) == ["m2", "m3"]
        arrived = await here.transport.receiver("orders").receive(9)
        assert [each.envelope.message_id for each in arrived] == ["m1", "m4"]


async def test_an_empty_error_queue_is_no_error(monkeypatch):
    monkeypatch.setattr("postdate.operations.queues._LAST_MESSAGE_SECONDS", 0.05)
    async with deployment() as here:
        await here.transport.create_queues(["error"])
        assert await operations.return_all(here, "error", NOW) == []


@pytest.fixture
def soon(monkeypatch):
    """Queues that cannot be counted are empty after a moment."""
    monkeypatch.setattr("postdate.operations.queues._LAST_MESSAGE_SECONDS", 0.05)


@asynccontextmanager
async def with_failed(transport: MemoryTransport, *ids: str):
    async with deployment(transport) as here:
        await here.transport.create_queues(["error", "orders"])
        await here.transport.send([failed(each) for each in ids], NOW)
        yield here


async def left_in(here: OpenDeployment, queue: str) -> list[str]:
    return sorted(each.message_id for each in (await queues.peek(here, queue, 9, NOW)).messages)


@pytest.mark.parametrize("transport", [UncountedTransport, MemoryTransport])
async def test_some_are_returned_by_their_ids_and_shown(transport, soon) -> None:
    async with with_failed(transport(), "m1", "m2", "m3") as here:
        assert (await operations.show_error(here, "error", "m2", NOW)).message.failed_queue == "orders"
        with pytest.raises(MessageNotFound, match="no message 'm9' is in queue 'error'"):
            await operations.show_error(here, "error", "m9", NOW)
        results = await operations.return_messages(here, "error", ["m3", "m9"], NOW)
        assert [(each.message_id, each.done) for each in results] == [("m3", True), ("m9", False)]
        assert "no message 'm9' is in queue 'error'" in results[1].remark
        assert (await left_in(here, "error"), await left_in(here, "orders")) == (["m1", "m2"], ["m3"])


class Unsteady(MemoryTransport):
    """Goes away while ``m2`` is moved, and cannot take it back."""

    def receiver(self, queue: str) -> Any:
        receiver: Any = super().receiver(queue)
        commit, roll_back = receiver.commit, receiver.roll_back

        async def unsteady_commit(received: Received, now: datetime, end: Completion = HANDLED) -> None:
            if received.envelope.message_id == "m2":
                raise TransportUnreachable("the answer was lost")
            await commit(received, now, end)

        async def unsteady_roll_back(received: Received, *, failed: bool = True) -> None:
            if received.envelope.message_id == "m2":
                raise TransportUnreachable("away")
            await roll_back(received, failed=failed)

        receiver.commit, receiver.roll_back = unsteady_commit, unsteady_roll_back
        return receiver


async def test_one_that_can_neither_be_returned_nor_given_back_hides_no_result_of_others() -> None:
    async with with_failed(Unsteady(), "m1", "m2", "m3") as here:
        results = await operations.return_messages(here, "error", ["m1", "m2", "m3"], NOW)
        assert [(each.message_id, each.done) for each in results] == [("m1", True), ("m2", False), ("m3", True)]
        assert "the answer was lost" in results[1].remark


@pytest.mark.parametrize("transport", [UncountedTransport, MemoryTransport])
async def test_an_id_of_several_is_refused_with_their_own(transport, soon) -> None:
    async with with_failed(transport()) as here:
        headers = {Headers.FAILED_QUEUE: "orders", Headers.MESSAGE_ID: "sent"}
        await here.transport.send([Envelope("error", each, headers, b"") for each in ("r1", "r2")], NOW)
        (refused,) = await operations.return_messages(here, "error", ["sent"], NOW, operations.Treatment(discard=True))
        assert not refused.done
        assert refused.remark == "2 messages there were sent under that id; name their own: r1, r2"
        assert await left_in(here, "error") == ["r1", "r2"]
        both = await operations.return_messages(here, "error", ["r1", "sent"], NOW, operations.Treatment(discard=True))
        assert [(each.message_id, each.done) for each in both] == [("r1", True), ("sent", True)]


@pytest.mark.parametrize("transport", [UncountedTransport, MemoryTransport])
async def test_some_are_discarded(transport, soon) -> None:
    async with with_failed(transport(), "m1", "m2", "m3") as here:
        discarded = operations.Treatment(discard=True)
        assert [each.done for each in await operations.return_messages(here, "error", ["m2"], NOW, discarded)] == [True]
        assert len(await operations.return_all(here, "error", NOW, operations.ErrorFilter(text="{"), discarded)) == 2
        assert (await left_in(here, "error"), await left_in(here, "orders")) == ([], [])


@pytest.mark.parametrize("transport", [UncountedTransport, MemoryTransport])
async def test_what_is_edited_is_another_and_the_failed_one_stays(transport, soon) -> None:
    async with with_failed(transport(), "m1") as here:
        sent = await operations.edit(here, "error", "m1", NOW, operations.Edit(b"new", {"own": "1"}, None))
        (arrived,) = [each.envelope for each in await here.transport.receiver("orders").receive(9)]
        assert (arrived.message_id, arrived.body, arrived.headers["own"]) == (sent.message_id, b"new", "1")
        assert arrived.headers[Headers.EDIT_OF] == "m1"
        assert arrived.headers[Headers.MESSAGE_ID] == sent.message_id != "m1"
        assert Headers.FAILED_QUEUE not in arrived.headers
        with pytest.raises(QueueNotFound):
            await operations.edit(here, "error", "m1", NOW, operations.Edit(None, {"own": "1"}, "nowhere"))
        assert await left_in(here, "error") == ["m1"]


@pytest.mark.parametrize("transport", [UncountedTransport, MemoryTransport])
async def test_the_message_with_the_id_is_shown_and_edited_and_not_a_retry_before_it(transport, soon) -> None:
    async with with_failed(transport()) as here:
        headers = {Headers.FAILED_QUEUE: "orders", Headers.MESSAGE_ID: "a"}
        messages = [Envelope("error", id_, headers, id_.encode()) for id_ in ("r1", "r2", "a")]
        await here.transport.send(messages, NOW)
        assert (await operations.show_error(here, "error", "a", NOW)).body.text == "a"
        sent = await operations.edit(here, "error", "a", NOW, operations.Edit(None, {"own": "1"}, None))
        (arrived,) = [each.envelope for each in await here.transport.receiver("orders").receive(9)]
        assert (arrived.message_id, arrived.body, arrived.headers[Headers.EDIT_OF]) == (sent.message_id, b"a", "a")
        await operations.return_messages(here, "error", ["a"], NOW, operations.Treatment(discard=True))
        with pytest.raises(MessageNotFound, match="cannot be edited: 2 messages there were sent under that id"):
            await operations.edit(here, "error", "a", NOW, operations.Edit(None, {"own": "1"}, None))
        assert await left_in(here, "error") == ["r1", "r2"]


@pytest.mark.parametrize("act", [
    lambda here: operations.return_messages(here, "error", ["m1"], NOW + timedelta(seconds=5)),
    lambda here: operations.edit(here, "error", "m1", NOW + timedelta(seconds=5), operations.Edit(b"new", {}, None)),
], ids=["return", "edit"])  # fmt: skip
async def test_what_is_tried_again_after_an_error_is_sent_once(act: Any) -> None:
    """The queue has limits and the store is elsewhere: it was stored, sent, and stayed in the error queue."""

    class Broken(MemoryTransport):
        """Its first commit fails."""

        def receiver(self, queue: str) -> Any:
            receiver = super().receiver(queue)
            commit = receiver.commit

            async def fail_once(*arguments: Any) -> None:
                if not failures:
                    failures.append(TransportUnreachable("the connection is lost"))
                    raise failures[0]
                await commit(*arguments)

            receiver.commit = fail_once  # type: ignore[method-assign]
            return receiver

    failures, store = list[Exception](), MemoryStore()
    async with with_failed(Broken(), "m1") as queues_alone:
        here = replace(queues_alone, store=store)
        await change_limits(store, "orders", limit_change(50, ()), NOW)
        with suppress(TransportUnreachable):
            assert not (await act(here))[0].done
        claims = await store.claim_due(NOW + timedelta(minutes=1), 10)
        await store.finish(claims, Outcome.DELIVERED, NOW + timedelta(minutes=1))
        assert len(claims) == 1
        await act(here)
        assert (await store.statistics(NOW)).pending == 0
        assert await store.claim_due(NOW + timedelta(minutes=2), 10) == []


@pytest.mark.parametrize("transport", [UncountedTransport, MemoryTransport])
async def test_any_queue_is_looked_into_and_emptied(transport, soon) -> None:
    async with with_failed(transport(), "m1", "m2", "m3") as here:
        found = await queues.peek(here, "error", 2, NOW)
        assert [each.message_id for each in found.messages] == ["m1", "m2"]
        printed = list[queues.MessageContent]()
        assert await queues.receive(here, "error", 1, NOW, printed.append) == 1
        assert printed[0].body.text == "{}"
        assert (await queues.purge(here, "error", NOW, lambda _: None, dry_run=False)).count == 2
        assert (await queues.peek(here, "error", 2, NOW)).messages == []


async def test_what_could_not_be_printed_stays() -> None:
    async with with_failed(MemoryTransport(), "m1") as here:

        def broken(_: object) -> None:
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            await queues.receive(here, "error", 1, NOW, broken)
        assert await left_in(here, "error") == ["m1"]
        with pytest.raises(QueueNotFound, match="there is no queue 'erors'"):
            await queues.peek(here, "erors", 1, NOW)
