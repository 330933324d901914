"""The command line on every pair of store and queues that docs/cli/addresses.md and README.md name.

SQL Server and MSMQ are left out: there are none here.
"""

import itertools
import json
import os
import re
import ssl
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from azure.storage.queue import QueueServiceClient
from tests.azure_store_subjects import drop_table
from tests.cli.test_servers import _delete_queues, _drop_database, _drop_schema, kinds
from tests.proxy import in_tls
from tests.tds_server import Certificates, issue
from tests.waiting import READY

from postdate.backends.azure.table_names import default_table

PAGE = Path(__file__).parents[2] / "docs" / "cli" / "addresses.md"
FORKED = Path(__file__).with_name("forked.py")

STORES = ("sqlite", "postgresql", "mariadb", "redis", "azure-table")
QUEUES = ("local", "postgresql", "amqp", "redis", "azure-queues")
PAIRS = [*itertools.product(STORES, QUEUES), ("mysql", "amqps"), ("rediss", "rediss")]
"""Any store goes with any queues (README.md). Each of the other schemes is in one pair."""

IN_GATE = {*zip(STORES, QUEUES, strict=True), *zip(STORES, QUEUES[2:] + QUEUES[:2], strict=True), *PAIRS[-2:]}
"""Each store and all queues with their own kind or their usual partner, and with another."""

_ONCE_MORE = pytest.mark.soak(
    "its store and its queues are in two other pairs each",
    part="docs",
    proven_by="tests/cli/test_every_address.py::test_every_command_works_with_every_store_and_all_queues",
)

COLUMNS = ("setup", "run", "send", "one delivery", "messages", "errors", "doctor")


# --- places -----------------------------------------------------------------------------------------------------------


@dataclass
class Places:
    """Stores and queues of one test's own."""

    name: str
    addresses: dict[str, str]
    drops: dict[str, Callable[[], None]]
    used: list[str] = field(default_factory=list)

    def variables(self, store: str, queues: str) -> dict[str, str]:
        """Return the settings that name a pair, in the environment."""
        self.used = [store, queues]
        variables = {
            "ENDPOINT__NAME": self.name,
            "ENDPOINT__ERROR_QUEUE": f"{self.name}.error",
            "DELAYED_DELIVERY__MISSING_QUEUE_WAIT": "0s",
        }
        variables |= {"STORE__ADDRESS": self.addresses[store], "TRANSPORT__ADDRESS": self.addresses[queues]}
        if store in {"postgresql", "mariadb", "mysql"}:
            variables["STORE__SCHEMA"] = self.name
        if queues == "postgresql":
            variables["TRANSPORT__SCHEMA"] = self.name
        return variables

    def drop(self) -> None:
        for scheme in set(self.used):
            self.drops.get(scheme, lambda: None)()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return issue(tmp_path_factory.mktemp("certificates"), "127.0.0.1")


