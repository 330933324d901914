"""A message that came back without an answer again and again is not handled before the policy has decided about it."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until
from typing_extensions import override

from postdate import (
    DelayedDelivery,
    Endpoint,
    Envelope,
    HandlerContext,
    Headers,
    MemoryStore,
    MemoryTransport,
    Outbox,
    Recoverability,
    SqliteOutbox,
)
from postdate.backends.azure.envelope import add_failure_counts, from_text, read_failure_counts, to_text
from postdate.backends.memory.transport import MemoryReceiver
from postdate.core.recoverability import Decision, ImmediateRetry, MoveToError
from postdate.errors import DuplicateMessage, HandlingInterrupted
from postdate.messages import format_timestamp
from postdate.ports import Received
from postdate.testing import VirtualClock


class CameBack(MemoryReceiver):
    """Says of each message how it came back."""

    how: dict[str, Any]

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        return [each._replace(**self.how) for each in await super().receive(limit, wait=wait)]


class Queues(MemoryTransport):
    """Gives out messages that came back.

    Args:
        how: see :class:`postdate.ports.Received`.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    @override
    def receiver(self, queue: str) -> MemoryReceiver:
        receiver = CameBack(self, queue)
        receiver.how = self.how
        return receiver


async def handled(clock: VirtualClock, queues: Queues, settings: Recoverability, outbox: Outbox | None) -> int:
    """Return how often a message is handled before it has left its queue."""
    mode, calls = "receive_only", list[bytes]()
    endpoint = Endpoint(
        "sales", transport=queues, transaction_mode=mode, recoverability=settings, clock=clock, outbox=outbox
    )

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: object) -> None:
        calls.append(message)

    async with endpoint:
        await endpoint.send(b"body", destination="sales")

        async def has_ended() -> bool:
            return bool(calls) or (await queues.queue_lengths())["error"] > 0

        await until(has_ended)
    return len(calls)


@pytest.mark.parametrize("with_outbox", [False, True], ids=["alone", "with an outbox"])
@pytest.mark.parametrize(
    ("how", "goes_on"),
    [
        ({"failures": 1, "unanswered": 1}, True),  # a restart
        ({"failures": 5, "unanswered": 5}, True),
        ({"failures": 6, "unanswered": 6}, False),
        ({"failures": 6, "unanswered": 0}, True),  # the error queue was away, and the policy has had its say
        ({"failures": 0, "unanswered": 0, "is_dropped_if_returned": True}, False),
    ],
)
async def test_after_its_tries_it_goes_to_the_error_queue_unhandled(
    clock: VirtualClock, tmp_path: Path, how: dict[str, Any], goes_on: bool, with_outbox: bool
) -> None:
    queues, settings = Queues(**how), Recoverability(immediate_retries=5, delayed_retries=0)
    outbox = Outbox(SqliteOutbox(tmp_path / "outbox.db", synchronous="normal")) if with_outbox else None
    assert await handled(clock, queues, settings, outbox) == int(goes_on)
    assert await queues.queue_lengths() == {"sales": 0, "error": int(not goes_on)}
    if not goes_on:
        (copy,) = await MemoryTransport.receiver(queues, "error").receive(1)
        assert copy.envelope.headers[Headers.ERROR_CODE] == HandlingInterrupted.code


@pytest.mark.parametrize("with_outbox", [False, True], ids=["alone", "with an outbox"])
async def test_what_has_expired_is_discarded_however_often_it_came_back(
    clock: VirtualClock, tmp_path: Path, with_outbox: bool
) -> None:
    """It went to the error queue; what has not expired still does."""
    queues, settings = Queues(failures=6, unanswered=6), Recoverability(immediate_retries=5, delayed_retries=0)
    outbox = Outbox(SqliteOutbox(tmp_path / "outbox.db", synchronous="normal")) if with_outbox else None
    sent = format_timestamp(clock.now() - timedelta(seconds=10))
    headers = {Headers.TIME_SENT: sent, Headers.TIME_TO_BE_RECEIVED: "00:00:05"}
    await queues.create_queues(["sales"])
    await queues.send([Envelope("sales", "expired", headers, b"body")], clock.now())
    assert await handled(clock, queues, settings, outbox) == 0
    assert await queues.queue_lengths() == {"sales": 0, "error": 1}
    (copy,) = await MemoryTransport.receiver(queues, "error").receive(1)
    assert copy.envelope.message_id != "expired"


