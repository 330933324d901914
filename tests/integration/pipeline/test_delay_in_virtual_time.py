"""The delay operator in virtual time: where rows wait, and one slot of it against a state in memory."""

import base64
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues
from pyspark.sql.streaming.tws_tester import TwsTester

from postdate.clock import SystemClock, to_microseconds
from postdate.errors import PipelineError
from postdate.pipeline.delay import packing
from postdate.pipeline.delay import packing as packing_module
from postdate.pipeline.delay import processor as processor_module
from postdate.pipeline.delay.layout import split_package
from postdate.pipeline.delay.packing import CANCELS, OVERDUE, PackOptions, Wheel, to_content
from postdate.pipeline.delay.processor import DelayProcessor
from postdate.pipeline.delay.slot import CancelOptions
from postdate.pipeline.rows import INSTANT

START_MS = to_microseconds(datetime(2026, 3, 1, 12, tzinfo=UTC)) // 1000
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
YEAR = 365 * DAY
ROWS = pa.schema([("id", pa.string()), ("due", INSTANT)])


# --- the wheel -------------------------------------------------------------------------------------------------------

resolutions = st.integers(10, 60_000)
delays_us = st.integers(1, 7_900 * YEAR * 1000)


@given(resolutions, delays_us)
def test_every_due_time_to_the_year_9999_has_a_place_that_opens_after_now_and_in_time(
    resolution: int, delay_us: int
) -> None:
    wheel = Wheel(resolution)
    due = START_MS * 1000 + delay_us
    place = int(wheel.places(np.array([due]), START_MS)[0])
    timer = wheel.timer_ms(place)
    assert timer > 0
    assert wheel.place_of(timer) == place
    if wheel.level(place) == 0:
        assert 0 <= timer * 1000 - due < resolution * 1000
    else:
        assert START_MS < timer < wheel.start_ms(place) <= due / 1000


@given(resolutions, delays_us)
def test_a_wide_bucket_that_opens_on_time_sends_its_rows_to_lower_levels(resolution: int, delay_us: int) -> None:
    wheel = Wheel(resolution)
    due = START_MS * 1000 + delay_us
    place = int(wheel.places(np.array([due]), START_MS)[0])
    opened = 0
    while level := wheel.level(place):
        opened += 1
        now = wheel.timer_ms(place) + 1
        place = int(wheel.places(np.array([due]), now, below=level)[0])
        assert wheel.level(place) < level
        assert wheel.timer_ms(place) >= now
    assert opened <= wheel.top_level
    assert wheel.timer_ms(place) * 1000 >= due


@given(resolutions, st.integers(128 * SECOND, 7_900 * YEAR), st.integers(0, 10**12))
def test_a_later_timer_opens_the_same_bucket_before_it_begins(resolution: int, delay_ms: int, later_ms: int) -> None:
    wheel = Wheel(resolution)
    place = int(wheel.places(np.array([(START_MS + delay_ms) * 1000]), START_MS)[0])
    if wheel.level(place):
        now = wheel.timer_ms(place) + 1 + later_ms
        later = wheel.later_timer_ms(place, now)
        if later is None:
            assert now > wheel.start_ms(place) - resolution
        else:
            assert wheel.place_of(later) == place
            assert now <= later <= wheel.start_ms(place)


def test_what_is_due_has_no_place_and_a_due_time_before_all_is_due() -> None:
    due = np.array([START_MS * 1000, START_MS * 1000 + 1, packing_module._BEFORE_ALL])
    assert (Wheel(250).places(due, START_MS) == OVERDUE).tolist() == [True, False, True]


@pytest.mark.parametrize("resolution", [0, 9, 60_001])
def test_a_resolution_out_of_bounds_is_refused(resolution: int) -> None:
    with pytest.raises(PipelineError, match="10 to 60000"):
        Wheel(resolution)


# --- one slot in virtual time ----------------------------------------------------------------------------------------


