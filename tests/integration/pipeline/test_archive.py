"""An archive takes what is over, loses nothing at any moment at which it is cut off, and gives everything back."""

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyspark.sql import SparkSession

from postdate.backends.sqlite.store import SqliteStore
from postdate.backends.sqlite.transport import LocalTransport
from postdate.errors import DuplicateMessage, PipelineError
from postdate.messages import DelayedMessage
from postdate.pipeline.archive import ArchiveResult, archive, restore
from postdate.pipeline.archive.folder import ArchiveFolder
from postdate.pipeline.archive.job import _Run
from postdate.pipeline.audit import audit
from postdate.pipeline.stores import StoreSpec
from postdate.ports import Outcome

START = datetime(2026, 3, 1, 22, tzinfo=UTC)
NOW = START + timedelta(days=40)
BEFORE = START + timedelta(days=30)
# What has ended by then: delivered and handled, delivered to a receiver that records nothing, expired, cancelled.
OVER = {*(f"on-time-{n}" for n in range(4)), "mail", "expires", "cancelled"}
NOT_OVER = {"in-queue", "fails", "waits", "late", "last"}


class Cut(BaseException):
    """A run ends here, as if it had been killed: nobody handles it."""


def hours(number: float) -> datetime:
    return START + timedelta(hours=number)


def live(spec: StoreSpec, story: Callable[[SqliteStore, LocalTransport], Awaitable[None]]) -> None:
    """Tell a story on a store and the queues beside it."""

    async def run() -> None:
        path = spec.address.removeprefix("sqlite:///")
        store = SqliteStore(path, synchronous="normal")
        transport = LocalTransport(path, synchronous="normal")
        try:
            await transport.create_queues(["orders", "mails"])
            await story(store, transport)
        finally:
            await transport.close()
            await store.close()

    anyio.run(run)


async def handle(transport: LocalTransport, queue: str, number: int, at: datetime) -> None:
    receiver = transport.receiver(queue)
    for received in await receiver.receive(number):
        await receiver.commit(received, at)
    await receiver.close()


async def some_days(store: SqliteStore, transport: LocalTransport) -> None:
    """Every way that a message can go, over midnight."""

    def message(name: str, due: datetime, destination: str = "orders", **more: Any) -> DelayedMessage:
        return DelayedMessage(message_id=name, due=due, destination=destination, **more)

    await store.store_many(
        [
            *(message(f"on-time-{n}", hours(n)) for n in range(4)),
            message("mail", hours(0), "elsewhere"),
            message("expires", hours(3), expires_at=hours(4)),
            message("cancelled", hours(50)),
            message("fails", hours(0), "nowhere"),
            message("waits", hours(24 * 300)),
            message("late", hours(24 * 35)),
        ],
        START,
    )
    await store.cancel("cancelled", hours(1))
    await store.move_due(hours(1.5), 100)
    await handle(transport, "orders", 2, hours(1.6))
    await store.move_due(hours(5), 100)
    await handle(transport, "orders", 2, hours(5))
    claims = {claim.message.message_id: claim for claim in await store.claim_due(hours(5), 10)}
    await store.finish([claims["mail"]], Outcome.DELIVERED, hours(5))
    await store.finish([claims["fails"]], Outcome.FAILED, hours(5), "no queue")
    await store.store_many([message("in-queue", hours(6))], hours(5))
    await store.move_due(hours(24 * 36), 100)  # "late" too, and what the day before had left
    await store.store_many([message("last", hours(24 * 400))], hours(24 * 36))


def rows(spec: StoreSpec, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(spec.address.removeprefix("sqlite:///"))) as connection:
        return connection.execute(sql).fetchall()


ALL_RECORDS = "SELECT seq, kind, message_id, at, due, destination, detail FROM record ORDER BY seq"


def run_archive(spark: SparkSession, store: StoreSpec, to: Path, **more: Any) -> ArchiveResult:
    return archive(spark, store, to, BEFORE, NOW, partitions=2, **more)


