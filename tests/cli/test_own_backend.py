"""A backend of another package, found by its entry point alone: no line of Postdate names it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from msgspec import Meta
from tests.cli.conftest import CommandLine, Ran

from postdate.backends import registry
from postdate.backends.sqlite.observation import read_file_facts
from postdate.errors import ConfigurationError
from postdate.ports.backends import Adapter, Addresses, Backend, Place

MODULE = '''
"""Ledgers: files of their own kind, which keep messages and queues. No driver is imported here."""
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

from msgspec import Meta

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.common import Recording
from postdate.ports.settings import HowMuchIsRecorded, Secret, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    recording: HowMuchIsRecorded = Recording.ALL
    synchronous: Annotated[Literal["full", "normal"], Meta(description="as of a file")] = "full"
    pages_at_once: Annotated[int, Meta(ge=1, le=64, description="of a ledger: pages that are turned at once")] = 8
    ink: Annotated[Literal["blue", "black"], Meta(description="of a ledger: of what is written")] = "blue"
    dries_for: Annotated[timedelta, Span(), Meta(description="of a ledger: drying")] = timedelta(seconds=1)
    page_size: Annotated[Literal["small", "large"], Meta(description="of a ledger: its format")] = "small"
    seal: Annotated[Secret | None, Meta(description="of a ledger: what closes it")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    shelf: Annotated[str | None, Meta(description="of a ledger: where its queues stand")] = None


BACKEND = Backend(
    product="Ledger",
    place=Place.FILE,
    addresses=Addresses(("ledger",), "ledger:///file.ledger", aliases=("book",)),
    store=Adapter("ledgers.adapters:LedgerStore", LedgerSettings, arguments=frozenset({"create"})),
    transport=Adapter("ledgers.adapters:LedgerQueues", QueueSettings,
                      from_store=frozenset({"recording", "synchronous"}), arguments=frozenset({"create"})),
)
TABLE = Backend(
    product="Table",
    place=Place.FILE,
    addresses=Addresses(("table",), "table:///file.db"),
    store=Adapter("ledgers.adapters:TableStore"),
)
NO_SUCH_CLASS = Backend(
    product="Table",
    place=Place.FILE,
    addresses=Addresses(("table",), "table:///file.db"),
    store=Adapter("ledgers.adapters:Nobody"),
)
NOT_A_BACKEND = "a text"
TAKEN = Backend(product="Thief", place=Place.SERVER, addresses=Addresses(("postgres",), "postgres://host/db"))
'''
ADAPTERS = """
import sqlite3
from dataclasses import replace
from datetime import datetime

from postdate import DelayedMessage
from postdate.errors import DuplicateMessage
from postdate import LocalTransport, SqliteStore


class LedgerStore(SqliteStore):
    def __init__(self, path, *, pages_at_once=8, ink="blue", dries_for=None, seal=None, page_size="small", **settings):
        super().__init__(path, **settings)
        with open(f"{path}.told", "a") as told:
            told.write(f"{pages_at_once} {ink} {dries_for} {seal == 's3cret'}\\n")


class LedgerQueues(LocalTransport):
    def __init__(self, path, *, shelf=None, **settings):
        super().__init__(path, **settings)
        with open(f"{path}.told", "a") as told:
            told.write(f"{shelf}\\n")


