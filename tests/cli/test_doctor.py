"""The doctor finds what is wrong, says how to mend it, and changes nothing."""

import os
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest

from postdate import LocalTransport, SqliteStore, SystemClock, connect
from postdate.messages import Envelope
from postdate.operations.doctor import Verdict, diagnose_file_system, diagnose_loopback

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def checks(ran) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in ran.json["checks"]}


def test_without_a_database_it_says_how_to_make_one(cli, own_folder):
    ran = cli("doctor", "--json")
    assert ran.status == 1
    assert checks(ran)["database"]["result"] == "fail"
    assert "postdate setup" in checks(ran)["database"]["mend"]
    assert list(own_folder.iterdir()) == []


def test_after_setup_only_the_service_is_missing(cli):
    cli.ok("setup")
    ran = cli.ok("doctor", "--json")
    found = checks(ran)
    not_ok = {name for name, check in found.items() if check["result"] != "ok"}
    assert not_ok <= {"service", "disk space"}
    assert found["service"]["result"] == "warn"
    assert "wal" in found["write-ahead log"]["found"]
    assert ran.json["result"] == "warn"
    assert set(found) == {
        "Python", "SQLite", "settings", "loopback", "synchronous", "disk space", "file system", "database",
        "write-ahead log", "clock", "zone files", "processes", "service", "queues", "error queue", "destinations",
        "unreadable", "pipeline",
    }  # fmt: skip


def test_a_stream_that_does_not_go_on_is_shown_with_the_command_that_forgets_it(cli):
    cli.ok("setup")
    store = SqliteStore("postdate.db", synchronous="full")
    now = SystemClock().now()
    for days, result in ((6, "ok"), (8, "warn")):
        store.set_stream_position("/my data/lake#12ab34cd", 42, now - timedelta(days=days))
        check = checks(cli("doctor", "--json"))["history"]
        assert check["result"] == result
        assert "/my data/lake#12ab34cd has the records below number 42" in check["found"]
    assert "has not gone on for 8d" in check["found"]
    assert "`postdate pipeline history --forget '/my data/lake#12ab34cd'`" in check["mend"]
    listed = cli.ok("pipeline", "history", "--positions", "--json").json["positions"]
    assert [(each["name"], each["next"]) for each in listed] == [("/my data/lake#12ab34cd", 42)]
    assert cli("pipeline", "history", "--forget", "/my data/lake").status != 0
    assert cli.ok("pipeline", "history", "--forget", "/my data/lake#12ab34cd").out == "retention waits for no lake\n"
    assert "history" not in checks(cli("doctor", "--json"))
    anyio.run(store.close)


def test_zones_that_messages_follow_are_shown_with_what_their_rules_have_moved(cli):
    cli.ok("setup", "--queue", "orders")

    async def sent() -> None:
        async with connect("sqlite:///postdate.db") as client:
            await client.send(b"", destination="orders", deliver_at="2999-07-01 09:00", zone="Europe/Paris")

    began = SystemClock().now()
    anyio.run(sent)
    found = checks(cli("doctor", "--json"))
    zone, _, rest = found["time zone"]["found"].partition(": messages follow the rules of the zone as of ")
    at, _, moved = rest.partition(", which moved ")
    assert (found["time zone"]["result"], zone, moved) == ("ok", "Europe/Paris", "0 of them")
    assert began <= datetime.fromisoformat(at) <= SystemClock().now()
    assert found["destinations"]["result"] == "ok"


def test_overdue_messages_without_a_service_are_a_failure(cli):
    cli.ok("setup", "--queue", "orders")
    cli.ok("send", "orders", "x", "--delay", "1h", "--id", "m1")
    cli.ok("messages", "reschedule", "m1", "--at", "2026-01-01T00:00Z")
    ran = cli("doctor", "--json")
    assert ran.status == 1
    assert checks(ran)["service"]["found"].startswith("no service is running, and 1 message overdue, the oldest for ")
    assert checks(ran)["service"]["mend"] == "start one: postdate run"


def test_missing_queues_are_found(cli, own_folder):
    cli.ok("setup")
    (own_folder / "postdate.toml").write_text('[endpoint]\nname = "billing"\n')
    cli.ok(
        "send",
        "nowhere",
        "x",
        "--delay",
        "1h",
        "--store",
        "sqlite:///postdate.db",
        "--transport",
        "local:///postdate.db",
    )
    found = checks(cli("doctor", "--json"))
    assert found["queues"]["result"] == "fail"
    assert found["queues"]["found"] == "missing: billing.timeouts"
    assert found["destinations"]["result"] == "warn"
    assert "--queue nowhere" in found["destinations"]["mend"]


