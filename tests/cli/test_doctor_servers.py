"""What the doctor concludes from what servers say of themselves; no server is needed for that."""

from datetime import UTC, datetime, timedelta

import pytest

from postdate import MemoryStore
from postdate.clock import SystemClock
from postdate.config import Settings, load_settings
from postdate.errors import StoreUnavailable
from postdate.operations.doctor import Probe, Verdict
from postdate.operations.doctor import servers as doctor_servers
from postdate.operations.doctor.checks import diagnose_settings
from postdate.operations.doctor.traffic import Queues, StoreTraffic, diagnose_traffic
from postdate.ports import OldSnapshot, Process, ServerFacts

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
MS = timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("product", "number", "result"),
    [
        ("PostgreSQL", "16.4 (Debian 16.4-1)", Verdict.OK),
        ("PostgreSQL", "13", Verdict.OK),
        ("PostgreSQL", "12.9", Verdict.FAIL),
        ("MariaDB", "10.6.0-MariaDB", Verdict.OK),
        ("MariaDB", "10.11.6-MariaDB-0+deb12u1", Verdict.OK),
        ("MariaDB", "10.5.21-MariaDB", Verdict.FAIL),
        ("RabbitMQ", "4.1.0", Verdict.OK),
        ("RabbitMQ", "3.9.1", Verdict.FAIL),
        ("SQL Server", "15.0.2000.5", Verdict.OK),
        ("Something", "1", Verdict.OK),
        ("PostgreSQL", "devel", Verdict.OK),
    ],
)
def test_a_server_that_is_too_old_is_a_failure(product, number, result):
    assert doctor_servers.diagnose_version("store server", ServerFacts(product, number)).result is result


@pytest.mark.parametrize(
    ("there", "result", "said"),
    [
        (0, Verdict.FAIL, "run `postdate setup`"),
        (1, Verdict.FAIL, ", which updates the tables"),
        (2, Verdict.OK, ""),
        (3, Verdict.FAIL, "upgrade Postdate here"),
    ],
)
def test_tables_must_be_those_of_this_version(there, result, said):
    check = doctor_servers.diagnose_schema(there, 2)
    assert check.result is result
    assert said in check.mend


@pytest.mark.parametrize(
    ("product", "settings", "expected"),
    [
        ("PostgreSQL", {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}, {"durability": "ok"}),
        ("PostgreSQL", {"fsync": "off"}, {"fsync": "fail"}),
        ("PostgreSQL", {"synchronous_commit": "off"}, {"durability": "warn"}),
        ("PostgreSQL", {"synchronous_commit": "remote_apply"}, {"durability": "ok"}),
        ("PostgreSQL", {"full_page_writes": "off"}, {"full page writes": "warn"}),
        ("PostgreSQL", {}, {}),
        (
            "MariaDB",
            {"innodb_flush_log_at_trx_commit": "1", "tx_isolation": "READ-COMMITTED"},
            {"durability": "ok", "isolation": "ok"},
        ),
        ("MariaDB", {"innodb_flush_log_at_trx_commit": "2"}, {"durability": "warn"}),
        ("MariaDB", {"transaction_isolation": "REPEATABLE-READ"}, {"isolation": "warn"}),
        ("SQL Server", {"delayed_durability": "DISABLED"}, {"durability": "ok"}),
        ("SQL Server", {"delayed_durability": "FORCED"}, {"durability": "warn"}),
        ("Redis", {"maxmemory": "1000", "maxmemory_policy": "allkeys-lru"}, {"eviction": "fail"}),
        ("Redis", {"maxmemory": "0", "maxmemory_policy": "allkeys-lru"}, {}),
        ("Redis", {"maxmemory": "1000", "maxmemory_policy": "volatile-lru"}, {}),
        ("RabbitMQ", {"blocked": ""}, {"broker alarm": "ok"}),
        ("RabbitMQ", {"blocked": "low on disk"}, {"broker alarm": "fail"}),
        ("PostgreSQL", {"transaction_read_only": "on"}, {"writes": "fail"}),
        ("MariaDB", {"read_only": "1"}, {"writes": "fail"}),
        ("SQL Server", {"updateability": "READ_ONLY"}, {"writes": "fail"}),
        ("Redis", {"role": "slave"}, {"writes": "fail"}),
        ("Redis", {"role": "master", "read_only": "0"}, {}),
        ("Something", {"fsync": "off"}, {}),
    ],
)
def test_what_a_setting_means_is_said(product, settings, expected):
    checks = list(doctor_servers.diagnose_server_settings(ServerFacts(product, "99", settings=settings)))
    assert {check.name: check.result.value for check in checks} == expected
    for check in checks:
        assert bool(check.mend) is (check.result is not Verdict.OK)


@pytest.mark.parametrize(
    ("server", "result", "said"),
    [
        (NOW, Verdict.OK, "within 100ms"),
        (NOW - 100 * MS, Verdict.OK, "within 100ms"),
        (NOW + 1100 * MS, Verdict.OK, "within 100ms"),  # the answer took a second: nothing can be said of it
        (NOW - 101 * MS, Verdict.WARN, "101ms behind the clock of this machine"),
        (NOW + 1150 * MS, Verdict.WARN, "150ms ahead of the clock of this machine"),
        (NOW - timedelta(hours=2), Verdict.WARN, "2h behind"),
    ],
)
def test_clocks_are_compared_without_blaming_the_way_of_the_answer(server, result, said):
    check = doctor_servers.diagnose_server_clock(NOW, server, NOW + 1000 * MS)
    assert check.result is result
    assert said in check.found


