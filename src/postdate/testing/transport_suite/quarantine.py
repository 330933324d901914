"""Messages in queues that cannot be read are set aside, one by one, and put back once they are mended (ADR 0019)."""

from __future__ import annotations

from unittest import mock

from postdate import messages
from postdate.ports import Quarantined, Transport
from postdate.testing.conformance import Damage, Topic, expect, expect_equal
from postdate.testing.damaged import GOOD, MENDED, Rows, bad, expect_kept
from postdate.testing.transport_suite.subject import (
    IN,
    NOW,
    TransportSubject,
    envelope,
    ids,
    is_empty,
    quarantining,
    receive,
    receiver_of,
    take_one,
)

quarantine: Topic[TransportSubject] = Topic("quarantine")


@quarantine.given(quarantining)
async def an_unreadable_message_holds_up_nothing(transport: Transport, rows: Rows) -> None:
    """Of fifty good messages and damaged ones before and among them, the fifty are received in order and committed."""
    damaged = [envelope(bad(damage), due=NOW) for damage in rows.damages]
    good = [envelope(id_) for id_ in GOOD]
    await transport.send([damaged[0], *good[:10], *damaged[1:], *good[10:]], NOW)
    for damage in rows.damages:
        rows.damage(bad(damage), damage)
    received = list[str]()
    async with receiver_of(transport) as receiver:
        while len(received) < len(GOOD):
            batch = await receive(receiver, 7)
            received += ids(batch)
            for each in batch:
                await receiver.commit(each, NOW)
    expect_equal(received, GOOD, "received beside damaged messages")
    expect(await is_empty(transport, IN), "nothing else can be received")
    expect_equal(await rows.place.quarantined_count(), len(rows.damages), "set aside")


async def _set_aside(transport: Transport, rows: Rows, damage: Damage) -> tuple[bytes, Quarantined]:
    """Send one message, damage it, and receive; return the damaged bytes, and the row that is set aside."""
    damaged = envelope(bad(damage), headers={"kind": "check"}, body=b"\0body", due=NOW)
    await transport.send([damaged, envelope("behind")], NOW)
    there = rows.damage(bad(damage), damage)
    expect_equal((await take_one(transport)).message_id, "behind", "received, where the damaged message is first")
    return there, await rows.aside(damage)


@quarantine
async def an_unreadable_message_is_set_aside_with_its_bytes(subject: TransportSubject) -> None:
    """Its bytes, its queue and the reason are kept, over a restart."""
    async with quarantining(subject) as found:
        if found is None:
            return
        transport, rows = found
        for damage in rows.damages:
            there, aside = await _set_aside(transport, rows, damage)
            expect_kept(aside, IN, damage, there)
    async with quarantining(subject) as found:
        assert found is not None
        await found[1].expect_all_aside()


@quarantine.given(quarantining)
async def a_mended_message_is_put_back(transport: Transport, rows: Rows) -> None:
    """With the damaged part replaced it is in its queue again, and is received."""
    for damage in rows.damages:
        _, aside = await _set_aside(transport, rows, damage)
        await rows.place.put_back(aside.number, MENDED[damage], NOW)
        expect_equal(await rows.place.quarantined_count(), 0, "set aside, after it was put back")
        headers = MENDED[damage].headers or {"kind": "check"}
        expected = envelope(bad(damage), headers=headers, body=MENDED[damage].body or b"\0body", due=NOW)
        expect_equal(await take_one(transport), expected, "the mended message")


@quarantine.given(quarantining)
async def what_is_still_unreadable_stays_set_aside(transport: Transport, rows: Rows) -> None:
    """Put back unmended it is refused with the reason and stays; an unknown number is refused; it can be discarded."""
    for damage in rows.damages:
        _, aside = await _set_aside(transport, rows, damage)
        await rows.expect_refused(aside)


@quarantine.given(quarantining)
async def tightened_limits_refuse_nothing_that_is_there(transport: Transport, rows: Rows) -> None:
    """Messages sent under wider limits are received unchanged, where the queues are rows of a database."""
    sent = envelope("a-long-id" * 20, body=b"b" * 5_000)
    await transport.send([sent], NOW)
    with mock.patch.multiple(messages, MESSAGE_ID_LIMIT=5, DESTINATION_LIMIT=5):
        expect_equal(await take_one(transport), sent, "the message as it is received")
