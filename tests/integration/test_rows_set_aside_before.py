"""Rows that versions up to 6b98bbd had set aside come back to where they were, marked: in Redis and Azure.

In databases with migrations ``test_takeover.py`` shows it.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from tests.azure_store_subjects import TablePlace
from tests.redis_subjects import Prefix

from postdate import DelayedMessage
from postdate.backends.azure.table_names import records_table
from postdate.backends.redis.layout import format_instant
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.errors import DuplicateMessage
from postdate.ports import Outcome, UnreadableRow

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = datetime(2027, 1, 31, 12, tzinfo=UTC)
TORN = b"{torn"


def bodies(rows: Sequence[UnreadableRow]) -> dict[str, bytes | None]:
    return {row.message_id: row.raw.get("body") for row in rows}


async def test_under_a_prefix_of_redis(redis_url: str) -> None:
    """That version moved a message to a key of its own, by number; the id of one was stored anew."""
    prefix = Prefix(redis_url)
    place, queues = f"{prefix.login.tag}:s:conformance.timeouts", f"{prefix.login.tag}:q"
    at = {"d": format_instant(NOW), "h": TORN, "reason": "headers must be a JSON object", "at": format_instant(NOW)}
    for number, id_ in enumerate(("torn", "stored-anew"), 1):
        prefix.client.hset(f"{place}:x:{number}", mapping={**at, "i": id_, "q": "orders", "b": b"\0" + id_.encode()})
        prefix.client.zadd(f"{place}:xs", {str(number): number})
    prefix.client.set(f"{place}:xnumber", 2)
    prefix.client.hset(f"{queues}:x:1", mapping={**at, "i": "moved", "Q": "orders", "b": b"\0moved"})
    prefix.client.zadd(f"{queues}:xs", {"1": 1})
    store, transport = RedisStore(prefix.login, table="conformance.timeouts"), RedisTransport(prefix.login)
    await store.store(DelayedMessage("stored-anew", NOW, "orders", {"kind": "new"}, b"second"), NOW)
    await transport.create_queues(["orders"])
    for _ in range(2):
        await store.setup()
    assert bodies(await transport.list_unreadable(10)) == {"moved": b"\0moved"}
    assert bodies(await store.list_unreadable(10)) == {"torn": b"\0torn", "stored-anew": b"\0stored-anew"}
    (claim,) = await store.claim_due(LATER, 10)
    assert claim.message.body == b"second"
    assert await store.finish([claim], Outcome.DELIVERED, LATER) == 1
    with pytest.raises(DuplicateMessage):
        await store.store(DelayedMessage("torn", NOW, "orders"), NOW)
    for source in (store, transport):
        for row in await source.list_unreadable(10):
            await source.discard_unreadable(row.number, LATER)
    left = [
        key for key in prefix.all_keys() if b":m:" in key or b":qm:" in key or b":x:" in key or key.endswith(b":xs")
    ]
    assert left == []
    await store.close()
    await transport.close()
    prefix.drop()


async def test_in_a_table_of_azure(azurite_connection: str) -> None:
    """That version moved an entity to the partition ``malformed`` of the records."""
    place = TablePlace(azurite_connection)
    store = await place.open()
    await store.setup()
    row = {"RowKey": f"20260131120000_{'0' * 32}", "MessageId": "torn", "Headers": TORN.decode(), "Body": b"\0torn"}
    place.add({**row, "PartitionKey": "malformed", "Reason": "headers must be"}, records_table(place.table))
    for _ in range(2):
        await store.setup()
    (back,) = await store.list_unreadable(10)
    assert (back.message_id, back.reason, back.raw["Headers"]) == ("torn", "headers must be", TORN)
    assert [each["PartitionKey"] for each in place.entities(records_table(place.table))] == []
    assert await store.claim_due(LATER, 10) == []
    await store.discard_unreadable(back.number, LATER)
    assert place.entities() == []
    await place.close()
