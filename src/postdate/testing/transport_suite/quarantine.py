"""Messages in queues that cannot be read are set aside, one by one, and put back once they are mended (ADR 0019)."""

from __future__ import annotations

from unittest import mock

from postdate import messages
from postdate.errors import InvalidHeaders, InvalidMessage, MessageNotFound
from postdate.ports import Mending, Quarantined, Transport
from postdate.testing.conformance import ConformanceFailure, Damage, Topic, expect, expect_equal, expect_error
from postdate.testing.transport_suite.subject import (
    IN,
    NOW,
    TransportSubject,
    envelope,
    ids,
    is_empty,
    quarantining,
    queues,
    receive,
    receive_one,
)

quarantine: Topic[TransportSubject] = Topic("quarantine")

_GOOD = [f"good-{number:02d}" for number in range(50)]
_MENDED = {
    Damage.HEADERS: Mending(headers={"mended": "é"}),
    Damage.DUE: Mending(due=NOW),
    Damage.CONTENT: Mending(headers={"mended": "é"}, body=b"mended"),
    Damage.FLIP: Mending(body=b"mended"),
}


def _bad(damage: Damage) -> str:
    return f"bad-{damage.value}"


@quarantine
async def an_unreadable_message_holds_up_nothing(subject: TransportSubject) -> None:
    """Of fifty good messages and damaged ones before and among them, the fifty are received in order and committed."""
    async with queues(subject) as transport:
        found = quarantining(subject, transport)
        if found is None:
            return
        place, damages = found
        bad = [envelope(_bad(damage), due=NOW) for damage in damages]
        good = [envelope(id_) for id_ in _GOOD]
        await transport.send([bad[0], *good[:10], *bad[1:], *good[10:]], NOW)
        for damage in damages:
            subject.damage(_bad(damage), damage)
        receiver = transport.receiver(IN)
        received = list[str]()
        while len(received) < len(_GOOD):
            batch = await receive(receiver, 7)
            received += ids(batch)
            for each in batch:
                await receiver.commit(each, NOW)
        await receiver.close()
        expect_equal(received, _GOOD, "received beside damaged messages")
        expect(await is_empty(transport, IN), "nothing else can be received")
        expect_equal(await place.quarantined_count(), len(damages), "set aside")


async def _set_aside(subject: TransportSubject, transport: Transport, damage: Damage) -> tuple[bytes, Quarantined]:
    """Send one message, damage it and have it met; return what stands there, and what is set aside."""
    bad = envelope(_bad(damage), headers={"kind": "check"}, body=b"\0body", due=NOW)
    await transport.send([bad, envelope("behind")], NOW)
    there = subject.damage(_bad(damage), damage)
    receiver = transport.receiver(IN)
    received = await receive_one(receiver)
    expect_equal(received.envelope.message_id, "behind", "received, where the damaged message is first")
    await receiver.commit(received, NOW)
    await receiver.close()
    found = quarantining(subject, transport)
    assert found is not None
    (aside,) = [each for each in await found[0].quarantined(10) if each.message_id == _bad(damage)]
    return there, aside


@quarantine
async def an_unreadable_message_is_set_aside_with_its_bytes(subject: TransportSubject) -> None:
    """Its bytes, its queue and the reason are kept, over a restart."""
    async with queues(subject) as transport:
        found = quarantining(subject, transport)
        if found is None:
            return
        for damage in found[1]:
            there, aside = await _set_aside(subject, transport, damage)
            expect_equal(aside.place, IN, "place")
            expect(bool(aside.reason.strip()), "a reason is given")
            expect(aside.at.tzinfo is not None, "the time of setting aside is aware")
            if damage not in {Damage.CONTENT, Damage.FLIP}:
                expect(b"\0body" in aside.raw.values(), f"the body is kept, got {sorted(aside.raw)}")
            if damage is not Damage.CONTENT:
                expect(there in aside.raw.values(), f"what stood there is kept, got {dict(aside.raw)}")
    async with queues(subject) as transport:
        found = quarantining(subject, transport)
        assert found is not None
        expect_equal(await found[0].quarantined_count(), len(found[1]), "set aside, after a restart")
        expect_equal(len(await found[0].quarantined(1)), 1, "set aside, up to one")


@quarantine
async def a_mended_message_is_put_back(subject: TransportSubject) -> None:
    """With what was damaged put in its place it is in its queue again, and is received."""
    async with queues(subject) as transport:
        found = quarantining(subject, transport)
        if found is None:
            return
        for damage in found[1]:
            _, aside = await _set_aside(subject, transport, damage)
            await found[0].put_back(aside.number, _MENDED[damage], NOW)
            expect_equal(await found[0].quarantined_count(), 0, "set aside, after it was put back")
            receiver = transport.receiver(IN)
            received = await receive_one(receiver)
            headers = _MENDED[damage].headers or {"kind": "check"}
            body = _MENDED[damage].body or b"\0body"
            expected = envelope(_bad(damage), headers=headers, body=body, due=NOW)
            expect_equal(received.envelope, expected, "the mended message")
            await receiver.commit(received, NOW)
            await receiver.close()


@quarantine
async def what_is_still_unreadable_stays_set_aside(subject: TransportSubject) -> None:
    """Put back unmended it says why not and stays; a number that is not there is refused; it can be discarded."""
    async with queues(subject) as transport:
        found = quarantining(subject, transport)
        if found is None:
            return
        place, damages = found
        for damage in damages:
            _, aside = await _set_aside(subject, transport, damage)
            try:
                await place.put_back(aside.number, Mending(), NOW)
            except (InvalidMessage, InvalidHeaders):
                pass
            else:
                raise ConformanceFailure("put back unmended: expected InvalidMessage or InvalidHeaders")
            expect_equal(await place.quarantined_count(), 1, "set aside, after it was refused")
            await place.discard_quarantined(aside.number, NOW)
            expect_equal(await place.quarantined_count(), 0, "set aside, after it was discarded")
            for call in (place.put_back(aside.number, Mending(), NOW), place.discard_quarantined(aside.number, NOW)):
                with expect_error(MessageNotFound, "naming what is not set aside any more"):
                    await call


@quarantine
async def tightened_limits_refuse_nothing_that_is_there(subject: TransportSubject) -> None:
    """What was sent under wider limits is received unchanged, where the queues are rows of a database."""
    async with queues(subject) as transport:
        if quarantining(subject, transport) is None:
            return
        sent = envelope("a-long-id" * 20, body=b"b" * 5_000)
        await transport.send([sent], NOW)
        with mock.patch.multiple(messages, MESSAGE_ID_LIMIT=5, DESTINATION_LIMIT=5):
            receiver = transport.receiver(IN)
            received = await receive_one(receiver)
            expect_equal(received.envelope, sent, "the message as it is received")
            await receiver.commit(received, NOW)
            await receiver.close()