@dataclass
class VirtualStream:
    """Micro-batches of one slot in virtual time. Each has a processor of its own, as in Spark: only the state lasts."""

    resolution_ms: int = 250
    keep_ms: int | None = None
    now_ms: int = START_MS
    executor_ahead_ms: int = 0
    """How far the clock of executors, which pack the rows, is ahead of the time of the micro-batch."""

    shuffled: random.Random | None = None
    """Decides in which order packages arrive: a shuffle has no order. Unchanged by default."""

    gone: list[tuple[str, int, int]] = field(default_factory=list)
    """Id, due time in microseconds, and the micro-batch in which the row went."""

    texts: dict[str, str | None] = field(default_factory=dict)
    """The text of each row that went, by its id."""

    def __post_init__(self) -> None:
        self.cancelling = None if self.keep_ms is None else CancelOptions("id", self.keep_ms)
        self.start_again(ROWS)
        self.handle = TwsTester(self.processor(), timeMode="ProcessingTime").handle

    def start_again(self, schema: pa.Schema) -> None:
        """Let the query start again with other columns."""
        self.packing = PackOptions(Wheel(self.resolution_ms), schema, "due", (0,), "fail", self.keep_ms is not None)

    def processor(self) -> DelayProcessor:
        options = {"cancel": self.cancelling is not None, "due": "due", "id": self.cancelling and "id", "slots": 1}
        columns = ",".join(
            f"{field.name}:{from_arrow_type(field.type).simpleString()}" for field in self.packing.schema
        )
        options |= {"resolution_ms": self.resolution_ms, "columns": f"struct<{columns}>"}
        return pickle.loads(pickle.dumps(DelayProcessor(self.packing, options, self.cancelling)))

    def batch(self, rows: list[tuple[str, int]] | None = None, cancel: list[str] | None = None) -> list[str]:
        """Let some rows (id, due in microseconds) and cancels arrive; return the ids that go."""
        processor, times = self.processor(), TimerValues(self.now_ms, -1)
        processor.init(self.handle)
        self.handle.setGroupingKey(0)
        frames: list[pd.DataFrame] = []
        if rows or cancel:
            packages = [*self.rows(rows or []), *self.cancels(cancel or [])]
            if self.shuffled is not None:
                self.shuffled.shuffle(packages)
            arrived = pd.DataFrame(packages)
            frames += list(processor.handleInputRows((0,), iter([arrived]), times))
        for timer in [at for at in self.handle.listTimers() if at < self.now_ms]:  # what is due at Spark's own "before"
            frames += list(processor.handleExpiredTimer((0,), times, ExpiredTimerInfo(timer)))
            self.handle.deleteTimer(timer)
        gone = [row for frame in frames for content in frame["content"] for row in self.opened(content)]
        self.gone += [(row["id"], to_microseconds(row["due"]), self.now_ms) for row in gone]
        self.texts |= {row["id"]: row.get("text") for row in gone}
        return [row["id"] for row in gone]

    def rows(self, rows: list[tuple[str, int]]) -> Iterator[tuple[Any, ...]]:
        if rows:
            ids, due = zip(*rows, strict=True)
            values: dict[str, pa.Array] = {
                "id": pa.array(ids, pa.string()),
                "due": pa.array(due, pa.int64()).cast(INSTANT),
                "text": pa.array([f"text of {row}" for row in ids], pa.string()),
            }
            batch = pa.RecordBatch.from_pydict({name: values[name] for name in self.packing.schema.names})
            if self.cancelling:
                batch = batch.append_column(packing_module.SLOT, pa.array([0] * len(rows), pa.int32()))
            yield from packing_module._pack_batch(self.packing, batch, 0, self.now_ms + self.executor_ahead_ms)

    def cancels(self, ids: list[str]) -> Iterator[tuple[Any, ...]]:
        if ids:
            yield 0, CANCELS, 0, to_content(pa.RecordBatch.from_pydict({"id": pa.array(ids)}))

    def opened(self, content: bytes) -> list[dict[str, Any]]:
        return packing_module.from_content(content, self.packing.stored_schema).to_pylist()

    def next_timer(self) -> int | None:
        return min(self.handle.listTimers(), default=None)

    def run(self, until_ms: int | None = None) -> None:
        """Go from timer to timer, until none is left or the time has come."""
        while (timer := self.next_timer()) is not None and (until_ms is None or timer < until_ms):
            self.now_ms = max(self.now_ms, timer) + 1
            self.batch()
        self.now_ms = max(self.now_ms, until_ms or 0)

    def size(self, name: str) -> int:
        return len(self.handle.map_states[name]._get_map() or {})


