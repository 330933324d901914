"""Rows as versions up to 468e06b stored what endpoints delay: among their headers, as text, is ``DeliverAt``."""

import pytest
from tests.integration.stored_headers import BESIDE_QUEUES, WITH_ROWS, rewrite_headers

from postdate.core.changes import administrable_store
from postdate.messages import Headers, format_timestamp
from postdate.ports import MessageFilter, Outcome
from postdate.testing import StoreSubject
from postdate.testing.store_suite.subject import (
    NOW,
    QUEUE,
    SECOND,
    message,
    open_beside_queues,
    open_claiming,
)

DUE, LATER = NOW, NOW + SECOND


def write(subject: StoreSubject, said: str) -> dict[str, str]:
    """Have all that is stored say so by hand; return the headers."""
    rewrite_headers(subject, lambda _: f'{{"kind":"é","NServiceBus.DeliverAt":"{said}","last":""}}')
    return {"kind": "é", Headers.DELIVER_AT: said, "last": ""}


@pytest.mark.parametrize("store_subject", WITH_ROWS, indirect=True)
async def test_it_is_there_once_and_follows_a_new_due_time(store_subject: StoreSubject) -> None:
    async with open_claiming(store_subject) as store:
        await store.store_many([message("m-1", DUE), message("m-2", DUE)], NOW)
        headers = write(store_subject, format_timestamp(DUE))
        operator = administrable_store(store)
        assert [each.headers for each in await operator.list_pending(MessageFilter(), 10)] == [headers] * 2
        assert await operator.reschedule("m-1", LATER, NOW)
        claims = await store.claim_due(LATER + SECOND, 10)
        found = {claim.message.message_id: claim.message.headers for claim in claims}
        assert found == {"m-1": {**headers, Headers.DELIVER_AT: format_timestamp(LATER)}, "m-2": headers}
        assert await store.finish(claims, Outcome.DELIVERED, LATER) == 2


@pytest.mark.parametrize("store_subject", WITH_ROWS, indirect=True)
async def test_what_the_sender_has_written_there_stays(store_subject: StoreSubject) -> None:
    async with open_claiming(store_subject) as store:
        await store.store(message("m-1", DUE), NOW)
        headers = write(store_subject, "mine")
        operator = administrable_store(store)
        assert await operator.reschedule("m-1", LATER, NOW)
        (claim,) = await store.claim_due(LATER + SECOND, 10)
        assert claim.message.headers == headers
        await store.finish([claim], Outcome.DELIVERED, LATER)


@pytest.mark.parametrize("store_subject", BESIDE_QUEUES, indirect=True)
async def test_it_is_received_from_the_queue_that_it_was_moved_to(store_subject: StoreSubject) -> None:
    async with open_beside_queues(store_subject) as opened:
        assert opened is not None
        store, transport = opened
        await store.store(message("m-1", DUE), NOW)
        headers = write(store_subject, format_timestamp(DUE))
        assert (await store.move_due(LATER, 10)).delivered == 1
        receiver = transport.receiver(QUEUE)
        (received,) = await receiver.receive(10)
        assert (received.envelope.headers, received.envelope.due) == (headers, DUE)
        await receiver.close()
