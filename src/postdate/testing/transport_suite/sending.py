"""Checks that messages arrive unchanged and in order, or that send returns a clear reason."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Final

import anyio

from postdate.errors import MessageTooLarge, QueueNotFound, TimeToBeReceivedInTransaction
from postdate.messages import Envelope, Headers, encode_headers
from postdate.ports import Completion, Received, Receiver, Transport
from postdate.testing.conformance import ConformanceFailure, Topic, expect, expect_equal, expect_in_time
from postdate.testing.transport_suite.subject import (
    IN,
    MICROSECOND,
    NOW,
    OUT,
    SECOND,
    TransportSubject,
    envelope,
    ids_in,
    is_empty,
    open_queues,
    open_receiver,
    receive_one,
    receiver_of,
)

sending: Topic[TransportSubject] = Topic("sending")


async def _expect_unchanged(subject: TransportSubject, sent: Envelope) -> None:
    async with open_queues(subject) as transport:
        expect_equal(list(await transport.send([sent], NOW)), [None], "what send returns")
        async with receiver_of(transport, sent.destination) as receiver:
            received = (await receive_one(receiver)).envelope
        for field in ("message_id", "destination", "headers", "body", "expires_at", "due"):
            expect_equal(getattr(received, field), getattr(sent, field), f"{field} of a received message")


@sending
async def headers_and_body_are_unchanged(subject: TransportSubject) -> None:
    """Id, headers and body arrive as they were sent, whatever bytes they hold."""
    await _expect_unchanged(subject, envelope(headers={"a": "1", "b": "", "space": " \t\r\n"}, body=bytes(range(256))))


@sending
async def unicode_survives(subject: TransportSubject) -> None:
    """Ids and headers in any script, emoji included, arrive unchanged (row 10)."""
    await _expect_unchanged(subject, envelope("номер-🕰️", headers={"ключ 🔑": "значение", "k": "e\u0301≠é 👩\u200d🚀"}))


@sending
async def headers_with_reserved_names_are_unchanged(subject: TransportSubject) -> None:
    """Headers that steer delayed delivery, or that an adapter has a use for, are headers to a queue like any other."""
    names = (
        Headers.TIMEOUT_DESTINATION,
        Headers.TIMEOUT_EXPIRE,
        Headers.TIMEOUT_PROPERTIES_PREFIX + "another",
        Headers.EXPIRE,
        "Postdate.Queue.MessageId",
        "Postdate.Queue.Due",
        "Postdate.Queue.ExpiresAt",
        "amqp.priority",
        "x-postdate-due",
        "x-postdate-id",
        "x-delay",
        "CC",
    )
    await _expect_unchanged(subject, envelope(headers={name: f"theirs {number}" for number, name in enumerate(names)}))


@sending
async def an_empty_body_and_no_headers_arrive(subject: TransportSubject) -> None:
    """An empty body arrives empty, and no headers as none."""
    await _expect_unchanged(subject, Envelope(IN, "e-1", {}, b""))


@sending
async def a_large_body_arrives(subject: TransportSubject) -> None:
    """A body of one megabyte, or the largest that the transport declares, arrives byte for byte."""
    async with open_queues(subject) as transport:
        free_bytes = transport.capabilities.largest_message_bytes - len(encode_headers(envelope().headers).encode())
    await _expect_unchanged(subject, envelope(body=(bytes(range(256)) * 4096)[:free_bytes]))


@sending
async def expiry_and_due_time_are_carried(subject: TransportSubject) -> None:
    """The expiry and the due time of a delayed message arrive to the microsecond."""
    await _expect_unchanged(
        subject, envelope(expires_at=NOW.replace(year=2100) + MICROSECOND, due=NOW - SECOND - MICROSECOND)
    )


@sending.with_fixture(open_queues)
async def order_is_kept(transport: Transport) -> None:
    """Messages of one sender arrive in the order in which they were sent, within a send and between sends."""
    await transport.send([envelope(f"{n}") for n in range(5)], NOW)
    await transport.send([envelope(f"{n}") for n in range(5, 8)], NOW)
    expect_equal(await ids_in(transport, IN, 8), [f"{n}" for n in range(8)], "order of arrival")


@sending.with_fixture(open_queues)
async def a_missing_queue_is_a_value(transport: Transport) -> None:
    """A message without a queue is answered with QueueNotFound in its place; the others are sent (row 38)."""
    answers = await transport.send([envelope("a"), envelope("b", "missing"), envelope("c")], NOW)
    expect_equal([type(answer) for answer in answers], [type(None), QueueNotFound, type(None)], "answers")
    expect_equal(await ids_in(transport, IN, 2), ["a", "c"], "sent messages")


@sending.with_fixtures(open_receiver)
async def headers_at_their_limit_and_a_copy_of_them_are_sent(transport: Transport, receiver: Receiver) -> None:
    """Where headers have a limit of their own, a message at it is sent, and so is it with what an error copy adds."""
    limit = transport.capabilities.largest_headers_bytes
    if limit is None:
        return
    headers = {"kind": "check", "é": '"', "big": ""}
    headers["big"] = "x" * (limit - len(encode_headers(headers).encode()))
    added = {Headers.FAILED_QUEUE: IN, Headers.EXCEPTION_MESSAGE: "y" * 4_096}
    largest = [envelope("m-1", headers=headers), envelope("m-2", headers={**headers, **added})]
    expect_equal(list(await transport.send(largest, NOW)), [None, None], "answers")
    for sent in largest:
        received = await receive_one(receiver)
        expect_equal(received.envelope.headers, sent.headers, f"headers of {sent.message_id!r}")
        await receiver.commit(received, NOW)


@sending.with_fixture(partial(open_queues, largest_message_bytes=1_000))
async def too_large_is_a_value(transport: Transport) -> None:
    """A message over the declared limit is answered with MessageTooLarge; one at the limit and the others are sent."""
    headers = {"h": "value"}
    room = transport.capabilities.largest_message_bytes - len(encode_headers(headers).encode())
    batch = [
        envelope("over", headers=headers, body=b"x" * (room + 1)),
        envelope("at", headers=headers, body=b"x" * room),
        envelope("under"),
    ]
    kinds = [type(answer) for answer in await transport.send(batch, NOW)]
    expect_equal(kinds, [MessageTooLarge, type(None), type(None)], "answers")
    expect_equal(await ids_in(transport, IN, 2), ["at", "under"], "sent messages")


@sending.with_fixture(partial(open_queues, largest_message_bytes=1_000))
async def the_limit_counts_bytes(transport: Transport) -> None:
    """Headers count in bytes, not in characters: an emoji is four of them."""
    answers = await transport.send([envelope(headers={"h": "🕰" * 300}, body=b"")], NOW)
    expect_equal([type(answer) for answer in answers], [MessageTooLarge], "answers")


@sending.with_fixture(open_queues)
async def sending_nothing_is_nothing(transport: Transport) -> None:
    """An empty send has an empty answer and sends nothing."""
    expect_equal(list(await transport.send([], NOW)), [], "answers")
    expect(await is_empty(transport, IN), "the queue is empty")


@sending.with_fixture(open_queues)
async def creating_a_queue_again_keeps_its_messages(transport: Transport) -> None:
    """Creating queues is idempotent."""
    await transport.send([envelope()], NOW)
    await transport.create_queues([IN, "another"])
    expect_equal(await ids_in(transport, IN, 1), ["e-1"], "messages")
    expect_equal(list(await transport.send([envelope("e-2", "another")], NOW)), [None], "answers")


# --- expiry -----------------------------------------------------------------------------------------------------------


expiry: Topic[TransportSubject] = Topic("expiry")

_SHORT: Final = timedelta(milliseconds=1)
_LONG: Final = timedelta(days=1)
_MODERATE: Final = tuple(timedelta(seconds=seconds) for seconds in (0.5, 2, 8, 32))
"""Times to be received that are long enough to receive a message in time. A check tries the longer ones only if the
machine is too slow for the shorter ones."""
_MARGIN: Final = timedelta(milliseconds=100)
"""More than the difference between the clocks of test and queue."""


async def _wait_for_expiry(subject: TransportSubject, transport: Transport, span: timedelta = _SHORT) -> None:
    """Wait until a time to be received has passed, in a queue that counts in units of its own.

    A time that begins in the middle of a unit may last one unit longer.
    """
    unit = transport.capabilities.time_to_be_received_precision
    await subject.pass_time(span + _MARGIN if unit <= _SHORT else max(span, unit) + unit + _MARGIN)


def _expiring_envelope(message_id: str, span: timedelta | None, destination: str = IN) -> Envelope:
    return Envelope(destination, message_id, {"kind": "check"}, b"body", time_to_be_received=span)


@expiry.with_fixture(open_queues)
async def within_its_time_a_message_is_received(transport: Transport) -> None:
    """A message with a time to be received arrives before that has run out (row 66)."""
    expect_equal(list(await transport.send([_expiring_envelope("lives", _LONG)], NOW)), [None], "what send returns")
    expect_equal(await ids_in(transport, IN, 1), ["lives"], "received")


@expiry
async def past_its_time_a_message_is_never_received(subject: TransportSubject) -> None:
    """A queue that expires messages itself gives none out after its time; one that does not gives all (row 60)."""
    async with open_queues(subject) as transport:
        await transport.send(
            [_expiring_envelope("gone", _SHORT), _expiring_envelope("lives", _LONG), envelope("endless")], NOW
        )
        await _wait_for_expiry(subject, transport)
        expected = ["lives", "endless"] if transport.capabilities.expires_messages else ["gone", "lives", "endless"]
        expect_equal(await ids_in(transport, IN, len(expected)), expected, "received")


@expiry
async def the_clock_of_the_sender_does_not_count(subject: TransportSubject) -> None:
    """A sender whose clock is years behind or ahead neither loses its messages nor keeps them alive."""
    async with open_queues(subject) as transport:
        if not transport.capabilities.expires_messages:
            return
        for year in (2000, 2100):
            sent = [_expiring_envelope(f"gone {year}", _SHORT), _expiring_envelope(f"lives {year}", _LONG)]
            await transport.send(sent, NOW.replace(year=year))
        await _wait_for_expiry(subject, transport)
        expect_equal(await ids_in(transport, IN, 2), ["lives 2000", "lives 2100"], "received")


@expiry
async def an_expired_message_leaves_the_queue_without_a_receiver(subject: TransportSubject) -> None:
    """A message that expires at the head of a queue is gone from it without a receiver (row 60)."""
    async with open_queues(subject) as transport:
        if not transport.capabilities.expires_messages or await transport.lengths_of([IN]) is None:
            return
        await transport.send([_expiring_envelope("gone", _SHORT), _expiring_envelope("lives", _LONG)], NOW)
        await _wait_for_expiry(subject, transport)
        with expect_in_time("an expired message leaving its queue"):
            while (await transport.lengths_of([IN]) or {}).get(IN) != 1:  # noqa: ASYNC110 - only the queue knows
                await anyio.sleep(0.02)


@expiry
async def a_received_message_is_no_longer_subject_to_it(subject: TransportSubject) -> None:
    """A message that is held when its time runs out can be committed."""
    async with open_queues(subject) as transport:
        async with receiver_of(transport) as receiver:
            received, span = await _receive_before_expiry(transport, receiver)
            await _wait_for_expiry(subject, transport, span)
            await receiver.commit(received, NOW, Completion(outgoing=[envelope("out", OUT)]))
        expect_equal(await ids_in(transport, OUT, 1), ["out"], "sent with the commit")


async def _receive_before_expiry(transport: Transport, receiver: Receiver) -> tuple[Received, timedelta]:
    """Receive a message before it expires, with a longer time if the machine is too slow; return it and the time."""
    for span in _MODERATE:
        await transport.send([_expiring_envelope("held", span), envelope("behind")], NOW)
        received = await receive_one(receiver)
        if received.envelope.message_id == "held":
            return received, span
        await receiver.commit(received, NOW)
    raise ConformanceFailure(f"not received, though it had {_MODERATE[-1]}: a message with a time to be received")


@expiry
async def in_a_transaction_each_has_its_own_or_all_is_refused(subject: TransportSubject) -> None:
    """Messages of one commit keep their own times, or, where queues cannot do that, nothing happens (row 61)."""
    async with open_queues(subject) as transport:
        await transport.send([envelope("in")], NOW)
        outgoing = [
            _expiring_envelope("gone", _SHORT, OUT),
            _expiring_envelope("lives", _LONG, OUT),
            envelope("endless", OUT),
        ]
        refused = await _commit_or_roll_back(transport, outgoing)
        can = transport.capabilities
        expect_equal(refused, not can.time_to_be_received_in_transactions, "the commit is refused")
        if refused:
            expect_equal(await ids_in(transport, IN, 1), ["in"], "the incoming message is still there")
        else:
            await _wait_for_expiry(subject, transport)
            expected = ["lives", "endless"] if can.expires_messages else ["gone", "lives", "endless"]
            expect_equal(await ids_in(transport, OUT, len(expected)), expected, "sent with the commit")


async def _commit_or_roll_back(transport: Transport, outgoing: list[Envelope]) -> bool:
    """Receive and commit with ``outgoing``; return whether that was refused; then the message is back in its queue."""
    async with receiver_of(transport) as receiver:
        received = await receive_one(receiver)
        try:
            await receiver.commit(received, NOW, Completion(outgoing=outgoing))
        except TimeToBeReceivedInTransaction as error:
            expect(OUT in str(error), f"the error names the queue: {error}")
            await receiver.roll_back(received, failed=False)
            return True
    return False
