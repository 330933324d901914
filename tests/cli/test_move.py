"""``postdate move``: what it says, and how each mistake ends in one clear line. What moves: test_store_move.py."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.integration.store_places import StorePlace, place_in

PATHS = ("--from", "sqlite:///old.db", "--to", "sqlite:///new.db")


@pytest.fixture
def old(cli) -> None:
    """Two stores in files; in the old one a message waits."""
    for name in ("old", "new"):
        cli.ok("setup", "--queue", "orders", "--store", f"sqlite:///{name}.db")
    cli.ok("send", "orders", "{}", "--id", "order-1", "--delay", "3d", "--store", "sqlite:///old.db")


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        ((), "Missing option '--from'", 2),
        (("--from", "sqlite:///no.db", *PATHS[2:]), "there is no file no.db; name the file in which messages wait", 3),
        ((*PATHS[:2], "--to", "sqlite:///no.db"), "there is no file no.db; create it with `postdate setup`", 3),
        (PATHS[:2], "there is no file postdate.db; create it with `postdate setup`", 3),
        ((*PATHS[:2], "--to", "sqlite:///folder/../old.db"), "are the same store, or one is a copy of the other", 2),
        ((*PATHS[:2], "--to", "postgres//host/db"), 'not "postgres//host/db" (option --to)', 2),
        ((*PATHS[:2], "--to", "env:NEW"), "env:NEW names the environment variable 'NEW'", 2),
        (("--from", "ravendb://host/db", *PATHS[2:]), "no store has the address 'ravendb://host/db'", 2),
        (("--from", "memory:", *PATHS[2:]), "exists in one process only: name a file or a server", 2),
        ((*PATHS[:2], "--to", "memory:"), "exists in one process only: name a file or a server", 2),
        ((*PATHS, "--from-schema", "x"), "SQLite takes no schema", 2),
    ],
)
def test_a_mistake_is_told_in_one_line(cli, old, own_folder: Path, arguments, said, status):
    (own_folder / "folder").mkdir()
    ran = cli("move", *arguments)
    assert (ran.status, ran.out) == (status, "")
    assert said in ran.err
    assert re.fullmatch(r"postdate: error \[\w+\]: .*\n", ran.err)
    assert not list(own_folder.glob("no.db*"))
    assert "order-1" in cli.ok("messages", "list", "--store", "sqlite:///old.db").out


def test_a_store_without_tables_is_told(cli, old, own_folder: Path):
    (own_folder / "empty.db").touch()
    for arguments in (("--from", "sqlite:///empty.db", *PATHS[2:]), (*PATHS[:2], "--to", "sqlite:///empty.db")):
        ran = cli("move", *arguments)
        assert (ran.status, ran.out) == (3, "")
        assert "empty.db has schema version 0" in ran.err
        assert "[store_not_set_up]" in ran.err


def test_it_reports_as_text_and_as_json(cli, old, monkeypatch):
    monkeypatch.setenv("OLD", "sqlite:///old.db")
    looked = cli.ok("move", "--from", "env:OLD", "--to", "sqlite:///new.db", "--dry-run", "--json").json
    counts = ("dry_run", "waiting_before", "moved", "refused", "waiting", "destinations")
    assert [looked[name] for name in counts] == [True, 1, 1, 0, 0, {"orders": 1}]
    text = cli.ok("move", *PATHS).out
    assert re.search(r"^waited +1\nmoved +1\nrefused +0\nstill waiting +0\n1 message for orders\n", text, re.MULTILINE)
    assert "order-1" in cli.ok("messages", "list", "--store", "sqlite:///new.db").out
    explained = cli.ok("messages", "explain", "order-1", "--store", "sqlite:///old.db").out
    assert re.search(r"order-1: moved away\n  it was moved to another store: sqlite:///.*/new\.db at ", explained)


def test_what_stays_ends_it_with_1_and_is_named(cli, old):
    cli.ok("send", "orders", "other", "--id", "order-1", "--delay", "3d", "--store", "sqlite:///new.db")
    ran = cli("move", *PATHS)
    assert ran.status == 1
    assert re.search(r"^refused +1$", ran.out, re.MULTILINE)
    assert "refused: order-1: the new store has another message of this id: due" in ran.out


@pytest.mark.usefixtures("postgres_url", "redis_url")  # before the environment is emptied
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
def test_nothing_moves_while_a_service_of_the_old_store_runs(
    request: pytest.FixtureRequest, cli, service: Callable, kind: str, eventually, own_folder: Path
):
    """It is named, unless the operator knows better; once it has ended, the move begins."""
    with ExitStack() as stack:
        old = stack.enter_context(place_in(kind, request, "old"))
        new = stack.enter_context(place_in("sqlite", request, "new"))
        schema = [] if old.spec.schema is None else ["--from-schema", old.spec.schema]
        table = [] if old.table is None else ["--from-table", old.table]
        arguments = ("move", "--from", old.spec.address, "--to", new.spec.address, *schema, *table)
        _write_settings(own_folder / "old.toml", old)
        running = service("--config", "old.toml")
        ran = cli(*arguments)
        assert (ran.status, ran.out) == (1, "")
        assert re.search(
            rf"\[migration_conflict\]: services of .* run: process {running.process.pid} on .*; stop them first",
            ran.err,
        )
        assert f"process {running.process.pid} on" in cli.ok(*arguments, "--dry-run").out
        assert f"note: services of {_shown(old)} run" in cli.ok(*arguments, "--services-stopped").out
        running.process.kill()
        running.process.wait()
        eventually(lambda: cli(*arguments).status == 0, "no service runs any more")


def _shown(place: StorePlace) -> str:
    return place.spec.redacted_address


def _write_settings(path: Path, place: StorePlace) -> None:
    spec, name = place.spec, place.spec.endpoint
    schema = "" if spec.schema is None else f"schema = '{spec.schema}'\n"
    path.write_text(f"[endpoint]\nname = '{name}'\n[store]\naddress = '{spec.address}'\n{schema}")