@pytest.mark.parametrize(
    ("judges", "said"),
    [(True, "the server's clock decides what is due"), (False, "is early or late by the difference")],
)
def test_it_is_said_by_whose_clock_it_is_due(judges, said):
    assert said in doctor_servers.diagnose_server_clock(NOW, NOW - timedelta(hours=2), NOW, is_judge=judges).found


def test_each_service_whose_clock_is_off_by_more_than_a_second_is_named():
    minutes = timedelta(minutes=10)
    ahead = {"a:1": minutes, "b:2": -minutes, "c:3": 900 * MS}
    check = doctor_servers.diagnose_service_clocks(ahead, is_judge=True)
    assert check.result is Verdict.WARN
    assert (
        check.found
        == "a:1 is 10m ahead of the server, b:2 is 10m behind the server; the server's clock decides what is due"
    )
    assert "NTP" in check.mend
    check = doctor_servers.diagnose_service_clocks(ahead, is_judge=False)
    assert "delivers early or late" in check.found
    assert "use_store_clock = true" in check.mend
    assert doctor_servers.diagnose_service_clocks({"c:3": 900 * MS}, is_judge=True).result is Verdict.OK


def test_a_session_with_an_old_snapshot_is_named_with_the_way_to_end_it():
    session = OldSnapshot(4711, "psql", "alice", timedelta(hours=2, minutes=5), "idle in transaction")
    check = doctor_servers.diagnose_old_snapshot(session, "PostgreSQL")
    assert check.result is Verdict.WARN
    assert check.found.startswith("session 4711 (psql, user alice) has held a snapshot for 2h5m (idle in transaction):")
    assert "SELECT pg_terminate_backend(4711)" in check.mend
    assert "KILL 4711" in doctor_servers.diagnose_old_snapshot(session, "MariaDB").mend


def test_what_is_no_session_is_mended_by_its_own_statement():
    end = "SELECT pg_drop_replication_slot('copy')"
    slot = OldSnapshot(0, "replication slot 'copy'", "", timedelta(days=1), "inactive", end)
    check = doctor_servers.diagnose_old_snapshot(slot, "PostgreSQL")
    assert check.found.startswith("replication slot 'copy' has held a snapshot for 1d (inactive)")
    assert check.mend.endswith(end)


class Talkative(MemoryStore):
    """An adapter whose server tells everything."""

    def __init__(self, *, schema_version: int = 1, snapshots: int = 0) -> None:
        super().__init__()
        self.facts = ServerFacts("PostgreSQL", "16.4", None, schema_version, 1, {"synchronous_commit": "on"})
        self._snapshots = [OldSnapshot(1, "", "bob", timedelta(hours=1), "active")] * snapshots

    async def server_facts(self) -> ServerFacts:
        return self.facts

    async def old_snapshots(self) -> list[OldSnapshot]:
        return self._snapshots


class Unreachable(MemoryStore):
    """An adapter whose server does not answer."""

    async def server_facts(self) -> ServerFacts:
        raise StoreUnavailable("connection refused")


async def results(adapter: object) -> tuple[dict[str, str], bool]:
    checks, usable = await doctor_servers.inspect_server("store server", adapter, SystemClock())
    return {check.name: check.result.value for check in checks}, usable


async def test_a_server_in_good_order_is_all_ok():
    expected = {"store server": "ok", "schema": "ok", "durability": "ok", "old snapshots": "ok"}
    assert await results(Talkative()) == (expected, True)


async def test_nothing_more_is_asked_of_tables_that_are_not_ours():
    found, usable = await results(Talkative(schema_version=0, snapshots=1))
    assert (found["schema"], found["old snapshots"], usable) == ("fail", "warn", False)


async def test_a_server_that_does_not_answer_is_one_failure():
    assert await results(Unreachable()) == ({"store server": "fail"}, False)


async def test_a_server_that_tells_nothing_is_not_guessed_at():
    assert await results(object()) == ({"store server": "ok"}, True)


def about_queues(queues: Queues, processes: list[Process] | None = None) -> dict[str, Probe]:
    zone = {"zone": "Europe/Paris", "at": "now", "moved": "3"}
    stored = StoreTraffic(0, 0, None, processes, ("postdate.zones",), [zone], ())
    return {check.name: check for check in diagnose_traffic(Settings(), queues, stored, NOW)}


def test_destinations_that_are_no_queues_are_not_listed_as_such():
    lengths = {"error": 0, "postdate.timeouts": 0, "exchange:a/b": 0, "exchange-or-queue:a/b": 0}
    checks = about_queues(Queues(["error", "postdate.timeouts"], lengths))
    assert checks["queues"].found == "2: error, postdate.timeouts"
    assert (
        checks["time zone"].found
        == "Europe/Paris: messages follow the rules of the zone as of now, which moved 3 of them"
    )
    assert "postdate.zones" not in checks["destinations"].found


def test_queues_that_cannot_be_looked_into_are_not_to_be_listed():
    assert "errors list" in about_queues(Queues([], {"error": 1}))["error queue"].mend
    assert "errors list" not in about_queues(Queues([], {"error": 1}, listable=False))["error queue"].mend


def test_a_service_that_cannot_be_seen_is_nothing_to_rely_on():
    assert about_queues(Queues([], {}))["service"].result is Verdict.WARN


def test_a_value_that_follows_from_another_was_not_set():
    settings = load_settings(None, {}, {"store.address": "postgresql://host/db", "store.schema": "shop"})
    assert "2 values set" in diagnose_settings(settings).found