def in_archive(spark: SparkSession, to: Path) -> list[tuple[Any, ...]]:
    found = ArchiveFolder(to).read_published(spark).select("number", "kind", "message_id").orderBy("number").collect()
    return [tuple(row) for row in found]


def test_what_is_over_goes_and_what_is_not_stays(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    live(store, some_days)
    before = rows(store, ALL_RECORDS)
    plain = audit(spark, store, NOW)
    result = run_archive(spark, store, tmp_path / "archive")

    theirs = [row for row in before if row[2] in OVER]
    assert (result.messages, result.records, result.ids_kept) == (len(OVER), len(theirs), len(OVER))
    assert result.pruned == len(theirs) - len(OVER)
    assert [row[:1] for row in in_archive(spark, tmp_path / "archive")] == [row[:1] for row in theirs]
    assert {day.day: day.messages for day in result.days} == {"2026-03-01": 3, "2026-03-02": 4}
    assert rows(store, "SELECT DISTINCT detail FROM record WHERE message_id IN ('mail', 'expires')") == [("archived",)]
    assert [row for row in rows(store, ALL_RECORDS) if row[2] not in OVER] == [
        row for row in before if row[2] not in OVER
    ]

    alone = audit(spark, store, NOW)
    assert (alone.is_clean, alone.counts.archived, alone.counts.scheduled) == (True, len(OVER), len(OVER | NOT_OVER))
    whole = audit(spark, store, NOW, records=[tmp_path / "archive"])
    assert (whole.counts, whole.lateness, whole.by_destination) == (
        plain.counts, plain.lateness, plain.by_destination,
    )  # fmt: skip

    again = run_archive(spark, store, tmp_path / "archive")
    assert (again.messages, again.records, again.already_there, again.pruned, again.ids_kept) == (0, 0, 0, 0, 0)


@pytest.mark.soak(
    "five jobs on Spark",
    part="spark",
    proven_by=(
        "tests/integration/test_pruning.py::test_records_go_and_come_back",
        "tests/integration/pipeline/test_archive.py::test_what_was_archived_comes_back_once",
    ),
)
def test_an_archived_id_is_refused_until_it_is_forgotten(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    live(store, some_days)
    run_archive(spark, store, tmp_path / "archive")
    sent_again = DelayedMessage(message_id="mail", due=NOW, destination="orders")

    async def refused(adapter: SqliteStore, _: LocalTransport) -> None:
        with pytest.raises(DuplicateMessage):
            await adapter.store(sent_again, NOW)

    live(store, refused)
    result = run_archive(spark, store, tmp_path / "archive", keep_ids=False)
    assert (result.ids_forgotten, result.ids_kept, result.pruned) == (len(OVER), 0, 0)
    assert not rows(store, "SELECT 1 FROM record WHERE message_id = 'mail'")
    assert audit(spark, store, NOW).counts.scheduled == len(NOT_OVER)

    async def taken(adapter: SqliteStore, _: LocalTransport) -> None:
        await adapter.store(sent_again, NOW)
        await adapter.move_due(NOW + timedelta(seconds=1), 10)

    live(store, taken)
    twice = audit(spark, store, NOW, records=[tmp_path / "archive"])
    assert [(each.name, each.sample) for each in twice.findings if each.name == "duplicated"] == [
        ("duplicated", ("mail",))
    ]


CUTS = {
    "before writing": (_Run, "_write_run"),
    "before verifying": (_Run, "_verify"),
    "before publishing": (ArchiveFolder, "publish"),
    "before pruning": (_Run, "remove_records"),
    "before forgetting": (_Run, "remove_marked_records"),
}


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param(["before publishing", "before pruning", "before forgetting"], id="whatever is left behind"),
        pytest.param(
            list(CUTS),
            id="each step",
            marks=pytest.mark.soak(
                "before the writing nothing is there, and before the verifying what is there before the publishing",
                part="spark",
                proven_by="tests/integration/pipeline/test_archive.py::test_a_run_that_is_cut_off_is_made_good_by_the_next",
            ),
        ),
    ],
)
def test_a_run_that_is_cut_off_is_made_good_by_the_next(
    spark: SparkSession, store: StoreSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[str]
) -> None:
    """One run after the other is cut off, each a step further on."""
    live(store, some_days)
    before, to = rows(store, ALL_RECORDS), tmp_path / "archive"

    def killed(*_: Any) -> None:
        raise Cut

    for cut in cuts:
        with monkeypatch.context() as patched:
            patched.setattr(*CUTS[cut], killed)
            with pytest.raises(Cut):
                run_archive(spark, store, to, keep_ids=False)
        if cut != "before forgetting":
            assert rows(store, ALL_RECORDS) == before
    run_archive(spark, store, to, keep_ids=False)
    expected = [row for row in before if row[2] in OVER]
    assert [row[0] for row in in_archive(spark, to)] == [row[0] for row in expected]
    assert rows(store, ALL_RECORDS) == [row for row in before if row[2] not in OVER]
    assert not list(to.glob("_run-*"))