class TableStore:
    # Six methods, and nothing else that Postdate knows; for one process.
    def __init__(self, path):
        self.db = sqlite3.connect(path, isolation_level=None)
        self.fetched = set()

    async def initialize(self, endpoint, mode):
        pass

    async def setup(self):
        columns = "id PRIMARY KEY, due, destination, body, failures DEFAULT 0"
        self.db.execute(f"CREATE TABLE IF NOT EXISTS waiting ({columns})")

    async def store(self, message, now):
        values = (message.message_id, message.due.isoformat(), message.destination, message.body)
        try:
            self.db.execute("INSERT INTO waiting (id, due, destination, body) VALUES (?, ?, ?, ?)", values)
        except sqlite3.IntegrityError as error:
            raise DuplicateMessage(message.message_id) from error

    async def fetch_next_due(self, now):
        for row in self.db.execute("SELECT * FROM waiting WHERE due < ? ORDER BY due", (now.isoformat(),)):
            if row[0] not in self.fetched:
                self.fetched.add(row[0])
                return DelayedMessage(row[0], datetime.fromisoformat(row[1]), row[2], body=row[3],
                                      number_of_failures=row[4])
        return None

    async def remove(self, message_id, now):
        self.fetched.discard(message_id)
        return self.db.execute("DELETE FROM waiting WHERE id = ?", (message_id,)).rowcount == 1

    async def increment_failure_count(self, message_id, now):
        self.fetched.discard(message_id)
        return self.db.execute("UPDATE waiting SET failures = failures + 1 WHERE id = ?", (message_id,)).rowcount == 1

    async def next_due(self):
        (due,) = self.db.execute("SELECT min(due) FROM waiting").fetchone()
        return None if due is None else datetime.fromisoformat(due)

    def close(self):
        self.db.close()
