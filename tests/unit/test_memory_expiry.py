"""Messages with a time to be received in the queues in memory, and when a file gives room back."""

from datetime import UTC, datetime, timedelta

import pytest

from postdate import Envelope, MemoryTransport
from postdate.backends.sqlite.housekeeping import ROUNDS_UNUSED, FreePages
from postdate.ports import Completion
from postdate.ports.transports import ExpiryRules, expiry_in_queue
from postdate.testing import VirtualClock

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)


def lasting(message_id: str, span: timedelta | None = SECOND, to: str = "orders") -> Envelope:
    return Envelope(to, message_id, time_to_be_received=span)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW)


@pytest.fixture
async def transport(clock: VirtualClock) -> MemoryTransport:
    made = MemoryTransport(clock=clock)
    await made.create_queues(["orders", "out"])
    return made


async def test_until_its_time_has_passed_a_message_is_received_and_never_later_row_60(
    transport: MemoryTransport, clock: VirtualClock
) -> None:
    await transport.send([lasting("a"), lasting("b", 2 * SECOND), lasting("endless", None)], NOW)
    await clock.advance(SECOND)
    assert await transport.lengths_of(["orders", "out", "nowhere"]) == {"orders": 3, "out": 0}
    await clock.advance(MICROSECOND)
    assert await transport.lengths_of(["orders"]) == {"orders": 2}
    assert await transport.queue_lengths() == {"orders": 2, "out": 0}
    receiver = transport.receiver("orders")
    assert [each.envelope.message_id for each in await receiver.receive(10)] == ["b", "endless"]


async def test_what_is_held_survives_its_time_and_what_is_given_back_after_it_does_not(
    transport: MemoryTransport, clock: VirtualClock
) -> None:
    await transport.send([lasting("committed"), lasting("given back")], NOW)
    receiver = transport.receiver("orders")
    committed, given_back = await receiver.receive(2)
    await clock.advance(2 * SECOND)
    await receiver.commit(committed, clock.now(), Completion(outgoing=[lasting("sent", to="out")]))
    await receiver.roll_back(given_back)
    assert await transport.queue_lengths() == {"orders": 0, "out": 1}


# --- when a queue is done with a message -----------------------------------------------------------------------------


@pytest.mark.parametrize("sent_at", [NOW, NOW.replace(year=2000), NOW.replace(year=2100)])
def test_the_clock_of_the_queue_counts_and_not_that_of_the_sender(sent_at: datetime) -> None:
    here = NOW + 100 * SECOND
    zero = expiry_in_queue(timedelta(0), here)
    assert zero is not None
    for expires_at, span, left in (
        (None, SECOND, 1),
        (sent_at + 2 * SECOND, None, 2),
        (sent_at + 2 * SECOND, SECOND, 1),
        (sent_at + SECOND, 2 * SECOND, 1),
        (sent_at - SECOND, None, -1),
    ):
        envelope = Envelope("q", "m", expires_at=expires_at, time_to_be_received=span)
        end = expiry_in_queue(envelope.time_left(sent_at), here)
        assert end == zero + left * 1_000_000


@pytest.mark.parametrize("span", [None, timedelta.max, timedelta(days=365 * 9_000)])
def test_what_ends_after_all_time_never_ends(span: timedelta | None) -> None:
    assert expiry_in_queue(span, NOW) is None


@pytest.mark.parametrize("own", [None, True, False])
@pytest.mark.parametrize("expires", [True, False])
def test_what_a_message_says_of_dead_letters_wins_row_71(own: bool | None, expires: bool) -> None:
    envelope = Envelope("q", "m", use_dead_letter_queue=own)
    assert ExpiryRules().uses_dead_letters(envelope, expires=expires) is (own if own is not None else not expires)


# --- when room is given back ------------------------------------------------------------------------------------------

PAGE, LARGE = 4_096, 100_000


def after_looks(free: list[int], pages: int = LARGE) -> list[int]:
    room = FreePages()
    return [room.count_releasable(each, pages, PAGE) for each in free]


def test_pages_are_given_back_when_they_have_been_free_for_a_while() -> None:
    assert after_looks([50_000] * (ROUNDS_UNUSED + 1)) == [0] * (ROUNDS_UNUSED - 1) + [50_000, 50_000]


def test_a_file_that_uses_its_pages_again_and_again_keeps_them() -> None:
    assert set(after_looks([90_000, 90_000, 90_000, 10_000] * ROUNDS_UNUSED)) == {0}


def test_only_what_was_free_all_the_time_is_given_back() -> None:
    assert after_looks([60_000] + [90_000] * ROUNDS_UNUSED)[-2:] == [60_000, 90_000]


@pytest.mark.parametrize(("free", "pages"), [(2_000, 2_100), (24_000, LARGE)])
def test_little_room_is_left_as_it_is(free: int, pages: int) -> None:
    assert set(after_looks([free] * 20, pages)) == {0}
