"""What a sweep discards is what the rule of the core says; what has no readable end is sent, and nothing raises."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lapsing_cases import FIRST, Case, answer, cases

from postdate import DelayedMessage, LocalTransport, SqliteStore
from postdate.core.dispatcher import has_lapsed
from postdate.ports.stores import Discarding

SECOND = timedelta(seconds=1)


@given(cases())
def test_what_is_discarded_is_what_the_rule_says(case: Case) -> None:
    assert has_lapsed(case.headers, case.now, case.allowance) == answer(case).lapsed


async def _moved(path: Path, asked: Sequence[Case]) -> dict[str, bool]:
    """Move all of them, each at its own instant; return which were recorded as expired."""
    store, queues = SqliteStore(path, synchronous="normal"), LocalTransport(path, synchronous="normal")
    try:
        await store.setup()
        await queues.create_queues(["orders"])
        expired = dict[str, bool]()
        for number, case in enumerate(asked):
            await store.store(DelayedMessage(f"m-{number}", FIRST, "orders", case.headers), FIRST)
            report = await store.move_due(case.now, 10, discarding=Discarding(case.allowance, has_lapsed), listing=True)
            assert report.moved is not None
            expired |= zip(report.moved.message_ids, report.moved.expired, strict=True)
            assert (report.delivered, report.expired) == (not expired[f"m-{number}"], expired[f"m-{number}"])
        return expired
    finally:
        await store.close()
        await queues.close()


@settings(max_examples=20)
@given(st.lists(cases().filter(lambda case: case.now > FIRST + SECOND), min_size=1, max_size=8))
def test_a_file_discards_in_one_move_what_the_rule_says(asked: list[Case]) -> None:
    with TemporaryDirectory() as folder:
        expired = anyio.run(_moved, Path(folder) / "m.db", asked)
    assert expired == {f"m-{number}": answer(case).lapsed for number, case in enumerate(asked)}