@pytest.mark.soak(
    "six jobs on Spark",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_archive.py::test_a_run_that_is_cut_off_is_made_good_by_the_next",
        "tests/integration/test_pruning.py::test_records_go_and_come_back",
    ),
)
def test_cut_off_half_way_through_publishing_and_pruning(
    spark: SparkSession, store: StoreSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was moved and taken out by then: an audit finds nothing, and the next run does the rest."""
    live(store, some_days)
    before, to = rows(store, ALL_RECORDS), tmp_path / "archive"
    moves = list[Path]()
    rename = Path.rename

    def once(self: Path, target: Path) -> Path:
        if moves:
            raise Cut
        moves.append(target)
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", once)
        with pytest.raises(Cut):
            run_archive(spark, store, to)
    assert moves
    published = in_archive(spark, to)
    assert 0 < len(published) < len([row for row in before if row[2] in OVER])

    change = _Run._change

    def marks_and_then_some(self: _Run, records: Any, what: str) -> int:
        if what == "prune":
            change(self, records.where("message_id < 'n'"), what)
            raise Cut
        return change(self, records, what)

    with monkeypatch.context() as patched:
        patched.setattr(_Run, "_change", marks_and_then_some)
        with pytest.raises(Cut):
            run_archive(spark, store, to)
    half = audit(spark, store, NOW)
    assert (half.is_clean, half.counts.archived) == (True, len(OVER))
    assert rows(store, "SELECT count(*) FROM record WHERE message_id = 'on-time-1'") > [(1,)]

    rest = run_archive(spark, store, to)
    assert (rest.records, rest.ids_kept) == (0, 0)
    assert rest.already_there == rest.pruned > 0
    kept = [row for row in rows(store, ALL_RECORDS) if row[2] in OVER]
    assert [(row[1], row[6]) for row in kept] == [(1, "archived")] * len(OVER)
    assert [row[0] for row in in_archive(spark, to)] == [row[0] for row in before if row[2] in OVER]


@pytest.mark.soak(
    "two runs more on Spark",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_archive.py::test_a_run_that_is_cut_off_is_made_good_by_the_next",
        "tests/integration/test_pruning.py::test_records_go_and_come_back",
    ),
)
def test_a_message_whose_mark_is_missed_is_left_alone(
    spark: SparkSession, store: StoreSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record was somewhere else by then: the next run finds it."""
    live(store, some_days)
    change = _Run._change

    def misses_one(self: _Run, records: Any, what: str) -> int:
        return change(self, records.where("message_id != 'mail'") if what == "mark_archived" else records, what)

    mail = "SELECT * FROM record WHERE message_id = 'mail' ORDER BY seq"
    before = rows(store, mail)
    with monkeypatch.context() as patched:
        patched.setattr(_Run, "_change", misses_one)
        result = run_archive(spark, store, tmp_path / "archive")
    assert (result.messages, result.ids_kept, rows(store, mail)) == (len(OVER), len(OVER) - 1, before)
    rest = run_archive(spark, store, tmp_path / "archive")
    assert (rest.records, rest.pruned, rest.ids_kept) == (0, len(before) - 1, 1)


def test_what_was_written_wrong_is_noticed_before_anything_goes(
    spark: SparkSession, store: StoreSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(store, some_days)
    before = rows(store, ALL_RECORDS)
    write = _Run._write_run

    def write_something_else(self: _Run, fresh: Any, run: Path) -> None:
        write(self, fresh.replace("mails", "males").replace("elsewhere", "somewhere"), run)

    monkeypatch.setattr(_Run, "_write_run", write_something_else)
    with pytest.raises(PipelineError, match="2026-03-02 does not compare"):
        run_archive(spark, store, tmp_path / "archive")
    assert rows(store, ALL_RECORDS) == before
    assert in_archive(spark, tmp_path / "archive") == []


def test_what_was_archived_comes_back_once(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    """Forgotten in the store, in parts: each message comes back with the numbers of its records, and not again."""
    live(store, some_days)
    before, to = rows(store, ALL_RECORDS), tmp_path / "archive"
    run_archive(spark, store, to, keep_ids=False)
    some = restore(spark, store, to, ids=["mail", "on-time-0", "never-there"])
    assert (some.messages, some.left_out) == (2, 0)
    assert [row for row in rows(store, ALL_RECORDS) if row[2] == "mail"] == [row for row in before if row[2] == "mail"]
    one_day = restore(spark, store, to, ended_from=START, ended_to=START + timedelta(hours=2))
    assert (one_day.messages, one_day.left_out) == (2, 1)
    rest = restore(spark, store, to)
    assert (rest.messages, rest.left_out) == (len(OVER) - 4, 4)
    assert rows(store, ALL_RECORDS) == before


@pytest.mark.soak(
    "five jobs on Spark",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_archive.py::test_what_was_archived_comes_back_once",
        "tests/integration/pipeline/test_archive.py::test_a_run_that_is_cut_off_is_made_good_by_the_next",
        "tests/integration/pipeline/test_archive_servers.py::test_out_of_postgresql_and_back",
    ),
)
def test_what_came_back_is_archived_once_and_comes_back_again(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    live(store, some_days)
    before, to = rows(store, ALL_RECORDS), tmp_path / "archive"
    run_archive(spark, store, to)
    assert restore(spark, store, to).messages == len(OVER)
    assert rows(store, ALL_RECORDS) == before
    assert restore(spark, store, to).messages == 0
    assert rows(store, ALL_RECORDS) == before

    run_archive(spark, store, to, keep_ids=False)
    assert [row[0] for row in in_archive(spark, to)] == [row[0] for row in before if row[2] in OVER]
    assert restore(spark, store, to).messages == len(OVER)
    assert rows(store, ALL_RECORDS) == before


def test_what_cannot_be_is_refused_before_any_work(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    live(store, some_days)
    with pytest.raises(PipelineError, match="lies in the future"):
        archive(spark, store, tmp_path / "archive", NOW + timedelta(seconds=1), NOW)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear reader")
    with pytest.raises(PipelineError, match="no archive and not empty"):
        run_archive(spark, store, tmp_path / "full")
    with pytest.raises(PipelineError, match="is no archive"):
        restore(spark, store, tmp_path / "full")
    to, other = tmp_path / "archive", StoreSpec(f"sqlite:///{tmp_path / 'other.db'}", synchronous="normal")
    run_archive(spark, store, to)
    live(other, some_days)
    with pytest.raises(PipelineError, match="give each store an archive of its own"):
        run_archive(spark, other, to)
    with ArchiveFolder(to).lock(), pytest.raises(PipelineError, match="another process is at work"):
        run_archive(spark, store, to)
    with closing(sqlite3.connect(tmp_path / "messages.db")) as connection:
        connection.execute("UPDATE record SET message_id = 'another', detail = NULL WHERE message_id = 'mail'")
        connection.commit()
    with pytest.raises(PipelineError, match="archive of another store"):
        run_archive(spark, store, to)
