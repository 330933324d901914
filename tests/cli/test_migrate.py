"""``postdate pipeline migrate``: what it says, and how each mistake ends in one clear line. What moves: docs/cli."""

import re
import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest

from postdate import SystemClock
from postdate.errors import PipelineError
from postdate.pipeline.migrate.looking import match_endpoint

FROM = ("--from", "sqlite:///old.db")


@pytest.fixture
def old(own_folder: Path) -> Path:
    """A timeout manager's file with two timeouts of ``billing``."""
    path = own_folder / "old.db"
    due = SystemClock().now() + timedelta(days=2)
    with sqlite3.connect(path) as connection:
        connection.execute(
            'CREATE TABLE "billing_TimeoutData" ("Id" TEXT PRIMARY KEY, "Destination" TEXT, "SagaId" TEXT, '
            '"State" BLOB, "Time" TEXT, "Headers" TEXT, "PersistenceVersion" TEXT)'
        )
        connection.executemany(
            "INSERT INTO \"billing_TimeoutData\" VALUES (?, 'orders', NULL, x'00', ?, '{}', '7.0.0')",
            [(f"00000000-0000-0000-0000-00000000000{n}", f"{due:%Y-%m-%d %H:%M:%S}.000000") for n in range(2)],
        )
    connection.close()
    return path


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        ((), "name a subcommand: postdate pipeline migrate preview|run|resume|abort|status", 2),
        (("preview", "--all-endpoints"), "give the source: --from ADDRESS, the database of a timeout manager", 2),
        (("run", "--from-store", "sqlite:///old.db"), "are moved by `postdate move --from ADDRESS --to ADDRESS`", 2),
        (("preview", "--from", "sqlite:///postdate.db", "--all-endpoints"), "its messages with `postdate move", 2),
        (("preview", *FROM), "give either --endpoint NAME or --all-endpoints", 2),
        (("run", *FROM, "--endpoint", "billing", "--all-endpoints"), "either --endpoint NAME or --all-endpoints", 2),
        (("run", *FROM, "--all-endpoints", "--cutoff", "2026-01-31 12:00:00"), "has no time zone", 2),
        (("run", *FROM, "--all-endpoints", "--batch-size", "0"), "Invalid value for '--batch-size'", 2),
        (("run", *FROM, "--all-endpoints", "--margin", "0s"), "the margin is above zero", 2),
        (("run", *FROM, "--all-endpoints", "--prefix", "billing"), "--prefix 'billing' is not ENDPOINT=PREFIX", 2),
        (("preview", "--from", "ravendb://host/db", "--all-endpoints"), "no migration can be made from", 2),
        (("preview", "--from", "env:OLD", "--all-endpoints"), "env:OLD names the environment variable 'OLD'", 2),
        (("preview", "--from", "sqlite:///missing.db", "--all-endpoints"), "missing.db; a migration creates none", 3),
        (("preview", *FROM, "--endpoint", "biling"), "no endpoint 'biling' owns messages there; it has billing", 2),
        (("abort", *FROM), "no migration is on its way in sqlite:///", 2),
    ],
)
def test_row_115_a_mistake_is_told_in_one_line(cli, old, arguments, said, status):
    cli.ok("setup")
    ran = cli("pipeline", "migrate", *arguments)
    assert (ran.status, ran.out) == (status, "")
    assert said in ran.err
    assert re.fullmatch(r"postdate: error \[\w+\]: .*\n", ran.err)


def test_row_115_a_preview_needs_a_target_that_is_set_up(cli, old):
    ran = cli("pipeline", "migrate", "preview", *FROM, "--all-endpoints")
    assert (ran.status, ran.out) == (3, "")
    assert "[store_not_set_up]" in ran.err


def test_row_115_preview_and_status_report_as_text_and_as_json(cli, old, monkeypatch):
    cli.ok("setup")
    monkeypatch.setenv("OLD", "sqlite:///old.db")
    found = cli.ok("pipeline", "migrate", "preview", "--from", "env:OLD", "--all-endpoints", "--json").json
    (billing,) = found["endpoints"]
    assert (found["possible"], billing["endpoint"], billing["count"], billing["left"]) == (True, "billing", 2, 0)
    assert billing["destinations"] == {"orders": 2}
    text = cli.ok("pipeline", "migrate", "preview", *FROM, "--endpoint", "BILLING").out
    assert "billing: 2 for orders" in text
    assert cli.ok("pipeline", "migrate", "status", *FROM, "--json").json["runs"] == []
    assert cli.ok("pipeline", "migrate", "status", *FROM).out.startswith("no migration is recorded in sqlite:///")


def test_row_115_what_is_in_the_way_ends_a_preview_with_1(cli, old):
    cli.ok("setup")
    with sqlite3.connect(old) as connection:
        connection.execute('UPDATE "billing_TimeoutData" SET "Headers" = \'none\' WHERE "Id" LIKE \'%1\'')
    connection.close()
    ran = cli("pipeline", "migrate", "preview", *FROM, "--all-endpoints")
    assert ran.status == 1
    assert "billing: cannot be migrated: 1 with headers that are not a JSON object" in ran.out


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("Billing", "Billing"),
        ("billing", "billing"),
        ("sales.orders", "Sales_Orders"),
        ("Sales_Orders", "Sales_Orders"),
    ],
)
def test_row_115_an_endpoint_is_found_in_any_case_and_with_points(named: str, meant: str) -> None:
    assert match_endpoint(named, ["Billing", "Sales_Orders", "billing"]) == meant


def test_row_115_an_endpoint_that_may_be_either_is_refused() -> None:
    with pytest.raises(PipelineError, match="may be any of Billing, billing"):
        match_endpoint("BILLING", ["Billing", "billing"])