@pytest.fixture(scope="module")
def ports_in_tls(certificates: Certificates, redis_url: str, rabbitmq_url: str) -> Iterator[dict[str, int]]:
    """Return the ports behind which the servers are reached in TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.certificate, certificates.key)
    of_redis, of_rabbitmq = urlsplit(redis_url), urlsplit(rabbitmq_url)
    with (
        in_tls(of_redis.hostname or "", of_redis.port or 0, context) as first,
        in_tls(of_rabbitmq.hostname or "", of_rabbitmq.port or 0, context) as second,
    ):
        yield {"rediss": first, "amqps": second}


@pytest.fixture
def places(
    postgres_url: str,
    mariadb_url: str,
    rabbitmq_url: str,
    redis_url: str,
    azurite_connection: str,
    certificates: Certificates,
    ports_in_tls: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Places]:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    monkeypatch.setenv("CONNECTION", azurite_connection)
    login, authority = urlsplit(redis_url).password, certificates.authority
    addresses = {
        "sqlite": "sqlite:///postdate.db",
        "local": "local:///postdate.db",
        "postgresql": postgres_url,
        "mariadb": mariadb_url,
        "mysql": mariadb_url.replace("mariadb:", "mysql:"),
        "amqp": rabbitmq_url,
        "amqps": f"amqps://guest:guest@127.0.0.1:{ports_in_tls['amqps']}/?cacertfile={authority}",
        "redis": f"{redis_url}?prefix={name}",
        "rediss": f"rediss://:{login}@127.0.0.1:{ports_in_tls['rediss']}/0?prefix={name}&ca={authority}",
        "azure-table": "azure-table://?connection=env:CONNECTION",
        "azure-queues": "azure-queues://?connection=env:CONNECTION",
    }
    queues = [f"{name}.timeouts", f"{name}.error", f"{name}.orders"]
    drops: dict[str, Callable[[], None]] = {
        "postgresql": lambda: _drop_schema(postgres_url, name),
        "mariadb": lambda: _drop_database(mariadb_url, name),
        "amqp": lambda: _delete_queues(rabbitmq_url, queues),
        "redis": lambda: _drop_prefix(redis_url, name),
        "azure-table": lambda: drop_table(azurite_connection, default_table(name)),
        "azure-queues": lambda: _drop_azure_queues(azurite_connection, name),
    }
    drops |= {"mysql": drops["mariadb"], "amqps": drops["amqp"], "rediss": drops["redis"]}
    made = Places(name, addresses, drops)
    yield made
    made.drop()


def _drop_prefix(url: str, prefix: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.delete(*client.scan_iter(f"{{{prefix}}}*"))


def _drop_azure_queues(connection: str, prefix: str) -> None:
    with QueueServiceClient.from_connection_string(connection) as queues:
        for queue in queues.list_queues(name_starts_with=prefix):
            queues.delete_queue(queue)


# --- services ---------------------------------------------------------------------------------------------------------


class Forks:
    """Services, each a process of its own, that is forked from one which has its imports behind it."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, FORKED], stdin=pipe, stdout=pipe, text=True)

    def _order(self, order: dict[str, object]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(self, folder: Path, *arguments: str) -> int:
        """Run ``postdate`` in the environment that is set now; return the number of its process."""
        return self._order({"arguments": arguments, "folder": str(folder), "environment": dict(os.environ)})

    def end(self, pid: int) -> int:
        """Return the exit code of a process that is about to end."""
        return self._order({"wait": pid})

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


# --- the table --------------------------------------------------------------------------------------------------------


def of_looks(cli, *arguments: str) -> bool:
    """Return whether a command works that looks into queues; where they cannot be looked into, it must say that."""
    ran = cli(*arguments, "--json")
    assert ran.status == 0 or (ran.status == 2 and "[not_supported]" in ran.err), ran
    return ran.status == 0


def waiting(cli) -> set[str]:
    return {each["message_id"] for each in cli.ok("messages", "list", "--json").json["messages"]}


@pytest.mark.parametrize(
    ("store", "queues"),
    [pytest.param(*pair, id=" and ".join(pair), marks=[] if pair in IN_GATE else [_ONCE_MORE]) for pair in PAIRS],
)
def test_every_command_works_with_every_store_and_all_queues(
    cli, own_folder, monkeypatch, eventually, places, forks, store, queues
):
    """To bring the page up to date, put the line that this test prints into its table."""
    for name, value in places.variables(store, queues).items():
        monkeypatch.setenv(f"POSTDATE_{name}", value)
    orders = f"{places.name}.orders"
    done = dict.fromkeys(COLUMNS, "yes")

    cli.ok("setup", "--queue", orders)
    pid = forks.start(own_folder, "run", "--no-setup")
    log = own_folder / "log"
    begun = re.compile(f"{READY}|^postdate: error", re.MULTILINE)
    eventually(lambda: log.exists() and begun.search(log.read_text()), "the service has begun, or says why not")
    assert READY in log.read_text(), log.read_text()

    cli.ok("send", orders, "at once")
    for message_id, queue in (("m1", orders), ("m2", "nowhere"), ("m3", orders)):
        cli.ok("send", queue, "x", "--delay", "1h", "--id", message_id)
    eventually(lambda: waiting(cli) == {"m1", "m2", "m3"}, "all are stored")
    for message_id in ("m1", "m2"):
        cli.ok("messages", "reschedule", message_id, "--delay", "0s")
    eventually(lambda: waiting(cli) == {"m3"}, "what is due has left")
    assert [kinds(cli, each)[-1] for each in ("m1", "m2")] == ["delivered", "failed"]  # there is no queue for the other
    assert cli.ok("messages", "explain", "m1", "--json").json["state"] in {"in_queue", "delivered"}
    assert cli.ok("messages", "stats", "--json").json["pending"] == 1
    cli.ok("messages", "reschedule", "m3", "--delay", "2h")
    cli.ok("messages", "cancel", "m3")

    cli.ok("messages", "list", "--unreadable")
    if of_looks(cli, "errors", "list"):
        assert [each["message_id"] for each in cli.ok("errors", "list", "--json").json["messages"]] == ["m2"]
        cli.ok("errors", "return", "m2", "--to", orders)
    else:
        done["errors"] = "not into the queue"
    checks = cli("doctor", "--json").json["checks"]
    # The servers of the tests may be set to lose what a power cut would lose.
    assert not [each for each in checks if each["result"] == "fail" and each["name"] not in {"fsync", "durability"}]

    os.kill(pid, 15)
    assert forks.end(pid) == 0
    trouble = re.findall(r".*(?:Traceback| ERROR ).*", log.read_text())
    assert not [line for line in trouble if " m2 " not in line], log.read_text()
    row = f"| `{store}:` | `{queues}:` | {' | '.join(done.values())} |"
    if row not in PAGE.read_text("utf-8"):
        pytest.fail(f"{PAGE.name} must contain\n\n{row}", pytrace=False)


def test_every_address_of_the_page_is_in_a_pair() -> None:
    """But for SQL Server and MSMQ, of which there are none here; and each pair is a row of its table."""
    page = PAGE.read_text("utf-8")
    assert re.findall(r"^\| `([a-z-]+):` \| `([a-z-]+):` \| yes ", page, re.MULTILINE) == PAIRS
    cells = re.findall(r"^\| [^|]+ \| (`[a-z-]+:[^|]*) \|", page, re.MULTILINE)
    schemes = {scheme for cell in cells for scheme in re.findall(r"`([a-z-]+):", cell)}
    assert schemes - {"mssql", "sqlserver", "msmq"} == {scheme for pair in PAIRS for scheme in pair}
