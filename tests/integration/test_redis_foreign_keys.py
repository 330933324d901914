"""Keys of another type in the place of messages and of their records: each is set aside by itself, with its bytes."""

from collections.abc import AsyncIterator

import pytest
from tests.integration.test_redis import MICROSECOND, NOW, SECOND, message, prepared
from tests.redis_subjects import Prefix, RedisStoreSubject, RedisTransportSubject
from typing_extensions import override

from postdate import Envelope
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.errors import DuplicateMessage
from postdate.ports import MessageFilter, Outcome, RecordKind
from postdate.testing import Check, Damage, StoreSubject, TransportSubject, store_checks, transport_checks
from postdate.testing.damaged import Damages, damages_of

_OF_STORES = {
    "an_unreadable_message_holds_up_nothing",
    "the_oldest_that_can_be_read_is_fetched",
    "an_operator_sees_the_others",
    "an_unreadable_row_keeps_its_bytes",
    "an_unreadable_row_is_discarded_once",
}
"""Of the conformance suite, what does not need anything of the message to be left."""

STORE_CHECKS = [check for check in store_checks() if check.topic == "unreadable" and check.name in _OF_STORES]
(TRANSPORT_CHECK,) = [
    check for check in transport_checks() if str(check) == "unreadable.an_unreadable_message_holds_up_nothing"
]


class ForeignKeys(Prefix):
    """Damages a message by putting a text in its place."""

    @override
    def damage(self, key: str | bytes, damage: Damage) -> bytes:
        self.client.delete(key)
        self.client.set(key, b"not ours")
        return b""


class ForeignKeysOfAStore(RedisStoreSubject):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.prefix = ForeignKeys(url)

    def damages(self) -> Damages:
        return damages_of(self.damage, [Damage.CONTENT])


class ForeignKeysInQueues(RedisTransportSubject):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.prefix = ForeignKeys(url)

    def damages(self) -> Damages:
        return damages_of(self.damage, [Damage.CONTENT])


@pytest.mark.parametrize("check", STORE_CHECKS, ids=str)
async def test_a_foreign_key_in_a_store_is_as_any_message_that_cannot_be_read(
    redis_url: str, check: Check[StoreSubject]
) -> None:
    subject = ForeignKeysOfAStore(redis_url)
    await check(subject)
    subject.drop()


async def test_a_foreign_key_in_a_queue_holds_up_nothing(redis_url: str) -> None:
    subject: TransportSubject = ForeignKeysInQueues(redis_url)
    await TRANSPORT_CHECK(subject)
    subject.drop()


@pytest.fixture
async def store(prefix: Prefix) -> AsyncIterator[RedisStore]:
    made = await prepared(RedisStore(prefix.login))
    yield made
    await made.close()


@pytest.fixture
async def transport(prefix: Prefix) -> AsyncIterator[RedisTransport]:
    made = RedisTransport(prefix.login)
    await made.create_queues(["done"])
    yield made
    await made.close()


def foreign(prefix: Prefix, ending: str) -> None:
    """Put a list where a key with this ending is."""
    (key,) = [key for key in prefix.all_keys() if key.endswith(ending.encode())]
    prefix.client.delete(key)
    prefix.client.rpush(key, b"not", b"ours")


@pytest.mark.parametrize("is_gone", [False, True], ids=["foreign", "gone"])
async def test_what_takes_the_place_of_a_message_is_kept_and_can_be_discarded(
    prefix: Prefix, store: RedisStore, *, is_gone: bool
) -> None:
    """Its place in the order of all still tells its id and when it is due."""
    await store.store(message(), NOW)
    foreign(prefix, ":m:m-1")
    assert await store.get("m-1") is None
    assert not await store.cancel("m-1", NOW)
    assert not await store.reschedule("m-1", NOW + SECOND, NOW)
    assert await store.list_pending(MessageFilter(), 10) == []
    if is_gone:
        prefix.client.delete(*[key for key in prefix.all_keys() if key.endswith(b":m:m-1")])
    assert await store.claim_due(NOW + SECOND, 10) == []
    (row,) = await store.list_unreadable(10)
    assert (row.message_id, row.queue) == ("m-1", "")
    if not is_gone:
        prefix.client.restore(f"{prefix.login.tag}:back", 0, row.raw["dump"])
        assert prefix.client.lrange(f"{prefix.login.tag}:back", 0, -1) == [b"not", b"ours"]
    statistics = await store.statistics(NOW)
    assert (statistics.pending, statistics.claimed, statistics.unreadable) == (0, 0, 1)
    await store.discard_unreadable(row.number, NOW)
    assert [each.kind for each in await store.history("m-1")][-1] is RecordKind.DISCARDED
    assert not [key for key in prefix.all_keys() if key.endswith(b":m:m-1")]


