"""Checks that unreadable messages in queues are marked, one by one, and do not delay others (ADR 0043)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from unittest import mock

from postdate.ports import Transport
from postdate.testing.conformance import expect, expect_equal
from postdate.testing.damaged import Rows
from postdate.testing.transport_suite.subject import (
    IN,
    NOW,
    TransportSubject,
    envelope,
    ids,
    is_empty,
    open_with_rows,
    receive_and_commit_one,
    receiver_of,
)
from postdate.testing.unreadable import BODY, DamagedSource, unreadable_topic

_RECEIVE_LIMIT = 7


@asynccontextmanager
async def _open_source(subject: TransportSubject) -> AsyncGenerator[DamagedSource | None]:
    async with open_with_rows(subject) as transport_with_rows:
        if transport_with_rows is None:
            yield None
            return
        transport, rows = transport_with_rows

        async def add(message_ids: Sequence[str]) -> None:
            await transport.send([envelope(each, body=BODY, due=NOW) for each in message_ids], NOW)

        async def fetch() -> list[str]:
            received = list[str]()
            async with receiver_of(transport) as receiver:
                while batch := await receiver.receive(_RECEIVE_LIMIT, wait=False):
                    received += ids(batch)
                    for each in batch:
                        await receiver.commit(each, NOW)
            expect(await is_empty(transport, IN), "nothing else can be received")
            lengths = await transport.lengths_of([IN])
            expect_equal(dict(lengths or {}).get(IN, 0), 0, "length of a queue with unreadable messages alone")
            return received

        yield DamagedSource(rows, IN, add, fetch)


unreadable = unreadable_topic(_open_source)


@unreadable.with_fixtures(open_with_rows)
async def tightened_limits_refuse_nothing_that_is_there(transport: Transport, rows: Rows) -> None:
    """Messages sent under wider limits are received unchanged, where the queues are rows of a database."""
    sent = envelope("a-long-id" * 20, body=b"b" * 5_000)
    await transport.send([sent], NOW)
    with mock.patch.multiple("postdate.messages.message", MESSAGE_ID_LIMIT=5, DESTINATION_LIMIT=5):
        expect_equal(await receive_and_commit_one(transport), sent, "the message as it is received")
