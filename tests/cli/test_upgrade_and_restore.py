"""What the pages on upgrades, backups, sizes and rights say of servers, and of figures and tests of others."""

import os
import re
import sqlite3
import subprocess
import uuid
from pathlib import Path

import psycopg
import pytest
from tests.soak import ROOT

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def databases(postgres_url, monkeypatch):
    """Make two empty databases; return their addresses. The first is the store of this process."""
    names = [f"restore_{uuid.uuid4().hex[:12]}" for _ in range(2)]
    urls = [postgres_url.rpartition("/")[0] + f"/{name}" for name in names]
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        for name in names:
            connection.execute(f"CREATE DATABASE {name}".encode())
        monkeypatch.setenv("POSTDATE_STORE__ADDRESS", urls[0])
        yield urls
        for name in names:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_a_dump_of_postgresql_restores_all_and_repeats_what_was_delivered_since(cli, databases, service, eventually):
    old, new = databases
    cli.ok("setup", "--queue", "orders")
    cli.ok("send", "orders", "1", "--id", "delivered-since", "--delay", "1ms")
    cli.ok("send", "orders", "2", "--id", "waits", "--delay", "1h")
    page = (DOCS / "backup.md").read_text("utf-8")
    (block,) = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    dump, restore, *_ = block.splitlines()
    environment = {**os.environ, "DATABASE_URL": old, "OTHER_URL": new}
    subprocess.run(["/bin/sh", "-c", dump], env=environment, check=True)
    service("--no-setup")
    eventually(lambda: cli.ok("messages", "stats", "--json").json["queues"]["orders"] == 1, "delivered")
    subprocess.run(["/bin/sh", "-c", restore], env=environment, check=True)
    waiting = cli.ok("messages", "list", "--store", new, "--json").json["messages"]
    assert {message["message_id"] for message in waiting} == {"delivered-since", "waits"}
    checks = cli("doctor", "--store", new, "--json").json["checks"]
    assert [check["result"] for check in checks if check["name"] == "schema"] == ["ok"]
    service("--no-setup", "--store", new)
    eventually(lambda: cli.ok("messages", "stats", "--store", new, "--json").json["queues"]["orders"] == 1, "repeated")
    assert "delivered-since" in cli.ok("queues", "peek", "orders", "--store", new).out


def mark_as_of_the_future(url):
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("INSERT INTO postdate.migration (subject, version, name) VALUES ('', 9000, 'of the future')")
        connection.execute("ALTER TABLE postdate.queue_message ADD COLUMN of_the_future integer NOT NULL DEFAULT 0")


def test_an_older_version_goes_on_beside_tables_of_a_newer_one_in_postgresql(cli, databases, service, eventually):
    """A service that runs goes on, a new one with --no-setup and new senders work; only setting up is refused."""
    url, _ = databases
    cli.ok("setup", "--queue", "orders")
    runs = service()
    mark_as_of_the_future(url)
    cli.ok("send", "orders", "1", "--delay", "1ms")
    eventually(lambda: cli.ok("messages", "stats", "--json").json["queues"]["orders"] == 1, "delivered")
    runs.process.terminate()
    assert runs.end() == 0
    service("--no-setup")
    cli.ok("send", "orders", "2", "--delay", "1ms")
    eventually(lambda: cli.ok("messages", "stats", "--json").json["queues"]["orders"] == 2, "delivered")
    for command in ("setup", "run"):
        refused = cli(command)
        assert (refused.status, "store_from_newer_version" in refused.err) == (3, True)


def test_a_running_service_goes_on_beside_tables_of_a_newer_version_in_sqlite(cli, service, eventually, own_folder):
    """What it cannot do is start again; ``docs/upgrading.md`` shows that."""
    cli.ok("setup", "--queue", "orders")
    cli.ok("send", "orders", "1", "--id", "a", "--delay", "1s")
    service()
    with sqlite3.connect(own_folder / "postdate.db") as connection:
        connection.execute("ALTER TABLE queue_message ADD COLUMN of_the_future INTEGER NOT NULL DEFAULT 0")
        connection.execute("INSERT INTO postdate_migration (version, name) VALUES (9000, 'of the future')")
    count = "SELECT count(*) FROM record WHERE message_id = 'a'"  # scheduled, and delivered
    eventually(lambda: connection.execute(count).fetchone() == (2,), "delivered")
    connection.close()
    refused = cli("send", "orders", "2")
    assert (refused.status, "store_from_newer_version" in refused.err) == (3, True)


def test_each_figure_on_sizes_is_one_of_the_benchmarks():
    page, measured = (DOCS / "sizing.md").read_text("utf-8"), (DOCS / "benchmarks.md").read_text("utf-8")
    rows = [row for row in page.splitlines() if row.startswith("|") and row.count("|") == 5][2:]
    figures = [figure for row in rows for figure in re.findall(r"\d+\.\d+|\d+,\d+", row)]
    assert len(figures) > 10
    assert [figure for figure in figures if figure not in measured] == []


def test_each_test_that_the_page_on_security_names_is_there():
    tests = re.findall(r"`(tests/\S+\.py)::(\w+)`", (DOCS / "security.md").read_text("utf-8"))
    assert len(tests) == 2
    assert [name for file, name in tests if f"def {name}(" not in (ROOT / file).read_text("utf-8")] == []