"""


class Installed:
    """A folder with the package, as an installer would leave it, in front of what Python finds."""

    def __init__(self, folder: Path, cli: CommandLine) -> None:
        self.folder, self._cli = folder, cli
        package = folder / "ledgers"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(MODULE)
        (package / "adapters.py").write_text(ADAPTERS)
        self.says("ledger = ledgers:BACKEND")

    def says(self, *points: str) -> None:
        """Have these entry points."""
        facts = self.folder / "ledgers-1.0.dist-info"
        facts.mkdir(exist_ok=True)
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: ledgers\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text("\n".join(["[postdate.backends]", *points, ""]))

    def __call__(self, *arguments: str) -> Ran:
        """Run ``postdate`` in this process."""
        return self._cli(*arguments)

    def process(self, *arguments: str) -> Ran:
        """Run ``postdate`` in a process of its own: where it matters what is imported first, or who logs."""
        command = [sys.executable, "-m", "postdate.cli", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    def ok(self, *arguments: str):
        """Run a command that must succeed, and return what it says."""
        return self._cli.ok(*arguments, "--json").json


@pytest.fixture
def postdate(own_folder, cli, monkeypatch) -> Iterator[Installed]:
    """Return the package; this process finds it as others do, and forgets it after the test."""
    installed = Installed(own_folder / "site", cli)
    others = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed.folder), *([others] if others else [])]))
    monkeypatch.syspath_prepend(installed.folder)
    monkeypatch.setattr(registry, "_registry", registry._Registry())
    yield installed
    for module in [name for name in sys.modules if name.partition(".")[0] == "ledgers"]:
        del sys.modules[module]


def test_its_addresses_work_from_the_command_line(postdate, own_folder, service, eventually):
    (own_folder / "postdate.toml").write_text('[store]\naddress = "book:///orders.ledger"\nrecording = "outcomes"\n')
    shown = {each["key"]: each["value"] for each in postdate.ok("config", "show")["settings"]}
    assert shown["transport.address"] == "book:///orders.ledger", "its queues are in the same file"
    assert postdate.ok("setup", "--queue", "orders")["queues"] == ["postdate.timeouts", "error", "orders"]
    assert (own_folder / "orders.ledger").exists()
    postdate.ok("send", "orders", "later", "--delay", "1h", "--id", "m1")
    postdate.ok("send", "orders", "soon", "--delay", "50ms", "--id", "m2")
    running = service()
    eventually(lambda: postdate.ok("messages", "stats")["queues"]["orders"] == 1, "delivered")
    assert [each["message_id"] for each in postdate.ok("messages", "list")["messages"]] == ["m1"]
    assert postdate.ok("messages", "explain", "m1")["state"] == "waiting"
    checks = {check["name"]: check for check in postdate.ok("doctor")["checks"]}
    assert checks["service"]["found"].startswith("running")
    running.process.terminate()
    assert running.end() == 0


@pytest.mark.parametrize("kind", ["ledger:///x", "book"], ids=["by address", "by kind"])
def test_it_is_measured_in_a_file_of_the_run(postdate, own_folder, kind):
    found = postdate.ok("bench", "drain", "--n", "200", "--store", kind)
    assert (found["lost"], found["duplicated"], found["early"]) == (0, 0, 0)
    assert found["servers"] == {kind.partition(":")[0]: {"synchronous": "full"}}
    assert postdate.ok("bench", "schedule", "--n", "200", "--store", kind)["lost"] == 0
    assert sorted(each.name for each in own_folder.iterdir()) == ["site"], "nothing is left"


def test_a_store_of_six_methods_is_measured(postdate):
    postdate.says("table = ledgers:TABLE")
    found = postdate.ok("bench", "drain", "--n", "200", "--store", "table:///x", "--transport", "local")
    assert (found["lost"], found["duplicated"], found["early"]) == (0, 0, 0)
    assert postdate.ok("bench", "schedule", "--n", "200", "--store", "table:///x", "--transport", "local")["lost"] == 0


def test_a_server_without_a_place_for_a_run_is_not_measured(postdate):
    on_a_server = MODULE.replace("Place.FILE", "Place.SERVER").replace("ledger:///file.ledger", "ledger://host")
    (postdate.folder / "ledgers" / "__init__.py").write_text(on_a_server)
    refused = postdate("bench", "drain", "--n", "10", "--store", "ledger://host")
    assert refused.status == 2, refused
    assert "Ledger cannot be measured: its backend makes no place for a run (Backend.scratch)" in refused.err


def test_six_methods_are_enough_for_an_address(postdate, own_folder, service, eventually):
    postdate.says("table = ledgers:TABLE")
    text = '[store]\naddress = "table:///waiting.db"\n[transport]\naddress = "local:///queues.db"\n'
    (own_folder / "postdate.toml").write_text(text)
    postdate.ok("setup", "--queue", "orders")
    running = service()
    postdate.ok("send", "orders", "soon", "--delay", "50ms", "--id", "m2")
    listed = postdate("messages", "list")
    assert listed.status == 2, listed
    assert "the store 'table:///waiting.db' does not support listing and changing its messages" in listed.err
    assert postdate("doctor").status == 0
    eventually(lambda: read_file_facts(own_folder / "queues.db", 0).queues["orders"] == 1, "delivered")
    running.process.terminate()
    assert running.end() == 0


def test_its_addresses_are_among_those_that_errors_name(postdate):
    asked = postdate("messages", "list", "--store", "leger:///a")
    assert (asked.status, "did you mean ledger:///file.ledger?" in asked.err) == (2, True), asked
    asked = postdate("messages", "list", "--store", "zzz:///a")
    assert "ledger:" in asked.err


def test_a_setting_that_it_does_not_take_is_refused(postdate, own_folder):
    (own_folder / "postdate.toml").write_text('[store]\naddress = "ledger:///a.ledger"\nschema = "shop"\n')
    asked = postdate("setup")
    assert asked.status == 2
    assert "store.schema (postdate.toml:3) is not for Ledger" in asked.err, asked


OWN = """
[store]
address = "ledger:///a.ledger"
pages_at_once = 12
seal = "s3cret"
[transport]
shelf = "upper"
"""


def test_settings_of_its_own_work_from_the_file_and_the_environment(postdate, own_folder, monkeypatch):
    (own_folder / "postdate.toml").write_text(OWN)
    monkeypatch.setenv("POSTDATE_STORE__INK", "black")
    monkeypatch.setenv("POSTDATE_STORE__DRIES_FOR", "1m30s")
    monkeypatch.setenv("POSTDATE_TRANSPORT__ADDRESS", "ledger:///a.ledger")
    shown = {each["key"]: each for each in postdate.ok("config", "show")["settings"]}
    own = {name: shown[f"store.{name}"] for name in ("pages_at_once", "ink", "dries_for", "seal")}
    assert {name: each["value"] for name, each in own.items()} == {
        "pages_at_once": 12,
        "ink": "black",
        "dries_for": "1m30s",
        "seal": "***",
    }
    assert own["pages_at_once"]["origin"] == "postdate.toml:4"
    assert own["ink"]["origin"] == "environment POSTDATE_STORE__INK"
    assert own["ink"]["meaning"] == "of a ledger: of what is written"
    assert shown["transport.shelf"]["value"] == "upper"
    postdate.ok("setup")
    assert (own_folder / "a.ledger.told").read_text().splitlines() == ["12 black 0:01:30 True", "upper"]


@pytest.mark.parametrize(
    ("set_", "said"),
    [
        ({"STORE__PAGES_AT_ONCE": "65"}, "store.pages_at_once must be a whole number, 1 to 64, not "),
        ({"STORE__INK": "bleu"}, "store.ink must be one of blue, black (did you mean 'blue'?), not "),
        ({"STORE__DRIES_FOR": "0"}, "store.dries_for must be a duration above zero"),
        ({"STORE__PAGES_AT_ONE": "9"}, "did you mean POSTDATE_STORE__PAGES_AT_ONCE?"),
        ({"STORE__SEAL": " "}, "store.seal must be a text that is not blank (environment POSTDATE_STORE__SEAL)"),
    ],
)
def test_a_wrong_value_of_a_setting_of_its_own_is_said_as_any_other(postdate, monkeypatch, set_, said):
    monkeypatch.setenv("POSTDATE_STORE__ADDRESS", "ledger:///a.ledger")
    for name, value in set_.items():
        monkeypatch.setenv(f"POSTDATE_{name}", value)
    asked = postdate("config", "show")
    assert (asked.status, said in asked.err) == (2, True), asked


def test_the_backend_of_the_address_says_what_a_setting_is_that_others_have_too(postdate, monkeypatch):
    monkeypatch.setenv("POSTDATE_STORE__PAGE_SIZE", "large")
    asked = postdate("config", "show")
    assert (asked.status, "store.page_size must be a whole number, 1 to 1,000" in asked.err) == (2, True), asked
    monkeypatch.setenv("POSTDATE_STORE__ADDRESS", "ledger:///a.ledger")
    shown = {each["key"]: each for each in postdate.ok("config", "show")["settings"]}["store.page_size"]
    assert (shown["value"], shown["meaning"]) == ("large", "of a ledger: its format")


def test_a_setting_of_its_own_is_refused_by_the_others(postdate, monkeypatch):
    monkeypatch.setenv("POSTDATE_STORE__INK", "black")
    asked = postdate("setup")
    assert asked.status == 2
    assert "store.ink (environment POSTDATE_STORE__INK) is not for SQLite" in asked.err, asked


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("ledgers.missing:BACKEND", "is left out: No module named 'ledgers.missing'"),
        ("ledgers:NOT_A_BACKEND", "is left out: it is not a postdate Backend"),
        ("ledgers:TAKEN", "is left out: there is one already for postgres: (PostgreSQL)"),
        ("ledgers.ends:BACKEND", "is left out: 3"),
        ("ledgers.unlike:BACKEND", "is left out: 'L' is not a scheme"),
    ],
)
def test_a_broken_one_is_left_out_and_named_and_the_others_work(postdate, caplog, point, said):
    (postdate.folder / "ledgers" / "ends.py").write_text("raise SystemExit(3)")
    (postdate.folder / "ledgers" / "unlike.py").write_text(
        "from postdate.ports.backends import Addresses\nBACKEND = Addresses(('L',), 'L:///x')"
    )
    postdate.says(f"ledger = {point}")
    postdate.ok("setup")
    postdate.ok("send", "orders", "x", "--delay", "1h")
    asked = postdate("messages", "list", "--store", "ledger:///a")
    assert asked.status == 2
    assert said in caplog.text


def test_who_runs_a_command_is_told_what_is_left_out(postdate):
    postdate.says("ledger = ledgers:NOT_A_BACKEND")
    asked = postdate.process("messages", "list", "--store", "ledger:///a")
    assert (asked.status, "is left out: it is not a postdate Backend" in asked.err) == (2, True), asked


def test_a_module_that_uses_postdate_itself_while_it_is_loaded_is_found(postdate):
    module = postdate.folder / "ledgers" / "__init__.py"
    asks = "from postdate.config import Address\nrepr(Address('ledger:///a'))\nimport postdate.wiring\n"
    module.write_text(asks + MODULE)
    ran = postdate.process("setup", "--store", "ledger:///a.ledger")
    assert (ran.status, "left out" in ran.err) == (0, False), ran


def test_loading_that_is_interrupted_is_begun_again(monkeypatch):
    """Else a process whose first command was interrupted would never know the backends of others."""

    class Point:
        name, value, tried = "other", "other:BACKEND", 0

        def load(self) -> Backend:
            self.tried += 1
            if self.tried == 1:
                raise KeyboardInterrupt
            return Backend(product="Other", place=Place.FILE, addresses=Addresses(("other",), "other:///a"))

    point, found = Point(), registry._Registry()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    with pytest.raises(KeyboardInterrupt):
        found.load_all()
    assert "Other" in {each.product for each in found.load_all()}


def test_what_it_refers_to_and_is_not_there_is_named(postdate):
    postdate.says("table = ledgers:NO_SUCH_CLASS")
    asked = postdate("setup", "--store", "table:///a.db", "--transport", "local:///q.db")
    assert asked.status == 2
    assert "Table cannot be used: ledgers.adapters:Nobody refers to nothing" in asked.err


def test_doctor_makes_no_file(postdate, own_folder):
    asked = postdate("doctor", "--store", "ledger:///a.ledger")
    assert asked.status != 0
    assert "there is no file" in asked.out
    assert not (own_folder / "a.ledger").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"place": "file"},
        {"addresses": "led:"},
        {"store": "ledgers.adapters:LedgerStore"},
        {"queue_addresses": ("led",)},
    ],
)
def test_a_backend_of_wrong_parts_cannot_be_made(wrong):
    right: dict[str, Any] = {
        "product": "Ledger",
        "place": Place.FILE,
        "addresses": Addresses(("ledger",), "ledger:///a"),
    }
    with pytest.raises(ConfigurationError, match=f"the backend 'Ledger' has {next(iter(wrong))}="):
        Backend(**{**right, **wrong})


@pytest.mark.parametrize("schemes", [(), "led", ("Led",), ("env",), ("a:b",), ("",)])
def test_schemes_that_no_address_can_have_are_refused(schemes):
    with pytest.raises(ConfigurationError, match="scheme"):
        Addresses(schemes, "led:///a")


@dataclass
class WithAddress:
    address: Annotated[str, Meta(description="which every section has")] = ""


@pytest.mark.parametrize("settings", [WithAddress, frozenset({"schema"}), {"schema": str}, str])
def test_settings_that_are_no_dataclass_or_take_the_name_of_the_address_are_refused(settings):
    with pytest.raises(ConfigurationError, match=r"not a dataclass of settings|has a setting 'address'"):
        Adapter("a:b", settings)


@pytest.mark.parametrize("reference", ["module", "module:", ":name", "a:b:c", "a b:c"])
def test_a_reference_to_nothing_is_refused(reference):
    with pytest.raises(ConfigurationError, match="refers to nothing"):
        Adapter(reference)
