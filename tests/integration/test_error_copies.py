"""What the copy of a message for the error or the audit queue says besides is not held against the limit of queues."""

import pytest

from postdate.errors import MessageTooLarge
from postdate.messages import Envelope, Headers, encode_headers, size_in_bytes
from postdate.testing import TransportSubject
from postdate.testing.transport_suite.subject import IN, NOW, open_queues, receive_one

LIMIT = 1_000
ROOM = 256 * 1024
TAKEN_BY_AZURE = 30_000
"""As a body it has less than 64 KiB in base64 in JSON in base64, which is what Azure takes whatever the limit."""


def of_size(size: int, headers: dict[str, str]) -> Envelope:
    return Envelope(IN, f"m-{size}", headers, b"x" * (size - size_in_bytes(encode_headers(headers), b"")))


@pytest.mark.parametrize("header", [Headers.FAILED_QUEUE, Headers.PROCESSING_ENDED])
async def test_a_copy_may_be_larger_than_the_message_and_has_its_own_limit(
    transport_subject: TransportSubject, header: str
) -> None:
    copied = {"kind": "check", header: "2026-01-31 12:00:00:000000 Z"}
    largest = TAKEN_BY_AZURE if "Azure" in type(transport_subject).__name__ else LIMIT + ROOM
    async with open_queues(transport_subject, largest_message_bytes=LIMIT) as transport:
        plain = [of_size(LIMIT + 1, {"kind": "check"}), of_size(LIMIT, {"kind": "check"})]
        assert [type(answer) for answer in await transport.send(plain, NOW)] == [MessageTooLarge, type(None)]
        copies = [of_size(LIMIT + ROOM + 1, copied), of_size(largest, copied)]
        assert [type(answer) for answer in await transport.send(copies, NOW)] == [MessageTooLarge, type(None)]
        receiver = transport.receiver(IN)
        for sent in (plain[1], copies[1]):
            received = await receive_one(receiver)
            assert (received.envelope.headers, received.envelope.body) == (sent.headers, sent.body)
            await receiver.commit(received, NOW)
        await receiver.close()
