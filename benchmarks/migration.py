"""How quickly timeouts move from an upstream table into the PostgreSQL store while the old manager goes on firing them.

    eval "$(scripts/services env)"; .venv/bin/python benchmarks/migration.py [--timeouts 1000000] [--cores 2]
    .venv/bin/python benchmarks/migration.py --timeouts 50000 --kills 20 [--seed 1]

The table is laid out as upstream's SQL persistence does it (specification 4.6). An old manager (a process of its own:
it looks for due ids, reads each, sends it, which here is a row in a table of deliveries, and removes it; 4.7 and 4.8)
and a service on the target run all the while. In the end both deliver everything that is left, and every timeout must
have been delivered once, by one of the two. Rows a second are told beside the limit of the same run: COPY out of the
table of timeouts, and COPY into the tables of the store, one connection, nothing else.

With ``--kills`` the command is killed with -9 at random moments, again and again, and resumed or aborted each time.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import anyio
import psycopg

from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.clock import SystemClock
from postdate.pipeline.stores import StoreSpec, open_spec

ENDPOINT, QUEUE = "billing", "billing"
TABLE = f"{ENDPOINT}_TimeoutData"
COLUMNS = '"Id", "Destination", "SagaId", "State", "Time", "Headers", "PersistenceVersion"'
BODY_BYTES = 200
NEAR_SHARE, NEAR_SECONDS = 0.02, 180
"""So many timeouts become due within the first minutes: some fire at the old manager, some at the new service."""
DUE_AT_ONCE = 1_000
COPIED_AT_ONCE = 20_000
IN_TABLES = {
    "record": "number, at, due, store_id, kind, message_id, destination",
    "content": "number, headers, body",
    "billing.timeouts": "number, due, attempt_at, expires_at, message_id, destination",
}


@dataclass(frozen=True)
class Site:
    """Where it all happens.

    Args:
        url: of the server.
        old: schema of the timeout manager.
        new: schema of the store.
    """

    url: str
    old: str
    new: str

    @property
    def store(self) -> StoreSpec:
        return StoreSpec(self.url, schema=self.new, endpoint=ENDPOINT)

    def connect(self, schema: str, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        connection = psycopg.connect(self.url, autocommit=autocommit)
        connection.execute(f'SET search_path = "{schema}"'.encode())
        if not autocommit:
            connection.commit()
        return connection

    def drop(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for schema in (self.old, self.new, f"{self.new}_limit"):
                connection.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE'.encode())


def fill(site: Site, count: int) -> None:
    """Write timeouts as an upstream endpoint has them; bodies and headers differ in each."""
    headers = {
        "NServiceBus.ContentType": "application/json",
        "NServiceBus.EnclosedMessageTypes": "Billing.Messages.RemindCustomer, Billing.Messages",
        "NServiceBus.IsSagaTimeoutMessage": "True",
        "NServiceBus.OriginatingEndpoint": ENDPOINT,
        "NServiceBus.ReplyToAddress": QUEUE,
        "NServiceBus.SagaType": "Billing.RemindPolicy, Billing",
        "NServiceBus.Timeout.RouteExpiredTimeoutTo": QUEUE,
        "NServiceBus.Version": "7.8.6",
    }
    beginning = json.dumps(headers, separators=(",", ":"))[:-1].replace("'", "''")
    with psycopg.connect(site.url, autocommit=True) as connection:
        connection.execute(f'CREATE SCHEMA "{site.old}"'.encode())
    with site.connect(site.old) as connection:
        connection.execute(
            f"""
            CREATE TABLE "{TABLE}" ("Id" uuid PRIMARY KEY, "Destination" varchar(200), "SagaId" uuid, "State" bytea,
                "Time" timestamp, "Headers" text NOT NULL, "PersistenceVersion" varchar(23) NOT NULL);
            CREATE TABLE delivery (id uuid NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
            INSERT INTO "{TABLE}" SELECT gen_random_uuid(), '{QUEUE}', gen_random_uuid(),
                convert_to(rpad('{{"customer":' || n || ',"note":"', {BODY_BYTES - 2}, 'abcdefghij') || '"}}', 'UTF8'),
                (clock_timestamp() AT TIME ZONE 'UTC') + CASE WHEN random() < {NEAR_SHARE}
                    THEN random() * interval '{NEAR_SECONDS} s' ELSE interval '1 h' + random() * interval '300 d' END,
                '{beginning},"NServiceBus.MessageId":"' || gen_random_uuid() || '"}}', '7.0.0.0'
            FROM generate_series(1, {count}) AS n;
            CREATE INDEX ON "{TABLE}" ("Time");
            CREATE INDEX ON "{TABLE}" ("SagaId");
            CREATE TABLE expected AS
                SELECT "Id" AS id, "Time" AS due, "Headers" AS headers, "State" AS body FROM "{TABLE}";
            """.encode()
        )
        connection.execute(f'VACUUM ANALYZE "{TABLE}"'.encode())


# --- the old manager --------------------------------------------------------------------------------------------------


def old_manager(site: Site, stopping: Event, everything: Event) -> None:
    """Fire what is due, as specification 4.7 and 4.8 have it; once ``everything`` is set, what is not due as well."""
    with site.connect(site.old) as connection:
        while not stopping.is_set():
            found = connection.execute(
                f"""SELECT "Id" FROM "{TABLE}" WHERE "Time" <= (clock_timestamp() AT TIME ZONE 'UTC') + %s
                ORDER BY "Time" LIMIT {DUE_AT_ONCE}""".encode(),
                (timedelta(days=1_000) if everything.is_set() else timedelta(0),),
            ).fetchall()
            for (timeout_id,) in found:
                peeked = connection.execute(
                    f'SELECT "Destination", "State", "Headers" FROM "{TABLE}" WHERE "Id" = %s'.encode(), (timeout_id,)
                ).fetchone()
                if peeked is None:
                    continue
                connection.execute(b"INSERT INTO delivery (id) VALUES (%s)", (timeout_id,))  # sent
                connection.execute(f'DELETE FROM "{TABLE}" WHERE "Id" = %s'.encode(), (timeout_id,))
            if not found:
                if everything.is_set():
                    return
                stopping.wait(1.0)


class Firing:
    """The old manager in a process of its own, and a service of the target in a thread."""

    def __init__(self, site: Site) -> None:
        context = multiprocessing.get_context("spawn")
        self.site = site
        self.stopping, self.everything = context.Event(), context.Event()
        self.manager = context.Process(target=old_manager, args=(site, self.stopping, self.everything))
        self.ending = threading.Event()
        self.service = threading.Thread(target=anyio.run, args=(self._serve,))
        self.failure: BaseException | None = None

    def start(self) -> None:
        self.manager.start()
        self.service.start()

    async def _serve(self) -> None:
        try:
            await self._deliver(SystemClock().now, self.ending)
            # A store of its own, that has not looked yet: this one jumps over a thousand days.
            later = SystemClock().now() + timedelta(days=1_000)
            await self._deliver(lambda: later, self.ending)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the end
            self.failure = error

    async def _deliver(self, now: Callable[[], datetime], ending: threading.Event) -> None:
        store = PostgresStore(self.site.url, schema=self.site.new, table=f"{ENDPOINT}.timeouts")
        try:
            stop_listening = await store.listen(lambda: None)
            while not self.stopping.is_set():
                report = await store.move_due(now(), 10_000)
                if not report.delivered and ending.is_set():
                    break
                if not report.delivered:
                    await anyio.sleep(0.2)
            stop_listening()
        finally:
            await store.close()

    def deliver_everything(self) -> None:
        """Let both deliver what they have, due or not, and end."""
        self.everything.set()
        self.ending.set()
        self.service.join()
        self.manager.join()
        if self.failure is not None:
            raise self.failure
        if self.manager.exitcode:
            raise SystemExit(f"the old manager ended with {self.manager.exitcode}")

    def kill(self) -> None:
        self.stopping.set()
        self.ending.set()
        self.service.join()
        self.manager.join(10)
        self.manager.kill()


# --- counting ---------------------------------------------------------------------------------------------------------


def accounted(site: Site) -> dict[str, int]:
    """Return who delivered how many, and what is wrong: by id, and by content where the new queue has it."""
    new = f'"{site.new}"'
    with site.connect(site.old) as connection:
        row = connection.execute(
            f"""
            WITH new AS (SELECT m.message_id::uuid AS id, m.due, c.headers, c.body
                FROM {new}.queue_message AS m JOIN {new}.content AS c ON c.number = m.content),
            delivered AS (SELECT id FROM delivery UNION ALL SELECT id FROM new),
            times AS (SELECT id, count(*) AS n FROM delivered GROUP BY id)
            SELECT (SELECT count(*) FROM expected), (SELECT count(*) FROM delivery), (SELECT count(*) FROM new),
                (SELECT count(*) FROM expected LEFT JOIN times USING (id) WHERE n IS NULL),
                (SELECT count(*) FROM times WHERE n > 1),
                (SELECT count(*) FROM times LEFT JOIN expected AS e USING (id) WHERE e.id IS NULL),
                (SELECT count(*) FROM new JOIN expected AS e USING (id) WHERE new.body <> e.body
                    OR new.headers::jsonb <> e.headers::jsonb OR new.due <> e.due AT TIME ZONE 'UTC')
            """.encode()
        ).fetchone()
    assert row is not None
    names = ("timeouts", "by_old_manager", "by_new_service", "never", "twice", "unknown", "changed")
    return dict(zip(names, row, strict=True))


def is_right(found: dict[str, int]) -> bool:
    return not any(found[name] for name in ("never", "twice", "unknown", "changed"))


# --- the limit --------------------------------------------------------------------------------------------------------


def copy_out_seconds(site: Site) -> float:
    """Return how long the bare COPY out of the table of timeouts takes."""
    started = time.perf_counter()
    query = f'COPY "{TABLE}" TO STDOUT (FORMAT binary)'.encode()
    with site.connect(site.old) as connection, connection.cursor() as cursor, cursor.copy(query) as copy:
        for _ in copy:
            pass
    return time.perf_counter() - started


def copy_in_seconds(site: Site) -> float:
    """Return how long the bare COPY into the three tables of a fresh store takes, of the same rows."""
    limit = f"{site.new}_limit"
    with open_spec(StoreSpec(site.url, schema=limit, endpoint=ENDPOINT), create=True) as store:
        store.setup()
    seconds = 0.0
    with site.connect(site.new) as old, site.connect(limit) as new, tempfile.TemporaryDirectory() as folder:
        for table, columns in IN_TABLES.items():
            where = " WHERE kind = 1" if table == "record" else ""
            file = Path(folder) / "rows"
            with file.open("wb") as rows, old.cursor() as cursor:
                query = f'COPY (SELECT {columns} FROM "{table}"{where}) TO STDOUT (FORMAT binary)'
                with cursor.copy(query.encode()) as copy:
                    for block in copy:
                        rows.write(block)
            with file.open("rb") as rows, new.cursor() as cursor:
                started = time.perf_counter()
                with cursor.copy(f'COPY "{table}" ({columns}) FROM STDIN (FORMAT binary)'.encode()) as copy:
                    while block := rows.read(1 << 20):
                        copy.write(block)
                seconds += time.perf_counter() - started
    return seconds


# --- the migration ----------------------------------------------------------------------------------------------------


def command(site: Site, settings: Path, verb: str, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "postdate.cli", "pipeline", "migrate", verb),
        *("--config", str(settings), "--from", site.url, "--schema", site.old, "--json", *options),
    ]


def write_settings(site: Site, folder: Path) -> Path:
    settings = folder / "postdate.toml"
    settings.write_text(
        f'[endpoint]\nname = "{ENDPOINT}"\n[store]\naddress = "{site.url}"\nschema = "{site.new}"\n', encoding="utf-8"
    )
    return settings


def measured(site: Site, settings: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Migrate once, undisturbed but for the old manager and the service."""
    out = copy_out_seconds(site)
    firing = Firing(site)
    firing.start()
    try:
        run = command(site, settings, "run", "--all-endpoints", "--cores", str(options.cores))
        run += ["--batch-size", str(options.batch_size)] if options.batch_size else []
        started = time.perf_counter()
        done = subprocess.run(run, stdout=subprocess.PIPE, check=False)
        took = time.perf_counter() - started
        if done.returncode:
            raise SystemExit(f"the migration ended with {done.returncode}: {done.stdout.decode()}")
        report = json.loads(done.stdout)
        into = copy_in_seconds(site)
        firing.deliver_everything()
    finally:
        firing.kill()
    (endpoint,) = report["endpoints"]
    moved, limit = endpoint["moved"], options.timeouts / (out + into)
    return {
        "moved": moved,
        "verified": endpoint["verified"],
        "delivered_meanwhile": endpoint["delivered_meanwhile"],
        "stored_late": endpoint["stored_late"],
        "seconds": round(report["took_seconds"], 2),
        "seconds_with_start_of_spark": round(took, 2),
        "rows_per_second": round(moved / report["took_seconds"]),
        "copy_out_seconds": round(out, 2),
        "copy_in_seconds": round(into, 2),
        "limit_rows_per_second": round(limit),
        "of_limit": round(moved / report["took_seconds"] / limit, 3),
    }


# --- kills ------------------------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    found = list[int]()
    with suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def progress(site: Site) -> tuple[int, int]:
    """Return what changes with every step: how many batches there are, and how far they are together."""
    steps = 'SELECT count(*), coalesce(sum("Status"), 0) FROM "TimeoutsMigration_Batches"'
    with site.connect(site.old) as connection:
        try:
            row = connection.execute(steps.encode()).fetchone()
        except psycopg.errors.UndefinedTable:
            return 0, 0
    assert row is not None
    return row


def run_and_kill(site: Site, arguments: list[str], chance: random.Random) -> tuple[int | None, float, bool]:
    """Start the command and kill it, at most some seconds after its first step; return its end, when, and who died."""
    started, before = time.perf_counter(), progress(site)
    after, everything = chance.choice((0.0, 1.0, 4.0)) * chance.random(), chance.random() < 0.5
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as run:
        stepping = True
        while run.poll() is None and stepping:
            stepping = progress(site) == before
        with suppress(subprocess.TimeoutExpired):
            run.wait(after)
        ended = run.poll()
        if ended is None:
            for pid in [run.pid, *(descendants(run.pid) if everything else [])]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return ended, time.perf_counter() - started, everything


def killed(site: Site, settings: Path, options: argparse.Namespace, chance: random.Random, kills: int) -> Counter[str]:
    """Kill, then resume or abort, again and again until it is done; then let everything be delivered."""
    firing, seen = Firing(site), Counter[str]()
    firing.start()
    small = ("--cores", str(options.cores), "--batch-size", str(options.batch_size or 500))
    verb: tuple[str, ...] = ("run", "--all-endpoints")
    try:
        while True:
            arguments = command(site, settings, *verb, *small)
            if seen["kills"] < kills:
                ended, at, everything = run_and_kill(site, arguments, chance)
            else:
                last = subprocess.run(arguments, stdout=subprocess.DEVNULL, check=False)
                ended, at, everything = last.returncode, 0.0, False
            if ended is not None:
                if ended:
                    raise SystemExit(f"{verb} ended with {ended}")
                break
            print(f"killed after {at:.2f} s, {'with Spark' if everything else 'the driver alone'}", file=sys.stderr)
            seen["kills"] += 1
            seen["with Spark" if everything else "the driver alone"] += 1
            verb = next_step(site, settings, chance, seen)
        firing.deliver_everything()
    finally:
        firing.kill()
    return seen


def next_step(site: Site, settings: Path, chance: random.Random, seen: Counter[str]) -> tuple[str, ...]:
    """Abort now, or not; return what to do next. Half of the time nothing says what is on its way: run does it all."""
    looked = subprocess.run(command(site, settings, "status"), stdout=subprocess.PIPE, check=True)
    going = [run for run in json.loads(looked.stdout)["runs"] if run["status"] in {"preparing", "prepared"}]
    if not going:
        return ("run", "--all-endpoints")
    if chance.random() < 0.4:
        aborted = subprocess.run(command(site, settings, "abort"), stdout=subprocess.PIPE, check=False)
        if aborted.returncode:
            raise SystemExit(f"abort ended with {aborted.returncode}: {aborted.stdout.decode()}")
        seen["aborted"] += 1
        return ("run", "--all-endpoints")
    seen["resumed"] += 1
    return ("resume",) if chance.random() < 0.5 else ("run", "--all-endpoints")


# --- the whole --------------------------------------------------------------------------------------------------------


@contextmanager
def made_site(url: str, count: int) -> Generator[tuple[Site, Path]]:
    site = Site(url, f"migration_old_{os.getpid()}", f"migration_new_{os.getpid()}")
    try:
        fill(site, count)
        with open_spec(site.store, create=True) as store:
            store.setup()
        anyio.run(_make_queue, site)
        with tempfile.TemporaryDirectory() as folder:
            yield site, write_settings(site, Path(folder))
    finally:
        site.drop()


async def _make_queue(site: Site) -> None:
    transport = PostgresTransport(site.url, schema=site.new)
    await transport.create_queues([QUEUE])
    await transport.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--timeouts", type=int, default=1_000_000)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--url", default=os.environ.get("POSTDATE_POSTGRES_URL"))
    options = parser.parse_args()
    if not options.url:
        parser.error("which server? --url, or POSTDATE_POSTGRES_URL")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    if options.kills:
        return killed_often(options, seed)
    with made_site(options.url, options.timeouts) as (site, settings):
        result = measured(site, settings, options)
        found = accounted(site)
    print(json.dumps({**result, "deliveries": found}, indent=2))
    return 0 if is_right(found) else 1


def killed_often(options: argparse.Namespace, seed: int) -> int:
    """Migrate one table after the other until there were so many kills."""
    chance, total, tables = random.Random(seed), Counter[str](), list[dict[str, int]]()
    while total["kills"] < options.kills:
        with made_site(options.url, options.timeouts) as (site, settings):
            total += killed(site, settings, options, chance, options.kills - total["kills"])
            tables.append(accounted(site))
        print(f"{total['kills']} kills: {tables[-1]}", file=sys.stderr)
        if not is_right(tables[-1]):
            break
    print(json.dumps({"seed": seed, **total, "deliveries": tables}, indent=2))
    return 0 if all(map(is_right, tables)) else 1


if __name__ == "__main__":
    sys.exit(main())
