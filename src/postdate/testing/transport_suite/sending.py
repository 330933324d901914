"""Messages arrive unchanged and in order, or are answered with a clear reason why not."""

from __future__ import annotations

from functools import partial

from postdate.errors import MessageTooLarge, QueueNotFound
from postdate.messages import Envelope, Headers, encode_headers
from postdate.ports import Receiver, Transport
from postdate.testing.conformance import Topic, expect, expect_equal
from postdate.testing.transport_suite.subject import (
    IN,
    MICROSECOND,
    NOW,
    SECOND,
    TransportSubject,
    a_receiver,
    envelope,
    is_empty,
    left_in,
    queues,
    receive_one,
    two_queues,
)

sending: Topic[TransportSubject] = Topic("sending")


async def _arrives(subject: TransportSubject, sent: Envelope) -> None:
    async with queues(subject) as transport:
        expect_equal(list(await transport.send([sent], NOW)), [None], "what send returns")
        receiver = transport.receiver(sent.destination)
        received = (await receive_one(receiver)).envelope
        for field in ("message_id", "destination", "headers", "body", "expires_at", "due"):
            expect_equal(getattr(received, field), getattr(sent, field), f"{field} of a received message")
        await receiver.close()


@sending
async def headers_and_body_are_unchanged(subject: TransportSubject) -> None:
    """Id, headers and body arrive as they were sent, whatever bytes they hold."""
    await _arrives(subject, envelope(headers={"a": "1", "b": "", "space": " \t\r\n"}, body=bytes(range(256))))


@sending
async def unicode_survives(subject: TransportSubject) -> None:
    """Ids and headers in any script, emoji included, arrive unchanged (row 10)."""
    await _arrives(subject, envelope("номер-🕰️", headers={"ключ 🔑": "значение", "k": "e\u0301≠é 👩\u200d🚀"}))


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
    await _arrives(subject, envelope(headers={name: f"theirs {number}" for number, name in enumerate(names)}))


@sending
async def an_empty_body_and_no_headers_arrive(subject: TransportSubject) -> None:
    """An empty body arrives empty, and no headers as none."""
    await _arrives(subject, Envelope(IN, "e-1", {}, b""))


@sending
async def a_large_body_arrives(subject: TransportSubject) -> None:
    """A body of one megabyte, or the largest that the transport declares, arrives byte for byte."""
    async with queues(subject) as transport:
        room = transport.capabilities.largest_message_bytes - len(encode_headers(envelope().headers).encode())
    await _arrives(subject, envelope(body=(bytes(range(256)) * 4096)[:room]))


@sending
async def expiry_and_due_time_are_carried(subject: TransportSubject) -> None:
    """The expiry and the due time of a delayed message arrive to the microsecond."""
    await _arrives(subject, envelope(expires_at=NOW.replace(year=2100) + MICROSECOND, due=NOW - SECOND - MICROSECOND))


@sending.given(two_queues)
async def order_is_kept(transport: Transport) -> None:
    """Messages of one sender arrive in the order in which they were sent, within a send and between sends."""
    await transport.send([envelope(f"{n}") for n in range(5)], NOW)
    await transport.send([envelope(f"{n}") for n in range(5, 8)], NOW)
    expect_equal(await left_in(transport, IN, 8), [f"{n}" for n in range(8)], "order of arrival")


@sending.given(two_queues)
async def a_missing_queue_is_a_value(transport: Transport) -> None:
    """A message without a queue is answered with QueueNotFound in its place; the others are sent (row 38)."""
    answers = await transport.send([envelope("a"), envelope("b", "missing"), envelope("c")], NOW)
    kinds = [type(answer) for answer in answers]
    expect_equal(kinds, [type(None), QueueNotFound, type(None)], "answers")
    expect_equal(await left_in(transport, IN, 2), ["a", "c"], "sent messages")


@sending.given(a_receiver)
async def headers_at_their_limit_and_a_copy_of_them_are_sent(transport: Transport, receiver: Receiver) -> None:
    """Where headers have a limit of their own, a message at it is sent, and so is it with what an error copy adds."""
    limit = transport.capabilities.largest_headers_bytes
    if limit is None:
        return
    headers = {"kind": "check", "é": '"', "big": ""}
    headers["big"] = "x" * (limit - len(encode_headers(headers).encode()))
    told = {Headers.FAILED_QUEUE: IN, Headers.EXCEPTION_MESSAGE: "y" * 4_096}
    largest = [envelope("m-1", headers=headers), envelope("m-2", headers={**headers, **told})]
    expect_equal(list(await transport.send(largest, NOW)), [None, None], "answers")
    for sent in largest:
        received = await receive_one(receiver)
        expect_equal(received.envelope.headers, sent.headers, f"headers of {sent.message_id!r}")
        await receiver.commit(received, NOW)


@sending.given(partial(two_queues, largest_message_bytes=1_000))
async def too_large_is_a_value(transport: Transport) -> None:
    """A message over the declared limit is answered with MessageTooLarge; one at the limit and the others are sent."""
    headers = {"h": "value"}
    overhead = len(encode_headers(headers).encode())
    room = transport.capabilities.largest_message_bytes - overhead
    batch = [
        envelope("over", headers=headers, body=b"x" * (room + 1)),
        envelope("at", headers=headers, body=b"x" * room),
        envelope("under"),
    ]
    kinds = [type(answer) for answer in await transport.send(batch, NOW)]
    expect_equal(kinds, [MessageTooLarge, type(None), type(None)], "answers")
    expect_equal(await left_in(transport, IN, 2), ["at", "under"], "sent messages")


@sending.given(partial(two_queues, largest_message_bytes=1_000))
async def the_limit_counts_bytes(transport: Transport) -> None:
    """Headers count in bytes, not in characters: an emoji is four of them."""
    answers = await transport.send([envelope(headers={"h": "🕰" * 300}, body=b"")], NOW)
    expect_equal([type(answer) for answer in answers], [MessageTooLarge], "answers")


@sending.given(two_queues)
async def sending_nothing_is_nothing(transport: Transport) -> None:
    """An empty send has an empty answer and sends nothing."""
    expect_equal(list(await transport.send([], NOW)), [], "answers")
    expect(await is_empty(transport, IN), "the queue is empty")


@sending.given(two_queues)
async def creating_a_queue_again_keeps_its_messages(transport: Transport) -> None:
    """Creating queues is idempotent."""
    await transport.send([envelope()], NOW)
    await transport.create_queues([IN, "another"])
    expect_equal(await left_in(transport, IN, 1), ["e-1"], "messages")
    expect_equal(list(await transport.send([envelope("e-2", "another")], NOW)), [None], "answers")