@pytest.mark.parametrize(
    ("decision", "is_last", "goes_on"),
    [(ImmediateRetry(), False, True), (MoveToError(), False, False), (ImmediateRetry(), True, False)],
)
async def test_a_policy_of_the_application_decides(
    clock: VirtualClock, decision: Decision, is_last: bool, goes_on: bool
) -> None:
    asked = list[tuple[type[BaseException], int]]()

    def policy(error: BaseException, failures: int, *_: object) -> Decision:
        asked.append((type(error), failures))
        return decision

    queues = Queues(failures=7, unanswered=6, is_dropped_if_returned=is_last)
    assert await handled(clock, queues, Recoverability(policy=policy, delayed_retries=0), None) == int(goes_on)
    assert asked == [(HandlingInterrupted, 7)]
    assert await queues.queue_lengths() == {"sales": 0, "error": int(not goes_on)}


def test_azure_tells_how_often_a_message_was_given_out_and_its_text_how_often_it_was_given_back() -> None:
    sent = Envelope("sales", "m", {"kind": "test"}, b"body", due=datetime(2026, 1, 31, tzinfo=UTC))
    text = to_text(sent)
    assert read_failure_counts(text, 3) == (3, 3)
    once = add_failure_counts(text, 4, failures=4, unanswered=3)
    assert once is not None
    assert from_text("sales", "native", once) == sent
    assert [read_failure_counts(once, n) for n in (4, 6)] == [(4, 3), (6, 5)]
    assert read_failure_counts(once, 1) == (1, 1)  # it was copied: what is said of it was said of another
    twice = add_failure_counts(once, 5, failures=4, unanswered=3)
    assert twice is not None
    assert read_failure_counts(twice, 5) == (4, 3)
    assert add_failure_counts(json.dumps({"Body": "A" * 60_000}), 1, 1, 0) is not None
    assert add_failure_counts(json.dumps({"Body": "A" * 65_500}), 1, 1, 0) is None  # it has no room for it


@pytest.mark.parametrize("said", ['"none"', "[1, 2]", '["3", 0, 0]', "null", f"{'[' * 900}{']' * 900}"])
@pytest.mark.parametrize("ours", ['{{"GivenBack": {}}}', "{}"])
def test_what_others_say_in_azures_envelope_counts_nothing_and_stays(ours: str, said: str) -> None:
    theirs = f'"Headers": {{}}, "Theirs": [1.10, {said}]'
    text = f'{{{theirs}, "Postdate": {ours.format(said)}}}'
    assert read_failure_counts(text, 2) == (2, 2)
    again = add_failure_counts(text, 3, failures=1, unanswered=0)
    assert again is not None
    assert read_failure_counts(again, 3) == (1, 0)
    assert all(each in again for each in ("1.10", said))  # without base64, as it came


@pytest.mark.parametrize("text", ["é", "[]", '{"Postdate": {"GivenBack": [1, 1, 0]', "[" * 2000])
def test_of_what_is_no_envelope_azure_alone_counts(text: str) -> None:
    assert read_failure_counts(text, 2) == (2, 2)


@pytest.mark.parametrize(
    ("returns", "sent_after", "errors"),
    [(1, 0, 0), (1, 2, 1), (0, 0, 1)],
    ids=["came back", "sent after the first had left", "was never handled"],
)
async def test_through_a_queue_what_a_handler_had_sent_before_passes_after_it_has_left(
    clock: VirtualClock, returns: int, sent_after: int, errors: int
) -> None:
    """Of that only records are there: another message under its id, as others send it, looks the same and must not."""
    queues, second, began = Queues(failures=returns, unanswered=returns), timedelta(seconds=1), clock.now()
    await queues.create_queues(["later"])
    mode, delays = "receive_only", DelayedDelivery(MemoryStore())
    endpoint = Endpoint("sales", transport=queues, transaction_mode=mode, clock=clock, delayed_delivery=delays)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        await context.send(b"remind", destination="later", delay=second, message_id="mine")

    async with endpoint:
        for sent in (began, began + sent_after * second):
            await endpoint.send(b"", destination="sales", headers={Headers.TIME_SENT: format_timestamp(sent)})
            await clock.advance(1.5 * second)
            assert (await queues.queue_lengths())["later"] == 1
    assert await queues.queue_lengths() == {"sales": 0, "sales.timeouts": 0, "error": errors, "later": 1}
    if errors:
        (copy,) = await MemoryTransport.receiver(queues, "error").receive(1)
        assert copy.envelope.headers[Headers.ERROR_CODE] == DuplicateMessage.code