async def test_a_move_leaves_it_behind_for_who_claims(
    prefix: Prefix, store: RedisStore, transport: RedisTransport
) -> None:
    await store.store_many([message(f"m-{number}", NOW + number * MICROSECOND) for number in range(3)], NOW)
    foreign(prefix, ":m:m-1")
    moved = await store.move_due(NOW + SECOND, 10)
    assert (moved.delivered, moved.needs_claim) == (2, True)
    assert await store.claim_due(NOW + SECOND, 10) == []
    assert [each.message_id for each in await store.list_unreadable(10)] == ["m-1"]
    moved = await store.move_due(NOW + SECOND, 10)
    assert (moved.delivered, moved.needs_claim, moved.next_attempt) == (0, False, None)


async def test_a_message_that_was_replaced_while_it_was_held_is_lost_to_its_holder_alone(
    prefix: Prefix, store: RedisStore
) -> None:
    await store.store_many([message("m-1"), message("m-2")], NOW)
    claims = await store.claim_due(NOW + SECOND, 10)
    foreign(prefix, ":m:m-1")
    assert await store.finish(claims, Outcome.DELIVERED, NOW) == 1
    assert [record.kind for record in await store.history("m-2")] == [RecordKind.SCHEDULED, RecordKind.DELIVERED]


async def test_foreign_records_hold_up_no_message(prefix: Prefix, store: RedisStore, transport: RedisTransport) -> None:
    """A move that ended in the middle of its script had taken messages from their store, and put them nowhere."""
    await store.store_many([message(f"m-{number}") for number in range(3)], NOW)
    (key,) = [key for key in prefix.all_keys() if key.endswith(b":r:m-1")]
    prefix.client.delete(key)
    prefix.client.set(key, b"not ours")
    assert (await store.move_due(NOW + SECOND, 10)).delivered == 3
    receiver = transport.receiver("done")
    received = await receiver.receive(10)
    assert [each.envelope.message_id for each in received] == ["m-0", "m-1", "m-2"]
    for each in received:
        await receiver.commit(each, NOW)
    await receiver.close()
    assert [record.kind for record in await store.history("m-1")] == [RecordKind.DELIVERED, RecordKind.HANDLED]
    assert [key for key in prefix.all_keys() if key.endswith(b":xr:m-1")]
    with pytest.raises(DuplicateMessage):
        await store.store(message("m-1"), NOW)


async def test_a_foreign_key_in_a_queue_is_seen_by_none_who_looks_and_marked_with_its_bytes(
    prefix: Prefix, transport: RedisTransport
) -> None:
    await transport.send([Envelope("done", "e-1"), Envelope("done", "e-2")], NOW)
    (key,) = [key for key in prefix.all_keys() if b":qm:" in key and prefix.client.hget(key, "i") == b"e-1"]
    prefix.client.delete(key)
    prefix.client.set(key, b"not ours")
    shown = await transport.observer().browse("done", 10)
    assert [each.envelope.message_id for each in shown] == ["e-2"]
    receiver = transport.receiver("done")
    taken = await receiver.receive_by_id("e-2")
    assert taken is not None
    await receiver.roll_back(taken)
    (received,) = await receiver.receive(10)
    assert received.envelope.message_id == "e-2"
    await receiver.commit(received, NOW)
    (row,) = await transport.list_unreadable(10)
    assert (row.queue, b"not ours" in row.raw["dump"]) == ("done", True)
    await receiver.close()
