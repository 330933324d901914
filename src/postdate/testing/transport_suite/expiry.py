"""Messages with a time to be received: they leave in time, by the clock of the queue, and nothing else does."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import anyio

from postdate.errors import TimeToBeReceivedInTransaction
from postdate.messages import Envelope
from postdate.ports import End, Transport
from postdate.testing.conformance import Topic, expect, expect_equal, in_time
from postdate.testing.transport_suite.subject import (
    IN,
    NOW,
    OUT,
    TransportSubject,
    envelope,
    left_in,
    queues,
    receive_one,
)

expiry: Topic[TransportSubject] = Topic("expiry")

_SHORT: Final = timedelta(milliseconds=1)
_LONG: Final = timedelta(days=1)
_RUN_OUT_SECONDS: Final = 0.1
"""In this real time what is due to expire has certainly expired: nothing else is waited for."""


async def _short_time_runs_out(transport: Transport) -> None:
    """Wait until a short time to be received has run out, by a queue that counts in units of its own.

    A time that does not begin with a unit may last one more.
    """
    unit = transport.capabilities.time_to_be_received_precision
    units = unit if unit <= _SHORT else 2 * unit
    await anyio.sleep(units.total_seconds() + _RUN_OUT_SECONDS)


def _lasting(message_id: str, span: timedelta | None, destination: str = IN) -> Envelope:
    return Envelope(destination, message_id, {"kind": "check"}, b"body", time_to_be_received=span)


@expiry
async def within_its_time_a_message_is_received(subject: TransportSubject) -> None:
    """A message with a time to be received arrives before that has run out (row 66)."""
    async with queues(subject) as transport:
        expect_equal(list(await transport.send([_lasting("lives", _LONG)], NOW)), [None], "what send returns")
        expect_equal(await left_in(transport, IN, 1), ["lives"], "received")


@expiry
async def past_its_time_a_message_is_never_received(subject: TransportSubject) -> None:
    """A queue that expires messages itself gives none out after its time; one that does not gives all (row 60)."""
    async with queues(subject) as transport:
        await transport.send([_lasting("gone", _SHORT), _lasting("lives", _LONG), envelope("endless")], NOW)
        await _short_time_runs_out(transport)
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
        await _short_time_runs_out(transport)
        expect_equal(await left_in(transport, IN, 2), ["lives 2000", "lives 2100"], "received")


@expiry
async def an_expired_message_leaves_the_queue_without_a_receiver(subject: TransportSubject) -> None:
    """What expires at the head of a queue is gone from it though nobody receives (row 60)."""
    async with queues(subject) as transport:
        if not transport.capabilities.expires_messages or await transport.lengths_of([IN]) is None:
            return
        await transport.send([_lasting("gone", _SHORT), _lasting("lives", _LONG)], NOW)
        with in_time("an expired message leaving its queue"):
            while (await transport.lengths_of([IN]) or {}).get(IN) != 1:  # noqa: ASYNC110 - only the queue knows
                await anyio.sleep(0.02)


@expiry
async def a_received_message_is_no_longer_subject_to_it(subject: TransportSubject) -> None:
    """A message that is held when its time runs out can be committed (specification 2.5)."""
    async with queues(subject) as transport:
        await transport.send([_lasting("held", timedelta(seconds=1))], NOW)
        receiver = transport.receiver(IN)
        held = await receive_one(receiver)
        await anyio.sleep(1.1)
        await receiver.commit(held, NOW, End(outgoing=[envelope("out", OUT)]))
        await receiver.close()
        expect_equal(await left_in(transport, OUT, 1), ["out"], "sent with the commit")


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
            await _short_time_runs_out(transport)
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
