"""Messages with a time to be received leave when it is over, by the clock of the queue, and no others do."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import anyio

from postdate.errors import TimeToBeReceivedInTransaction
from postdate.messages import Envelope
from postdate.ports import End, Received, Receiver, Transport
from postdate.testing.conformance import ConformanceFailure, Topic, expect, expect_equal, in_time
from postdate.testing.transport_suite.subject import (
    IN,
    NOW,
    OUT,
    TransportSubject,
    envelope,
    left_in,
    queues,
    receive_one,
    two_queues,
)

expiry: Topic[TransportSubject] = Topic("expiry")

_SHORT: Final = timedelta(milliseconds=1)
_LONG: Final = timedelta(days=1)
_MODERATE: Final = tuple(timedelta(seconds=seconds) for seconds in (0.5, 2, 8, 32))
"""Long enough to receive a message in, and short enough to wait for; the longer ones for a machine that is too slow."""
_MARGIN: Final = timedelta(milliseconds=100)
"""More than the clocks of test and queue can differ."""


async def _runs_out(subject: TransportSubject, transport: Transport, span: timedelta = _SHORT) -> None:
    """Let a time to be received run out, by a queue that counts in units of its own.

    A time that begins in the middle of a unit may last one more.
    """
    unit = transport.capabilities.time_to_be_received_precision
    await subject.let_pass(span + _MARGIN if unit <= _SHORT else max(span, unit) + unit + _MARGIN)


def _lasting(message_id: str, span: timedelta | None, destination: str = IN) -> Envelope:
    return Envelope(destination, message_id, {"kind": "check"}, b"body", time_to_be_received=span)


@expiry.given(two_queues)
async def within_its_time_a_message_is_received(transport: Transport) -> None:
    """A message with a time to be received arrives before that has run out (row 66)."""
    expect_equal(list(await transport.send([_lasting("lives", _LONG)], NOW)), [None], "what send returns")
    expect_equal(await left_in(transport, IN, 1), ["lives"], "received")


@expiry
async def past_its_time_a_message_is_never_received(subject: TransportSubject) -> None:
    """A queue that expires messages itself gives none out after its time; one that does not gives all (row 60)."""
    async with queues(subject) as transport:
        await transport.send([_lasting("gone", _SHORT), _lasting("lives", _LONG), envelope("endless")], NOW)
        await _runs_out(subject, transport)
        expected = ["lives", "endless"] if transport.capabilities.expires_messages else ["gone", "lives", "endless"]
        expect_equal(await left_in(transport, IN, len(expected)), expected, "received")


@expiry
async def the_clock_of_the_sender_does_not_count(subject: TransportSubject) -> None:
    """A sender whose clock is years behind or ahead neither loses its messages nor keeps them alive."""
    async with queues(subject) as transport:
        if not transport.capabilities.expires_messages:
            return
        for year in (2000, 2100):
            sent = [_lasting(f"gone {year}", _SHORT), _lasting(f"lives {year}", _LONG)]
            await transport.send(sent, NOW.replace(year=year))
        await _runs_out(subject, transport)
        expect_equal(await left_in(transport, IN, 2), ["lives 2000", "lives 2100"], "received")


@expiry
async def an_expired_message_leaves_the_queue_without_a_receiver(subject: TransportSubject) -> None:
    """A message that expires at the head of a queue is gone from it without a receiver (row 60)."""
    async with queues(subject) as transport:
        if not transport.capabilities.expires_messages or await transport.lengths_of([IN]) is None:
            return
        await transport.send([_lasting("gone", _SHORT), _lasting("lives", _LONG)], NOW)
        await _runs_out(subject, transport)
        with in_time("an expired message leaving its queue"):
            while (await transport.lengths_of([IN]) or {}).get(IN) != 1:  # noqa: ASYNC110 - only the queue knows
                await anyio.sleep(0.02)


@expiry
async def a_received_message_is_no_longer_subject_to_it(subject: TransportSubject) -> None:
    """A message that is held when its time runs out can be committed (specification 2.5)."""
    async with queues(subject) as transport:
        receiver = transport.receiver(IN)
        held, span = await _received_in_its_time(transport, receiver)
        await _runs_out(subject, transport, span)
        await receiver.commit(held, NOW, End(outgoing=[envelope("out", OUT)]))
        await receiver.close()
        expect_equal(await left_in(transport, OUT, 1), ["out"], "sent with the commit")


async def _received_in_its_time(transport: Transport, receiver: Receiver) -> tuple[Received, timedelta]:
    """Receive a message before it expires, with a longer time if the machine is too slow; return it and the time."""
    for span in _MODERATE:
        await transport.send([_lasting("held", span), envelope("behind")], NOW)
        received = await receive_one(receiver)
        if received.envelope.message_id == "held":
            return received, span
        await receiver.commit(received, NOW)
    raise ConformanceFailure(f"not received, though it had {_MODERATE[-1]}: a message with a time to be received")


@expiry
async def in_a_transaction_each_has_its_own_or_all_is_refused(subject: TransportSubject) -> None:
    """Messages of one commit keep their own times, or, where queues cannot do that, nothing happens (row 61)."""
    async with queues(subject) as transport:
        await transport.send([envelope("in")], NOW)
        outgoing = [_lasting("gone", _SHORT, OUT), _lasting("lives", _LONG, OUT), envelope("endless", OUT)]
        refused = await _commit(transport, outgoing)
        can = transport.capabilities
        expect_equal(refused, not can.time_to_be_received_in_transactions, "the commit is refused")
        if refused:
            expect_equal(await left_in(transport, IN, 1), ["in"], "the incoming message is still there")
        else:
            await _runs_out(subject, transport)
            expected = ["lives", "endless"] if can.expires_messages else ["gone", "lives", "endless"]
            expect_equal(await left_in(transport, OUT, len(expected)), expected, "sent with the commit")


async def _commit(transport: Transport, outgoing: list[Envelope]) -> bool:
    """Receive, commit with ``outgoing``, and return whether that was refused; then the message is back in its queue."""
    receiver = transport.receiver(IN)
    try:
        received = await receive_one(receiver)
        try:
            await receiver.commit(received, NOW, End(outgoing=outgoing))
        except TimeToBeReceivedInTransaction as error:
            expect(OUT in str(error), f"the error names the queue: {error}")
            await receiver.roll_back(received, failed=False)
            return True
        return False
    finally:
        await receiver.close()
