"""Sagas: listed page by page; one with the messages it waits for, and its state when it is asked for."""

import logging
from pathlib import Path

import msgspec
import pytest
from tests.integration.postgres_place import placed
from tests.web.conftest import MINUTE, Deployment, Visit, app_of, browsing
from tests.web.test_pages import harmless

from postdate import PostgresSagaStore, SqliteSagaStore
from postdate.endpoint.saga_instance import PendingTimeout, SagaDetails, encode_details
from postdate.ports import Correlation, SagaChange, SagaChangeKind, SagaRecord, SagaStore

BODY = msgspec.Raw(b'{"secret":1}')


def instance(deployment: Deployment, number: int, *minutes: int, kind: str = "shop.Order") -> SagaRecord:
    """Return an instance that waits for timeouts of so many minutes from now."""
    timeouts = {f"t-{n}": PendingTimeout(f"m-{n}", deployment.now + n * MINUTE, "shop.Late", BODY) for n in minutes}
    place, state = Correlation("order", f"o-{number}"), '{"secret": "<script>"}'
    return SagaRecord(f"id-{number:03}", kind, place, state, encode_details(SagaDetails(timeouts)))


async def keep(store: SagaStore, *records: SagaRecord) -> None:
    await store.setup()
    await store.apply([SagaChange(SagaChangeKind.CREATED, each) for each in records])
    await store.close()


async def test_sagas_are_listed_with_what_they_wait_for(deployment: Deployment, visit: Visit) -> None:
    late, done = instance(deployment, 1, 5, -5, 90), SagaDetails(completed_by="m-9")
    await keep(
        SqliteSagaStore(deployment.path),
        late,
        SagaRecord("id-2", "shop.Order", Correlation("order", "o-2"), "{}", encode_details(done)),
        SagaRecord("id-3", "shop.Order", Correlation("order", "o-3"), "{}", "no JSON"),
    )
    async with visit() as browser:
        page, one = await browser("/sagas"), await browser("/sagas/shop.Order/id-001")
        gone = await browser("/sagas/shop.Order/id-009")
    assert "order=o-1 shop.Order, version 1 " in page.words
    assert "overdue shop.Late and 2 more" in page.words
    assert "order=o-2 completed shop.Order, version 1 none" in page.words
    assert "order=o-3 shop.Order, version 1 cannot be read the stored state of shop.Order order='o-3'" in page.words
    assert page.links("/sagas/") == [f"/sagas/shop.Order/{each}" for each in ("id-001", "id-2", "id-3")]
    assert one.links("/messages/") == ["/messages/m--5", "/messages/m-5", "/messages/m-90"]
    assert "Instance id-001 of shop.Order." in one.words
    assert (gone.status, "There is no instance id-009 of shop.Order; it may be completed." in gone.words) == (404, True)


async def test_a_state_is_shown_when_asked_for_and_that_is_logged(
    deployment: Deployment, visit: Visit, caplog: pytest.LogCaptureFixture
) -> None:
    await keep(SqliteSagaStore(deployment.path), instance(deployment, 1, 5))
    caplog.set_level(logging.INFO, "postdate.dashboard")
    async with visit() as browser:
        listed, hidden = await browser("/sagas"), await browser("/sagas/shop.Order/id-001")
        assert "secret" not in listed.answer.text + hidden.answer.text
        assert not caplog.messages
        (link,) = hidden.links("?")
        shown = await browser(f"/sagas/shop.Order/id-001{link}", **{"X-Forwarded-User": "ada\n"})
        harmless(shown)
    assert '{"secret": "<script>"}' in shown.words
    assert caplog.messages == ["the state of saga 'shop.Order' 'id-001' is shown to 192.0.2.7, user 'ada\\n'"]


async def test_sagas_are_listed_page_by_page(deployment: Deployment, visit: Visit) -> None:
    made = [instance(deployment, n, kind=("a/b", "shop.Order", "<b>")[n % 3]) for n in range(120)]
    await keep(SqliteSagaStore(deployment.path), *made)
    async with visit() as browser:
        page, seen, pages = await browser("/sagas"), list[str](), 1
        while further := page.links("/sagas?"):
            seen += page.links("/sagas/")
            page, pages = await browser(further[0]), pages + 1
        seen += page.links("/sagas/")
        orders = await browser("/sagas?type=shop.Order")
        assert (await browser(seen[60])).status == (await browser(seen[0])).status == 200
        harmless(page)
    assert (len(seen), len(set(seen)), pages) == (120, 120, 3)
    assert orders.links("/sagas/") == [each for each in seen if "shop.Order" in each]


async def test_without_sagas_it_says_so(deployment: Deployment, visit: Visit, tmp_path: Path) -> None:
    """Looking creates neither a table nor a file."""
    elsewhere = tmp_path / "sagas.db"
    async with visit() as browser:
        for _ in range(2):
            assert "No sagas are kept here." in (await browser("/sagas")).words
    async with browsing(app_of(deployment.address, **{"sagas.address": f"sqlite:///{elsewhere}"})) as browser:
        assert "No sagas are kept here." in (await browser("/sagas")).words
    assert not elsewhere.exists()
    await keep(SqliteSagaStore(deployment.path))
    async with visit() as browser:
        assert "There are no more instances." in (await browser("/sagas")).words


async def test_a_database_that_cannot_keep_sagas_is_told(redis_url: str) -> None:
    async with browsing(app_of(redis_url)) as browser:
        page = await browser("/sagas")
    assert (page.status, "name such a database with sagas.address" in page.words) == (501, True)


async def test_sagas_of_postgresql_are_shown(deployment: Deployment, postgres_url: str) -> None:
    async with placed(postgres_url, "orders", "postdate.timeouts") as place:
        await keep(PostgresSagaStore(postgres_url, schema=place.schema), instance(deployment, 1, 5))
        options = {"store.schema": place.schema, "transport.schema": place.schema, "endpoint.name": "service"}
        async with browsing(app_of(postgres_url, **options)) as browser:
            for path in ("/sagas", "/sagas/shop.Order/id-001", "/sagas", "/messages"):
                page = await browser(path)
                assert page.status == 200
            assert "order=o-1 shop.Order, version 1 " in (await browser("/sagas")).words
