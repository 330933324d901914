"""Who has the lease dispatches, nobody else does, and who loses it stops. Source: specification 3.4, rows 79 to 81."""

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
import pytest
from azure.storage.blob import BlobLeaseClient, BlobServiceClient
from tests.azure_store_subjects import TablePlace
from tests.integration.azure.gateway import slow_way
from tests.proxy import FaultyLink
from tests.waiting import until

from postdate import DelayedMessage, MemoryTransport, SystemClock
from postdate.backends.azure.groups import OperationBatcher
from postdate.backends.azure.lease import ContainerLease
from postdate.backends.azure.login import ANSWERS_WITHIN_SECONDS, parse_login
from postdate.backends.azure.store import AzureTableStore
from postdate.backends.azure.table_names import records_table
from postdate.core.due.dispatcher import Dispatcher
from postdate.core.health.circuit_breaker import FailureRate, RepeatedFailures
from postdate.core.recoverability import DispatchSettings, Host
from postdate.errors import PostdateError, StoreUnreachable
from postdate.messages import Envelope
from postdate.ports import Claim, Outcome, RecordKind, TransactionMode

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LATER = NOW + SECOND


@pytest.fixture
async def place(azurite_connection: str) -> AsyncGenerator[TablePlace]:
    place = TablePlace(azurite_connection)
    yield place
    await place.close()


def message(name: str, due: datetime = NOW, destination: str = "orders") -> DelayedMessage:
    return DelayedMessage(name, due, destination, {"kind": "test"}, b"body")


async def filled(place: TablePlace, count: int, **settings) -> AzureTableStore:
    store = await place.open(**settings)
    await store.setup()
    await store.store_many([message(f"m-{n:03}", NOW + n * timedelta(milliseconds=1)) for n in range(count)], NOW)
    return store