def due_in(milliseconds: float) -> int:
    return round((START_MS + milliseconds) * 1000)


spread_delays = st.one_of(
    st.integers(-DAY, 5 * MINUTE), st.integers(0, DAY), st.integers(0, 400 * DAY), st.integers(0, 100 * YEAR)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(spread_delays, max_size=30), max_size=4), st.sampled_from([10, 250, 60_000]))
def test_each_row_goes_once_and_never_early_however_far_off_it_is(batches: list[list[int]], resolution: int) -> None:
    stream = VirtualStream(resolution_ms=resolution)
    sent: dict[str, int] = {}
    for number, delays in enumerate(batches):
        rows = {f"{number}.{n}": due_in(delay) for n, delay in enumerate(delays)}
        sent |= rows
        stream.batch(list(rows.items()))
        stream.run(until_ms=stream.now_ms + 90 * SECOND)
    stream.run()
    assert Counter(row for row, _, _ in stream.gone) == Counter(sent.keys())
    arrived_late = 4 * 90 * SECOND * 1000
    for row, due, now_ms in stream.gone:
        assert due == sent[row]
        assert now_ms * 1000 >= due
        # One more millisecond: Spark opens timers that are before the micro-batch.
        assert now_ms * 1000 - max(due, START_MS * 1000) <= (resolution + 1) * 1000 + arrived_late
    assert not stream.size("packages")
    assert not stream.size("places")


def test_rows_go_within_one_resolution_of_their_due_time() -> None:
    stream = VirtualStream()
    stream.batch([(f"m{n}", due_in(n * 7_777.7)) for n in range(500)])
    stream.run()
    assert len(stream.gone) == 500
    assert max(now_ms * 1000 - due for _, due, now_ms in stream.gone) <= 251_000


def test_rows_that_are_due_already_go_in_the_micro_batch_that_brings_them() -> None:
    stream = VirtualStream()
    assert sorted(stream.batch([("now", due_in(0)), ("long ago", due_in(-YEAR)), ("soon", due_in(1))])) == [
        "long ago",
        "now",
    ]
    assert not stream.batch()
    stream.run()
    assert stream.gone[-1][0] == "soon"


executor_clocks = st.one_of(st.integers(0, 10 * MINUTE), st.integers(-400 * DAY, 400 * DAY))


@dataclass(frozen=True)
class Arrival:
    """What one micro-batch brings: rows (id, delay in milliseconds), ids to cancel; and the time until the next."""

    rows: list[tuple[str, int]]
    cancels: list[str]
    pause_ms: int


