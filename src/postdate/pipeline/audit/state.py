"""What one audit leaves to the next: a position in the records, open messages, and totals. Source: ADR 0062.

A state is a folder, also on a file system of Hadoop::

    commits/7-1f0c…             one row of JSON, written last: position, and which data belong to this version
    data/7-1f0c…/open           facts of the messages that may change without a later record
    data/7-1f0c…/settled        facts and verdicts of the messages that have ended in this run
    data/7-1f0c…/totals, curve  sums over all settled messages, of this and all earlier runs
    data/7-1f0c…/places         what is known of destinations

The data of a run are in a folder of its own, and count from the moment when its commit is there. Spark moves the one
file of a commit into place in one step. So a run that is killed at any point changes nothing, and a record counts once:
the position and everything that was derived from the records before it are one commit.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.errors import PipelineError
from postdate.pipeline.audit.judging import FACTS, describe_messages, find_places, judge_messages, merge_facts
from postdate.pipeline.audit.reading import checkpoint_frame
from postdate.pipeline.audit.summaries import COUNTS
from postdate.pipeline.audit.totals import count_curve, count_totals, merge_curves, merge_totals
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.outputs import url_of
from postdate.pipeline.source.streaming import LastRecord, find_restore, last_record_of, read_last_record
from postdate.ports.scanning import RecordStreamStore

CURVE_SECONDS = 60
"""Length of one interval of the curve that a state carries on."""

_KEY = ["endpoint", "message_id"]
_VERDICT = ("destination", "due", "delivered_at", "late_microseconds", *COUNTS)
_PREFIX = "verdict_"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Commit:
    """One version of a state.

    Args:
        version: 0 before the first audit.
        identity: of the store.
        location: of the store, for people.
        position: number of the first record that was not read.
        last: the last record that was read.
        as_of: instant of the audit, ISO 8601.
        began: instant of the first audit with this state, ISO 8601.
        folder: name of the folder with the data of this version.
        settled: names of the folders with settled messages, oldest first.
        late_after_seconds: how late a delivery may be; ``None``: unknown.
    """

    version: int = 0
    identity: str = ""
    location: str = ""
    position: int = 0
    as_of: str = ""
    began: str = ""
    folder: str = ""
    settled: tuple[str, ...] = ()
    last: LastRecord = None
    late_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """Judged messages of one run, and what is carried on.

    Args:
        verdicts: of the messages with new records, and of those that had not ended.
        totals: of all messages since the state began.
        curve: of all messages since the state began.
        next_state: frames to write, by the name of their folders.
    """

    verdicts: DataFrame
    totals: DataFrame
    curve: DataFrame
    next_state: dict[str, DataFrame]


class AuditState:
    """A state in a folder. It is read when it is opened, and written by :meth:`commit`."""

    def __init__(self, spark: SparkSession, location: str | Path) -> None:
        self.spark = spark
        self.location = str(location)
        if "://" not in self.location:
            self.location = str(Path(self.location).expanduser().absolute())
        self._url = url_of(location)
        """The location as Spark takes it, also where Spark's default file system is another."""
        self.commit_read = self._read_commit()

    def check(self, stream: RecordStreamStore, late_after: timedelta) -> None:
        """Raise PipelineError if the state cannot be carried on.

        It is of another store or of another ``late_after``, or the store was restored or lost records since.
        """
        before = self.commit_read
        if before.late_after_seconds not in (None, late_after.total_seconds()):
            raise PipelineError(
                f"the state in {self.location} counts deliveries that were later than {before.late_after_seconds:g} s, "
                f"not {late_after.total_seconds():g} s; give --late-after {before.late_after_seconds:g}s, or a new "
                f"folder"
            )
        if before.version and before.identity != stream.identity:
            raise PipelineError(
                f"the state in {self.location} is of another store ({before.location}) than the one to audit "
                f"({stream.location}), or the store was made anew or restored since; name that store, or a new folder"
            )
        if restore := find_restore(stream, before.position, before.last):
            raise PipelineError(
                f"the state in {self.location} has the records of {stream.location} up to number "
                f"{before.position - 1}, and {restore}: the store was made anew, restored, or its records were "
                f"removed; name a new folder"
            )

    def read(self, name: str) -> DataFrame | None:
        """Return a frame of the version that was read; ``None`` before the first."""
        return None if not self.commit_read.version else self.spark.read.parquet(self._path(name))

    def read_settled(self) -> DataFrame | None:
        """Return all settled messages, each as often as it was settled, with the ``run`` in which that was."""
        frames = [
            self.spark.read.parquet(f"{self._url}/data/{folder}/settled").withColumn("run", F.lit(number))
            for number, folder in enumerate(self.commit_read.settled)
        ]
        return reduce(lambda one, other: one.unionByName(other), frames) if frames else None

    def commit(self, frames: dict[str, DataFrame], stream: RecordStreamStore, *, position: int, judge: Judge) -> None:
        """Write the next version. Until the last step, the version that was read stays the present one."""
        before = self.commit_read
        folder = f"{before.version + 1}-{uuid.uuid4().hex[:12]}"
        for name, frame in frames.items():
            frame.write.parquet(f"{self._url}/data/{folder}/{name}")
        as_of = judge.as_of.isoformat()
        after = Commit(
            before.version + 1, stream.identity, stream.location, position, as_of, before.began or as_of, folder,
            (*before.settled, folder), read_last_record(stream, position) or before.last,
            judge.late_after.total_seconds(),
        )  # fmt: skip
        row = self.spark.createDataFrame([(json.dumps({"format": _FORMAT, **asdict(after)}),)], "value string")
        # The folder has a name of its own, because a run that was killed here has left one, which stays empty.
        row.coalesce(1).write.text(f"{self._url}/commits/{folder}")
        self._remove_old_data(after)

    def _path(self, name: str) -> str:
        return f"{self._url}/data/{self.commit_read.folder}/{name}"

    def _read_commit(self) -> Commit:
        if "://" not in self.location:
            self._check_folder()
        with shorten_errors(f"the state in {self.location} cannot be read"):
            rows = self._read_rows()
        commits = list[Commit]()
        for row in rows:
            values: dict[str, Any] = json.loads(row["value"])
            if (written := values.pop("format")) != _FORMAT:
                raise PipelineError(f"the state in {self.location} has format {written}, and this version {_FORMAT}")
            values |= {"settled": tuple(values["settled"]), "last": last_record_of(values)}
            commits.append(Commit(**values))
        # Of two audits that ran at once, one counts; each is complete in itself.
        return max(commits, key=lambda each: (each.version, each.folder), default=Commit())

    def _read_rows(self) -> list[Row]:
        try:
            return self.spark.read.text(f"{self._url}/commits/*").collect()
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            return []  # There is no state yet.

    def _check_folder(self) -> None:
        folder = Path(self.location)
        if not folder.parent.is_dir():
            raise PipelineError(f"there is no folder {folder.parent} for the state")
        if folder.exists() and any(each.name not in {"data", "commits"} for each in folder.iterdir()):
            raise PipelineError(f"{folder} is not the folder of an audit's state; name a new folder")

    def _remove_old_data(self, present: Commit) -> None:
        """Remove commits and data of earlier versions, and of runs that were killed. Settled messages stay.

        Only in a local folder; elsewhere nothing needs it, and the folders may be removed by hand.
        """
        if "://" in self.location:
            return
        for folder in self._former_folders("commits", present):
            shutil.rmtree(folder, ignore_errors=True)  # another audit that ends now may remove it, too
        for folder in self._former_folders("data", present):
            for name in ("open", "totals", "curve", "places") if folder.name in present.settled else ("",):
                shutil.rmtree(folder / name, ignore_errors=True)

    def _former_folders(self, kind: str, present: Commit) -> list[Path]:
        """Return the folders of versions before the present one. A later one is of another audit that runs now."""
        numbers = {each: each.name.partition("-")[0] for each in (Path(self.location) / kind).iterdir()}
        return [each for each, number in numbers.items() if number.isdecimal() and int(number) < present.version]