@pytest.fixture
async def leases(azurite_connection: str, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[list[ContainerLease]]:
    """Two processes that always ask for the lease of one container, which does not exist."""
    for name in ("RENEWED_AFTER_SECONDS", "TRIED_AGAIN_AFTER_SECONDS"):
        monkeypatch.setattr(f"postdate.backends.azure.lease.{name}", 0.0)
    login, name = parse_login(azurite_connection), f"lease{uuid4().hex}"
    services = [login.create_blob_service(), login.create_blob_service()]
    yield [
        ContainerLease(each.get_container_client(name), login.describe_service("blob"), lambda: None)
        for each in services
    ]
    for service in services:
        await service.close()
    with BlobServiceClient.from_connection_string(azurite_connection) as blobs:
        blobs.delete_container(name)


async def test_row_79_a_second_process_cannot_have_the_lease_until_the_first_gives_it_up(
    leases: list[ContainerLease],
) -> None:
    first, second = leases
    assert await first.acquire_or_renew()
    for _ in range(3):
        assert not await second.acquire_or_renew()
        assert await first.acquire_or_renew()
    await first.release()
    assert not first.is_in_force
    assert await second.acquire_or_renew()
    assert not await first.acquire_or_renew()
    await second.release()


async def test_row_80_a_lease_is_renewed_many_times(leases: list[ContainerLease]) -> None:
    assert [await leases[0].acquire_or_renew() for _ in range(11)] == [True] * 11
    await leases[0].release()


async def test_row_79_a_process_that_closes_its_store_lets_another_dispatch_at_once(place: TablePlace) -> None:
    first = await filled(place, 1)
    second = await place.open()
    assert len(await first.claim_due(LATER, 10)) == 1
    assert await second.claim_due(LATER, 10) == []
    await first.close()
    third = await place.open()
    assert [claim.message.message_id for claim in await third.claim_due(LATER, 10)] == ["m-000"]


async def test_row_81_nothing_more_is_claimed_finished_or_given_back_once_the_lease_is_stolen(
    place: TablePlace,
) -> None:
    store = await filled(place, 120)
    held = await store.claim_due(LATER, 1_000)
    assert len(held) == 50
    before = place.entities()
    thief = place.lease()
    # As after a pause of the whole process, which renews nothing meanwhile.
    store._open_parts.lease._renewed_at -= 60
    assert await store.finish(held[:10], Outcome.DELIVERED, LATER) == 0
    assert not await store.retry_later(held[10], LATER, LATER, "why")
    assert await store.claim_due(LATER, 1_000) == []
    assert place.entities() == before
    assert {record.kind.name for record in await store.history("m-000")} == {"SCHEDULED"}
    thief.release()
    successor = await place.open()
    assert len(await successor.claim_due(LATER, 1_000)) == 50


class _HangsAfter(MemoryTransport):
    """Sends one message and then no more, until it is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.was_cut_off = False
        self.is_sending = anyio.Event()

    async def send(self, envelopes, now, work=()) -> list[PostdateError | None]:  # type: ignore[override]
        first: Envelope = envelopes[0]
        self.sent.append(first.message_id)
        self.is_sending.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.was_cut_off = True
        return [None] * len(envelopes)


async def test_row_81_what_is_being_sent_is_cut_off_when_the_lease_is_lost(place: TablePlace) -> None:
    """Nor does any of it go to the error queue: that is for whoever has the lease now to say."""
    store, transport, clock = await filled(place, 10), _HangsAfter(), SystemClock()
    await transport.create_queues(["orders", "error"])
    settings = DispatchSettings("service.timeouts", "error", 0, Host("tests"))
    breaker = RepeatedFailures("sending", "cannot send", SECOND, lambda _reason, _error: None)
    rate = FailureRate("handling", "cannot handle", 1, lambda _reason, _error: None)
    dispatcher = Dispatcher(store, transport, settings, clock, breaker, rate)
    async with dispatcher.overlap_batches():
        await dispatcher.deliver_due(clock.now())
        await transport.is_sending.wait()
        place.lease()
        store._open_parts.lease._renewed_at -= 60
        await store._open_parts.lease.renew()  # as the keeper does
    assert transport.was_cut_off
    assert transport.sent == ["m-000"]
    assert len(place.entities()) == 10
    assert {record.kind.name for record in await store.history("m-000")} == {"SCHEDULED"}


async def test_a_claim_is_void_as_soon_as_its_lease_is_over_by_our_own_clock(place: TablePlace) -> None:
    """As on waking in a process that was frozen, before anybody was asked: nothing may leave because of it any more."""
    store = await filled(place, 3)
    first, second, third = await store.claim_due(LATER, 10)
    assert store.is_in_force(first)
    assert await store.finish([first], Outcome.DELIVERED, LATER) == 1
    assert not store.is_in_force(first)
    store._open_parts.lease._renewed_at -= 60
    assert not store.is_in_force(second)
    assert not store.is_in_force(third)


async def test_whoever_sends_is_told_when_the_lease_is_over_by_our_own_clock_and_nobody_can_be_asked(
    place: TablePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.backends.azure.lease.RENEWED_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("postdate.backends.azure.lease.ROUND_SECONDS", 0.1)
    asked = anyio.Event()

    async def no_answer(_lease: ContainerLease, _of: object) -> bool:
        asked.set()
        await anyio.sleep_forever()
        return True

    store = await filled(place, 2)
    monkeypatch.setattr(ContainerLease, "_renew", no_answer)
    lost: list[str] = []
    over = anyio.Event()

    def note(ids: Collection[str]) -> None:
        lost.extend(ids)
        over.set()

    store.listen_for_lost_claims(note)
    claims = await store.claim_due(LATER, 10)
    await asked.wait()
    lease = store._open_parts.lease
    lease._renewed_at -= 14.5  # half a second before its end, to which the timer is set again
    lease.expire_if_over()
    await over.wait()
    assert lost == ["m-000", "m-001"]
    assert [store.is_in_force(claim) for claim in claims] == [False, False]


async def test_what_is_released_until_later_is_left_alone_and_costs_no_request(place: TablePlace) -> None:
    store = await filled(place, 20)
    before = place.entities()
    claims = await store.claim_due(LATER, 50)
    assert await store.release(claims[:15], LATER + 60 * SECOND) == 15
    assert await store.release(claims[15:], None) == 5
    assert await store.release(claims, None) == 0
    again = await store.claim_due(LATER, 50)
    assert [claim.message.message_id for claim in again] == [f"m-{n:03}" for n in range(15, 20)]
    assert await store.next_attempt() == LATER + 60 * SECOND
    assert len(await store.claim_due(LATER + 61 * SECOND, 50)) == 15
    assert place.entities() == before
    assert {record.kind.name for record in await store.history("m-000")} == {"SCHEDULED"}


async def test_the_lease_is_renewed_while_a_page_is_dispatched(place: TablePlace, monkeypatch) -> None:
    monkeypatch.setattr("postdate.backends.azure.lease.RENEWED_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("postdate.backends.azure.lease.ROUND_SECONDS", 0.05)
    store = await filled(place, 1)
    (claim,) = await store.claim_due(LATER, 10)
    lease = store._open_parts.lease
    claimed_at = lease._renewed_at
    await until(lambda: lease._renewed_at != claimed_at)
    assert await store.finish([claim], Outcome.DELIVERED, LATER) == 1


async def test_the_lease_is_renewed_while_a_table_does_not_answer(place: TablePlace, monkeypatch) -> None:
    monkeypatch.setattr("postdate.backends.azure.lease.RENEWED_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("postdate.backends.azure.lease.ROUND_SECONDS", 0.05)
    async with slow_way(place) as (gateway, store):
        await store.store(message("m"), NOW)
        stop = gateway.stop(lambda path, _body: f"{place.table}()" in path)
        stop_listening = await store.listen(lambda: None)
        await stop.reached.wait()  # the keeper looks for messages of other processes
        lease = store._open_parts.lease
        looked_at, began = lease._renewed_at, anyio.current_time()
        await until(lambda: lease._renewed_at != looked_at)
        assert anyio.current_time() - began < ANSWERS_WITHIN_SECONDS / 2, "only once the look had failed"
        stop.opened.set()
        stop_listening()


async def test_a_container_that_others_have_leased_out_holds_up_storing_in_no_way(place: TablePlace) -> None:
    """And what was stored is claimed as soon as the lease can be had."""
    theirs = place.lease(seconds=-1)
    store = await filled(place, 5)
    assert await store.claim_due(LATER, 10) == []
    theirs.release()
    successor = await place.open()
    assert len(await successor.claim_due(LATER, 10)) == 5


async def test_a_process_that_waits_for_the_lease_takes_it_and_wakes_its_poller(place: TablePlace, monkeypatch) -> None:
    monkeypatch.setattr("postdate.backends.azure.lease.ROUND_SECONDS", 0.05)
    first = await filled(place, 1)
    assert len(await first.claim_due(LATER, 10)) == 1
    second = await place.open()
    woken = anyio.Event()
    stop = await second.listen(woken.set)
    assert await second.claim_due(LATER, 10) == []
    assert await second.next_attempt() is None, "nothing is to be attempted here while another dispatches"
    await first.close()
    await woken.wait()
    assert [claim.message.message_id for claim in await second.claim_due(LATER, 10)] == ["m-000"]
    stop()


async def test_row_79_the_lease_of_a_process_that_died_goes_with_what_it_had_in_hand_to_who_waits(
    place: TablePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody gives it up: Azure ends it, 15 s after it was renewed last. Here it is broken, which leaves the same."""
    monkeypatch.setattr("postdate.backends.azure.lease.ROUND_SECONDS", 0.05)
    dead = await filled(place, 3)
    assert len(await dead.claim_due(LATER, 10)) == 3
    monkeypatch.setattr(dead._open_parts.lease, "_request_lease", anyio.sleep_forever)
    assert place.ends_by_itself()
    second = await place.open()
    woken = anyio.Event()
    stop = await second.listen(woken.set)
    assert await second.claim_due(LATER, 10) == []
    place.lease().release()
    await woken.wait()
    claims = await second.claim_due(LATER, 10)
    assert [claim.message.message_id for claim in claims] == ["m-000", "m-001", "m-002"]
    stop()


@pytest.mark.parametrize("silent", [["TableEndpoint"], ["TableEndpoint", "BlobEndpoint"]], ids=["tables", "both"])
async def test_leaving_waits_for_no_account_that_does_not_answer(
    place: TablePlace, azurite_connection: str, monkeypatch: pytest.MonkeyPatch, silent: list[str]
) -> None:
    """What is being written would be waited for ever longer, and the lease; it ends by itself.

    Where only the tables are silent the lease is given up all the same.
    """
    if "BlobEndpoint" in silent:  # nothing is to be answered then
        monkeypatch.setattr("postdate.backends.azure.store.LEAVES_WITHIN_SECONDS", 0.5)
    for name in ("login.ANSWERS_WITHIN", "lease._ANSWERED_WITHIN"):
        monkeypatch.setattr(f"postdate.backends.azure.{name}_SECONDS", 3_600)
    settings = dict(part.split("=", 1) for part in azurite_connection.strip(";").split(";"))
    with ExitStack() as links:
        opened: dict[str, FaultyLink] = {}
        for name in silent:
            where = urlsplit(settings[name])
            opened[name] = link = links.enter_context(FaultyLink(where.hostname or "", where.port or 0))
            settings[name] = where._replace(netloc=f"127.0.0.1:{link.port}").geturl()
        connection = ";".join(f"{name}={value}" for name, value in settings.items())
        store = await place.open(connection=connection)
        await store.setup()
        await store.store_many([message(f"m-{n}") for n in range(50)], NOW)
        claims = await store.claim_due(LATER, 100)
        assert len(claims) == 50
        for link in opened.values():
            link.stall()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_expect_no_answer, store, claims)
            await anyio.wait_all_tasks_blocked()
            await store.close()
    if "BlobEndpoint" not in silent:
        other = await place.open()
        assert await other._open_parts.lease.acquire_or_renew()