def test_a_filled_error_queue_is_a_warning(cli):
    cli.ok("setup")

    async def fail() -> None:
        transport = LocalTransport("postdate.db")
        await transport.send([Envelope("error", "m1")], NOW)
        await transport.close()

    anyio.run(fail)
    found = checks(cli.ok("doctor", "--json"))
    assert (found["error queue"]["result"], found["error queue"]["found"]) == ("warn", "1 message in 'error'")


def test_a_weaker_setting_is_a_warning(cli, monkeypatch):
    monkeypatch.setenv("POSTDATE_STORE__SYNCHRONOUS", "normal")
    cli.ok("setup")
    assert checks(cli.ok("doctor", "--json"))["synchronous"]["result"] == "warn"


def test_something_else_than_a_database_is_a_failure(cli, own_folder):
    (own_folder / "postdate.db").write_text("no database " * 100)
    ran = cli("doctor", "--json")
    assert ran.status == 1
    assert "not a SQLite database" in checks(ran)["database"]["found"]


def test_a_database_of_a_newer_version_is_a_failure(cli, own_folder):
    cli.ok("setup")
    connection = sqlite3.connect(own_folder / "postdate.db")
    with connection:
        connection.execute("INSERT INTO postdate_migration (version, name) VALUES (999, 'from the future')")
    connection.close()
    assert checks(cli("doctor", "--json"))["database"]["mend"] == "upgrade Postdate here"


def test_a_clock_that_was_set_back_is_noticed(cli, own_folder):
    cli.ok("setup")
    in_a_year = 4_000_000_000
    os.utime(own_folder / "postdate.db", (in_a_year, in_a_year))
    found = checks(cli.ok("doctor", "--json"))["clock"]
    assert found["result"] == "warn"
    assert "behind the latest time in" in found["found"]


def test_wrong_settings_are_said_before_anything_is_checked(cli, own_folder):
    (own_folder / "postdate.toml").write_text("[stoer]\n")
    ran = cli("doctor")
    assert (ran.status, ran.out) == (2, "")
    assert "[unknown_setting]" in ran.err


def test_a_setting_that_is_not_for_the_store_is_a_failure_as_it_is_for_other_commands(cli, own_folder):
    cli.ok("setup")
    (own_folder / "postdate.toml").write_text('[store]\nschema = "shop"\n')
    refused, found = cli("messages", "list"), cli("doctor")
    assert (refused.status, found.status) == (2, 1)
    assert "is not for SQLite" in refused.err
    assert "is not for SQLite" in found.out


def test_memory_is_nothing_to_check(cli):
    found = checks(cli.ok("doctor", "--store", "memory:", "--transport", "memory:", "--json"))
    assert found["addresses"]["result"] == "warn"


def test_a_java_home_without_java_is_a_warning(cli, monkeypatch, own_folder):
    monkeypatch.setenv("POSTDATE_JAVA_HOME", str(own_folder))
    cli.ok("setup")
    assert checks(cli.ok("doctor", "--json"))["pipeline"]["result"] == "warn"


def test_a_machine_without_loopback_datagrams_is_told_what_it_misses():
    def nothing_arrives() -> None:
        raise TimeoutError("timed out")

    found = diagnose_loopback(nothing_arrives)
    assert found.result is Verdict.WARN
    assert "1 s late" in found.mend
    assert "a minute late" in found.mend


MOUNTS = """\
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:30 / /srv/share rw,relatime - nfs4 server:/export rw
31 22 0:31 / /srv/share/local\\040disk rw - xfs /dev/sdb rw
32 22 0:32 / /mnt rw - ext4 /dev/sdc rw
33 32 0:33 / /mnt rw - cifs //server/share rw
"""


@pytest.mark.parametrize(
    ("path", "result"),
    [
        ("/home/postdate.db", Verdict.OK),
        ("/srv/share/postdate.db", Verdict.FAIL),
        ("/srv/shared/postdate.db", Verdict.OK),
        ("/srv/share/local disk/postdate.db", Verdict.OK),
        ("/mnt/postdate.db", Verdict.FAIL),
    ],
)
def test_a_file_on_a_network_is_found(tmp_path, path, result):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert diagnose_file_system(Path(path), mounts).result is result


def test_a_system_without_a_list_of_mounts_is_not_guessed_at(tmp_path):
    assert "unknown on" in diagnose_file_system(Path("/home/postdate.db"), tmp_path / "missing").found
