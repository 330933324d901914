"""Rows as versions up to 468e06b wrote them with ``store.checksum``: blanks stand behind the JSON of their headers.

They were a CRC-32 of headers and body: a tab, then its bits, as spaces and tabs. Nobody looks at them any more.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import SqliteStoreSubject
from tests.integration.migration_places import NEXT_YEAR
from tests.integration.store_places import StorePlace, place_in
from tests.integration.stored_headers import BESIDE_QUEUES, WITH_ROWS, rewrite_headers

from postdate.core.changes import administrable_store
from postdate.messages import Headers, format_timestamp
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import MessageFilter, Outcome, Scan, ScannableStore
from postdate.testing import Damage, StoreSubject
from postdate.testing.store_suite.subject import (
    NOW,
    QUEUE,
    SECOND,
    ids,
    message,
    open_beside_queues,
    open_claiming,
    open_with_rows,
)

SEAL = "\t" + format(0x1B2EF91C, "032b").replace("0", " ").replace("1", "\t")
"""A checksum of other content: who looked at it would take each of the rows for damaged."""


def seal(subject: StoreSubject) -> None:
    """Put a checksum behind the headers of all that is stored, by hand."""
    rewrite_headers(subject, lambda headers: headers + SEAL)


@pytest.mark.parametrize("store_subject", WITH_ROWS, indirect=True)
async def test_they_are_read_moved_in_time_tried_again_and_finished_as_any_other(store_subject: StoreSubject) -> None:
    of_its_own = {Headers.DELIVER_AT: format_timestamp(NOW), "kind": "é"}
    later = NOW + SECOND
    async with open_claiming(store_subject) as store:
        await store.store_many([message("m-1", headers=of_its_own), message("m-2", later)], NOW)
        seal(store_subject)
        operator = administrable_store(store)
        assert ids(await operator.list_pending(MessageFilter(), 10)) == ["m-1", "m-2"]
        assert await operator.get("m-2") == message("m-2", later)
        assert await operator.reschedule("m-1", later, NOW)
        moved = message("m-1", later, headers={**of_its_own, Headers.DELIVER_AT: format_timestamp(later)})
        claims = await store.claim_due(later + SECOND, 10)
        found = {claim.message.message_id: claim for claim in claims}
        assert [found[id_].message for id_ in ("m-1", "m-2")] == [moved, message("m-2", later)]
        assert await store.retry_later(found["m-2"], later + SECOND, later, "it did not work")
        assert await store.finish([found["m-1"]], Outcome.DELIVERED, later) == 1
        (claim,) = await store.claim_due(later + 2 * SECOND, 10)
        assert claim.message == replace(message("m-2", later), number_of_failures=1)
        assert await store.finish([claim], Outcome.DELIVERED, later) == 1


@pytest.mark.parametrize("store_subject", WITH_ROWS, indirect=True)
async def test_one_that_is_damaged_is_marked_with_its_checksum(store_subject: StoreSubject) -> None:
    async with open_with_rows(store_subject) as opened:
        assert opened is not None
        store, rows = opened
        await store.store(message(), NOW)
        seal(store_subject)
        rows.damage("m-1", Damage.DUE)
        assert await store.claim_due(NOW + SECOND, 10) == []
        (row,) = await rows.adapter.list_unreadable(10)
        assert SEAL.encode() in b"".join(row.raw.values())


@pytest.mark.parametrize("store_subject", BESIDE_QUEUES, indirect=True)
async def test_they_are_received_from_the_queue_that_they_were_moved_to(store_subject: StoreSubject) -> None:
    async with open_beside_queues(store_subject) as opened:
        assert opened is not None
        store, transport = opened
        await store.store(message(), NOW)
        seal(store_subject)
        assert (await store.move_due(NOW + SECOND, 10)).delivered == 1
        receiver = transport.receiver(QUEUE)
        (received,) = await receiver.receive(10)
        assert (received.envelope.headers, received.envelope.body) == ({"kind": "check"}, b"body")
        await receiver.close()


@pytest.mark.parametrize("store_subject", ["SqliteStore", "PostgresStore", "MariaDbStore"], indirect=True)
async def test_scans_see_the_json_of_their_headers(store_subject: StoreSubject) -> None:
    async with open_claiming(store_subject) as store:
        await store.store(message(), NOW)
        seal(store_subject)
        assert isinstance(store, ScannableStore)
        (part,) = store.scan_parts("pending", 1)
        ((headers,),) = [row for page in store.scan(Scan("pending", ("headers",)), part, 10) for row in page]
        assert json.loads(headers) == {"kind": "check"}


def test_a_move_takes_them_along(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    subject = SqliteStoreSubject(tmp_path)
    old = StorePlace(StoreSpec(f"sqlite:///{subject.path}"))
    with place_in("sqlite", request, "new") as new, open_spec(old.spec, create=True) as store:
        store.setup()
        old.add([message(due=NEXT_YEAR)])
        seal(subject)
        assert old.move_to(new).is_complete
        assert new.waiting() == [message(due=NEXT_YEAR)]