ids = st.sampled_from("abcdefgh")
arrivals = st.lists(
    st.builds(
        Arrival,
        st.lists(st.tuples(ids, spread_delays), max_size=20),
        st.lists(ids, max_size=3),
        st.integers(1, 10 * MINUTE),
    ),
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(arrivals, executor_clocks, st.sampled_from([None, 0, HOUR]))
def test_each_micro_batch_gives_the_same_rows_whatever_the_executors_clocks_show(
    arriving: list[Arrival], ahead_ms: int, keep_ms: int | None
) -> None:
    """A repeated micro-batch has its rows, its state and its time in common with the first attempt, and no clock.

    A sink that takes each batch id once, as Spark documents for ``foreachBatch``, would else have rows twice or never.
    """
    first, again = VirtualStream(keep_ms=keep_ms), VirtualStream(keep_ms=keep_ms, executor_ahead_ms=ahead_ms)
    for arrival in arriving:
        for stream in (first, again):
            rows = [(row, stream.now_ms * 1_000 + delay_ms * 1_000) for row, delay_ms in arrival.rows]
            stream.batch(rows, arrival.cancels if keep_ms is not None else [])
            stream.now_ms += arrival.pause_ms
    for stream in (first, again):
        stream.run()
    assert Counter(first.gone) == Counter(again.gone)


@settings(max_examples=25, deadline=None)
@given(arrivals, st.randoms(use_true_random=False), st.sampled_from([None, 0, HOUR]))
def test_each_micro_batch_gives_the_same_rows_in_whatever_order_packages_arrive(
    arriving: list[Arrival], order: random.Random, keep_ms: int | None
) -> None:
    """Spark sorts packages by slot after a shuffle, so an attempt may see those of one slot in any order."""
    first, again = VirtualStream(keep_ms=keep_ms), VirtualStream(keep_ms=keep_ms, shuffled=order)
    for arrival in arriving:
        for stream in (first, again):
            rows = [(row, stream.now_ms * 1_000 + delay_ms * 1_000) for row, delay_ms in arrival.rows]
            stream.batch(rows, arrival.cancels if keep_ms is not None else [])
            stream.now_ms += arrival.pause_ms
    for stream in (first, again):
        stream.run()
    assert Counter(first.gone) == Counter(again.gone)


def test_nothing_in_a_processor_reads_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the micro-batch is the only one: any other would differ when the micro-batch is repeated."""

    def refuse(_self: SystemClock) -> datetime:
        raise AssertionError("a processor has read the clock")

    monkeypatch.setattr(SystemClock, "now", refuse)
    for stream in (VirtualStream(), VirtualStream(keep_ms=HOUR)):
        stream.batch([("a", due_in(-1)), ("b", due_in(DAY)), ("c", due_in(100 * DAY))], ["a"] if stream.keep_ms else [])
        stream.run()
        assert {row for row, _, _ in stream.gone} == ({"b", "c"} if stream.keep_ms else {"a", "b", "c"})


def test_a_row_that_is_due_by_the_executors_clock_only_waits_for_the_drivers() -> None:
    stream = VirtualStream(executor_ahead_ms=10 * SECOND)
    assert not stream.batch([("m", due_in(5_000))])
    stream.run()
    assert [(row, now_ms) for row, _, now_ms in stream.gone] == [("m", START_MS + 5_001)]


def test_rows_that_are_overdue_do_not_wait_for_those_that_fell_due_before_the_micro_batch_was_repeated() -> None:
    stream = VirtualStream(executor_ahead_ms=5 * MINUTE)
    rows = [("overdue", due_in(-5 * SECOND)), ("due meanwhile", due_in(MINUTE)), ("later", due_in(HOUR))]
    assert stream.batch(rows) == ["overdue"]
    stream.run()
    assert [row for row, _, _ in stream.gone] == ["overdue", "due meanwhile", "later"]


def test_a_row_is_cancelled_by_its_own_micro_batch_though_the_executor_packed_it_later() -> None:
    stream = VirtualStream(keep_ms=0, executor_ahead_ms=HOUR)
    assert stream.batch([("a", due_in(0)), ("b", due_in(0))], cancel=["a"]) == ["b"]


def test_a_herd_that_is_due_at_one_instant_goes_at_once() -> None:
    stream = VirtualStream()
    stream.batch([(f"m{n}", due_in(MINUTE)) for n in range(50_000)])
    stream.run()
    assert {now_ms for _, _, now_ms in stream.gone} == {START_MS + MINUTE + 1}
    assert len({row for row, _, _ in stream.gone}) == len(stream.gone) == 50_000


def test_a_large_load_makes_few_packages() -> None:
    stream = VirtualStream()
    stream.batch([(f"m{n}", due_in(n * 30 * DAY / 100_000)) for n in range(100_000)])
    assert stream.size("packages") < 1_000


def test_rows_that_trickle_in_are_merged() -> None:
    stream = VirtualStream()
    for n in range(640):
        stream.now_ms += 1
        stream.batch([(f"m{n}", due_in(100 * DAY + n))])
    assert stream.size("packages") <= 10 + 64
    stream.run()
    assert len({row for row, _, _ in stream.gone}) == len(stream.gone) == 640


def test_a_wide_bucket_is_taken_apart_in_several_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_module, "ROWS_SPREAD", 100)
    monkeypatch.setattr(processor_module, "_MERGED_PACKAGES", 1_000)
    stream = VirtualStream()
    for n in range(500):
        stream.batch([(f"m{n}", due_in(10 * MINUTE + n))])
    wide = int(stream.packing.wheel.places(np.array([due_in(10 * MINUTE)]), START_MS)[0])
    batches = 0
    while stream.handle.map_states["places"].containsKey((wide,)):
        stream.now_ms = max(stream.now_ms, stream.next_timer() or 0) + 1
        stream.batch()
        batches += 1
    assert batches == 5
    assert stream.now_ms < stream.packing.wheel.start_ms(wide)
    stream.run()
    assert len({row for row, _, _ in stream.gone}) == len(stream.gone) == 500
    assert max(now_ms * 1000 - due for _, due, now_ms in stream.gone) <= 251_000


def test_rows_go_in_one_micro_batch_after_an_outage() -> None:
    stream = VirtualStream()
    stream.batch([(f"m{n}", due_in(n * MINUTE)) for n in range(1_000)])
    stream.now_ms += 30 * DAY
    assert len(stream.batch()) == 999
    assert len({row for row, _, _ in stream.gone}) == 1_000


# --- cancels in virtual time -----------------------------------------------------------------------------------------


def test_a_cancel_takes_away_all_rows_with_its_id_and_no_others() -> None:
    stream = VirtualStream(keep_ms=HOUR)
    stream.batch([("a", due_in(MINUTE)), ("b", due_in(MINUTE)), ("a", due_in(DAY)), ("c", due_in(DAY))])
    stream.now_ms += SECOND
    stream.batch(cancel=["a", "unknown"])
    stream.run()
    assert sorted(row for row, _, _ in stream.gone) == ["b", "c"]


def test_a_cancel_of_the_same_micro_batch_wins() -> None:
    stream = VirtualStream(keep_ms=0)
    assert stream.batch(
        [("due", due_in(0)), ("stays", due_in(0)), ("waits", due_in(DAY))], cancel=["due", "waits"]
    ) == ["stays"]
    stream.run()
    assert [row for row, _, _ in stream.gone] == ["stays"]


def test_a_cancel_before_its_row_is_kept_for_so_long() -> None:
    stream = VirtualStream(keep_ms=HOUR)
    stream.batch(cancel=["a", "b"])
    stream.now_ms += HOUR
    stream.batch([("a", due_in(2 * HOUR))])
    stream.now_ms += 1
    stream.batch([("b", due_in(2 * HOUR))])
    stream.run()
    assert [row for row, _, _ in stream.gone] == ["b"]


def test_a_cancel_works_as_long_as_what_it_cancels_waits_and_is_forgotten_then() -> None:
    stream = VirtualStream(keep_ms=HOUR)
    stream.batch([("a", due_in(300 * DAY)), ("b", due_in(DAY))])
    stream.batch(cancel=["a"])
    stream.run(until_ms=START_MS + 200 * DAY)
    stream.batch([("a", due_in(201 * DAY))])  # came after keep_ms: another row of the same id
    stream.run()
    assert sorted(row for row, _, _ in stream.gone) == ["a", "b"]
    assert stream.size("cancelled") == 1
    stream.now_ms = START_MS + 300 * DAY
    for _ in range(3):
        stream.now_ms += SECOND
        stream.batch([("later", stream.now_ms * 1000)])
    assert not stream.size("cancelled")
    came = len(stream.gone)
    stream.batch([("c", due_in(301 * DAY)), ("d", due_in(301 * DAY))])
    stream.batch(cancel=["c"])  # the first one after all others were forgotten
    stream.now_ms += SECOND
    stream.batch(cancel=["d"])
    stream.run()
    assert len(stream.gone) == came


def test_a_cancel_after_its_row_went_changes_nothing() -> None:
    stream = VirtualStream(keep_ms=0)
    stream.batch([("a", due_in(0))])
    stream.now_ms += 1
    stream.batch(cancel=["a"])
    stream.now_ms += 1
    stream.batch([("a", due_in(SECOND))])
    stream.run()
    assert [row for row, _, _ in stream.gone] == ["a", "a"]


def test_an_outage_does_not_forget_cancels_before_their_rows() -> None:
    stream = VirtualStream(keep_ms=0)
    stream.batch([("a", due_in(MINUTE)), ("b", due_in(MINUTE))])
    stream.batch(cancel=["a"])
    stream.now_ms += DAY
    assert stream.batch([("c", due_in(0))]) == ["c", "b"]


def test_thousands_of_cancels_lie_in_few_values() -> None:
    stream = VirtualStream(keep_ms=HOUR)
    stream.batch([(f"m{n}", due_in(2 * HOUR)) for n in range(20_000)])
    for start in range(0, 20_000, 500):
        stream.batch(cancel=[f"m{n}" for n in range(start, start + 500) if n % 10])
    assert stream.size("cancelled") <= 6
    stream.run()
    assert sorted(row for row, _, _ in stream.gone) == sorted(f"m{n}" for n in range(0, 20_000, 10))


def test_a_part_of_a_task_that_keeps_nothing_makes_no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_GATHERED_ROWS", 1)
    batches = [
        pa.record_batch({"id": pa.array(ids, pa.string()), "slot": pa.array([0], pa.int32())})
        for ids in (["a"], [None])
    ]
    first, second = packing.pack_cancels([7], iter(batches))
    assert (first.num_rows, second.num_rows) == (2, 0)


# --- other columns while rows wait -----------------------------------------------------------------------------------

WITH_TEXT = ROWS.append(pa.field("text", pa.string()))
OTHER_ORDER = pa.schema([WITH_TEXT.field("text"), ROWS.field("due"), ROWS.field("id")])


def write_first_format(stream: VirtualStream) -> None:
    """Change the state into that of commit d39629d4, which had one set of columns, and packages without a number."""
    slot, packages = stream.handle.value_states["slot"], stream.handle.map_states["packages"]
    row = slot.get()
    assert row is not None
    text, *others = row
    content = json.loads(text)
    (encoded,) = content.pop("schemas")
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded)))
    columns = ",".join(f"{field.name}:{from_arrow_type(field.type).simpleString()}" for field in schema)
    first = {name: content[name] for name in ("cancel", "due", "id", "resolution_ms", "slots")}
    slot.update((json.dumps({**first, "columns": f"struct<{columns}>"}), *others))
    for key, (package,) in list(packages.iterator()):
        packages.updateValue(key, (split_package(package)[1],))


@pytest.mark.parametrize("first_format", [False, True])
@pytest.mark.parametrize("keep_ms", [None, HOUR])
def test_rows_that_wait_go_with_nulls_in_a_column_that_was_added(keep_ms: int | None, *, first_format: bool) -> None:
    stream = VirtualStream(keep_ms=keep_ms)
    stream.batch([("old", due_in(MINUTE)), ("far", due_in(400 * DAY)), ("gone", due_in(DAY))])
    if first_format:
        write_first_format(stream)
    stream.start_again(WITH_TEXT)
    stream.now_ms += SECOND
    stream.batch([("new", due_in(MINUTE))], cancel=["gone"] if keep_ms else None)
    stream.run()
    assert sorted(stream.gone) == sorted(
        [
            ("old", due_in(MINUTE), START_MS + MINUTE + 1),
            ("new", due_in(MINUTE), START_MS + MINUTE + 1),
            ("far", due_in(400 * DAY), START_MS + 400 * DAY + 1),
            *([] if keep_ms else [("gone", due_in(DAY), START_MS + DAY + 1)]),
        ]
    )
    assert stream.texts == {"old": None, "new": "text of new", "far": None} | ({} if keep_ms else {"gone": None})


@pytest.mark.parametrize("first_format", [False, True])
def test_rows_that_wait_go_with_columns_in_another_order(*, first_format: bool) -> None:
    stream = VirtualStream()
    stream.start_again(WITH_TEXT)
    stream.batch([("old", due_in(MINUTE)), ("far", due_in(400 * DAY))])
    if first_format:
        write_first_format(stream)
    stream.start_again(OTHER_ORDER)
    stream.batch([("new", due_in(DAY))])
    stream.start_again(WITH_TEXT)
    stream.run()
    assert [row for row, _, _ in stream.gone] == ["old", "new", "far"]
    assert stream.texts == {name: f"text of {name}" for name in ("old", "new", "far")}


def test_packages_of_different_columns_are_merged_in_one_bucket() -> None:
    stream = VirtualStream()
    for n in range(640):
        stream.now_ms += 1
        stream.start_again(WITH_TEXT if n >= 100 else ROWS)
        stream.batch([(f"m{n}", due_in(100 * DAY + n))])
    assert stream.size("packages") <= 10 + 64
    stream.run()
    assert stream.texts == {f"m{n}": f"text of m{n}" if n >= 100 else None for n in range(640)}
    assert len(stream.gone) == 640


@pytest.mark.parametrize("first_format", [False, True])
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (ROWS, "'text'|columns was 'struct<id:string,due:timestamp,text:string>' and is 'struct<id:string,due:times"),
        (pa.schema([*ROWS, pa.field("text", pa.int64())]), "'text' was string and is int64|columns was .*text:bigint"),
    ],
)
def test_a_column_that_was_removed_or_has_another_type_is_refused_and_loses_nothing(
    schema: pa.Schema, message: str, *, first_format: bool
) -> None:
    stream = VirtualStream()
    stream.start_again(WITH_TEXT)
    stream.batch([("old", due_in(MINUTE))])
    if first_format:
        write_first_format(stream)
    stream.start_again(schema)
    stream.now_ms += HOUR
    with pytest.raises(PipelineError, match=message):
        stream.batch()
    stream.start_again(WITH_TEXT)
    assert stream.batch() == ["old"]
    assert stream.texts == {"old": "text of old"}


def test_a_column_that_cannot_be_null_is_not_added_and_none_becomes_so() -> None:
    stream = VirtualStream()
    stream.batch([("old", due_in(MINUTE))])
    for schema, message in (
        (ROWS.append(pa.field("text", pa.string(), nullable=False)), "new column 'text' cannot be null"),
        (pa.schema([pa.field("id", pa.string(), nullable=False), ROWS.field("due")]), "'id' could be null"),
    ):
        stream.start_again(schema)
        with pytest.raises(PipelineError, match=message):
            stream.batch([("new", due_in(MINUTE))])


def test_state_of_a_newer_version_is_refused() -> None:
    stream = VirtualStream()
    stream.batch([("old", due_in(MINUTE))])
    slot = stream.handle.value_states["slot"]
    row = slot.get()
    assert row is not None
    text, *others = row
    slot.update((json.dumps({**json.loads(text), "format": 3}), *others))
    with pytest.raises(PipelineError, match=r"newer version of Postdate \(format 3\)"):
        stream.batch([("new", due_in(MINUTE))])