async def test_leaving_gives_up_the_lease_whatever_goes_wrong_before(
    place: TablePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop(rounds: OperationBatcher, until: float) -> None:
        raise RuntimeError("no")

    store = await filled(place, 1)
    assert len(await store.claim_due(LATER, 10)) == 1
    with monkeypatch.context() as wrong:
        wrong.setattr(OperationBatcher, "stop", stop)
        with pytest.raises(RuntimeError, match="no"):
            await store.close()
    successor = await place.open()
    assert len(await successor.claim_due(LATER, 10)) == 1


async def _expect_no_answer(store: AzureTableStore, claims: Sequence[Claim]) -> None:
    with pytest.raises(StoreUnreachable):
        await store.finish(claims, Outcome.DELIVERED, LATER)


# --- tables of older versions -----------------------------------------------------------------------------------------


async def test_a_table_that_older_processes_shared_by_ranges_is_dispatched_whole(place: TablePlace) -> None:
    """Up to 468e06b there could be several leases: their number stood with the first container, each process had a row.

    One such process still has its lease, and delivers what another has claimed here: that comes twice, and no harm.
    """
    store = await filled(place, 200)
    blobs = BlobServiceClient.from_connection_string(place.connection)
    blobs.get_container_client(place.table).set_container_metadata({"postdate_leases": "4"})
    of_theirs = blobs.create_container(f"{place.table}-3")
    of_theirs.acquire_lease(60)
    place.add({"PartitionKey": "process", "RowKey": "0" * 32}, records_table(place.table))
    claims = [claim for _ in range(4) for claim in await store.claim_due(LATER, 1_000)]
    assert {claim.message.message_id for claim in claims} == {f"m-{n:03}" for n in range(200)}
    place.remove(place.entities()[17])
    assert await store.finish(claims, Outcome.DELIVERED, LATER) == 199
    assert place.entities() == []
    assert await store.record_counts() == {RecordKind.SCHEDULED: 200, RecordKind.DELIVERED: 200}
    BlobLeaseClient(of_theirs).break_lease(0)
    of_theirs.delete_container()
    blobs.close()


async def test_row_85_in_mode_none_a_claim_is_ours_whatever_becomes_of_the_lease(place: TablePlace) -> None:
    store = await filled(place, 2, mode=TransactionMode.NONE)
    first, second = await store.claim_due(LATER, 10)
    place.lease()
    store._open_parts.lease._renewed_at -= 60
    assert await store.claim_due(LATER, 10) == []
    assert await store.finish([first], Outcome.DELIVERED, LATER) == 1
    assert await store.retry_later(second, LATER, LATER, "why")
    assert [entity["MessageId"] for entity in place.entities()] == ["m-001"]