@dataclass(frozen=True, slots=True)
class Judge:
    """What messages are judged by; see :func:`postdate.pipeline.audit.judging.judge_messages`."""

    as_of: datetime
    late_after: timedelta
    pruned_before: datetime | None


def judge_since(
    state: AuditState,
    facts: tuple[DataFrame, DataFrame],
    judge: Judge,
    exclude_pruned: Callable[[DataFrame], DataFrame | None],
) -> Judged:
    """Judge the messages with new facts and those that had not ended; carry the others on as sums.

    A message is *settled* when it has ended, and nothing about it depends on the present: it does not wait, is in no
    queue of the store's database and not in the error queue, and is not lost. If a record of a settled message comes
    later, the message is taken out of the totals, judged again, and counted again.

    Args:
        state: what the last audit left.
        facts: of the records since the position, which no later audit reads again; and of what holds only now.
        judge: what to judge by.
        exclude_pruned: see :func:`postdate.pipeline.audit.reading.exclude_pruned`.
    """
    new, present = facts[0], checkpoint_frame(facts[1])
    final = new if (carried := state.read("open")) is None else new.unionByName(carried)
    merged = checkpoint_frame(merge_facts(final.unionByName(present)))
    reopened = _find_settled(state, merged.where("scheduled = 0").select(*_KEY))
    if reopened is not None:
        final = final.unionByName(reopened.select(*_KEY, *FACTS))
        merged = checkpoint_frame(merge_facts(merged.unionByName(reopened.select(*_KEY, *FACTS))))
    messages = describe_messages(merged.withColumn("facts", F.struct(*FACTS)))
    places = find_places(messages)
    if (carried_places := state.read("places")) is not None:
        places = places.unionByName(carried_places).groupBy("endpoint", "destination")
        places = places.agg(F.max("recording").alias("recording"), F.max("fed").alias("fed"))
    places = checkpoint_frame(places)
    verdicts = checkpoint_frame(
        judge_messages(
            messages, judge.as_of, judge.late_after, judge.pruned_before, places=places, keep=("facts", "is_present")
        )
    )
    # With a state that is carried on, the judge knows what was removed since. A lost message of before stays lost,
    # although retention may have removed its records meanwhile.
    if carried is None and (cleared := exclude_pruned(verdicts)) is not None:
        verdicts = checkpoint_frame(cleared)
    is_open = F.col("is_present") | F.col("pending") | F.col("queued") | F.col("failed") | F.col("lost")
    settled = verdicts.where(~is_open)
    # Facts that hold only now are left out, and will be read again.
    open_facts = merge_facts(final.join(present.select(*_KEY), _KEY, "left_semi")).unionByName(
        verdicts.where(is_open & ~F.col("is_present")).select(*_KEY, "facts.*")
    )
    changes = settled.select(*_KEY, *_VERDICT, F.lit(1).alias("weight"))
    if reopened is not None:
        changes = changes.unionByName(reopened.select(*_KEY, *_verdict_columns(), F.lit(-1).alias("weight")))
    totals = checkpoint_frame(_merge(merge_totals, state.read("totals"), count_totals(changes)))
    curve = checkpoint_frame(_merge(_merge_curve, state.read("curve"), count_curve(changes, CURVE_SECONDS)))
    unsettled = verdicts.where(is_open)
    return Judged(
        verdicts=verdicts,
        totals=merge_totals([totals, count_totals(unsettled)]),
        curve=merge_curves([curve, count_curve(unsettled, CURVE_SECONDS)], CURVE_SECONDS),
        next_state={
            "open": open_facts,
            "settled": settled.select(*_KEY, "facts.*", *_renamed_verdict()),
            "totals": totals,
            "curve": curve,
            "places": places,
        },
    )


def _merge_curve(curves: Sequence[DataFrame]) -> DataFrame:
    return merge_curves(curves, CURVE_SECONDS)


def _merge(
    merge: Callable[[Sequence[DataFrame]], DataFrame], carried: DataFrame | None, changes: DataFrame
) -> DataFrame:
    return changes if carried is None else merge([carried, changes])


def _renamed_verdict() -> list[Column]:
    """Return the columns of a verdict under names that are not those of facts."""
    return [F.col(name).alias(f"{_PREFIX}{name}") for name in _VERDICT]


def _verdict_columns() -> list[Column]:
    return [F.col(f"{_PREFIX}{name}").alias(name) for name in _VERDICT]


def _find_settled(state: AuditState, ids: DataFrame) -> DataFrame | None:
    """Return the last facts and verdicts of settled messages among ``ids``; ``None`` if there are none."""
    if ids.isEmpty() or (settled := state.read_settled()) is None:
        return None
    by_message = settled.join(ids, _KEY, "left_semi").groupBy(*_KEY)
    last = by_message.agg(F.max_by(F.struct("*"), "run").alias("last")).select("last.*").drop("run")
    rows = checkpoint_frame(last)
    return None if rows.isEmpty() else rows
