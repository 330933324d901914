"""No statement of a hot path reads more than its batch, whatever lies beside it and whatever the planner was told.

``python -m tests.plans`` prints the same as a table.
"""

from pathlib import Path

import pytest
from tests.plans.meters import Meter
from tests.plans.sites import PLANS, MariaDbSite, PostgresSite, SqliteSite, Statistics, measure
from tests.plans.work import set_up


@pytest.mark.parametrize("plans", PLANS)
@pytest.mark.parametrize("statistics", Statistics, ids=lambda each: each.value)
async def test_no_statement_of_postgres_reads_what_lies_beside(
    postgres_url: str, statistics: Statistics, plans: str
) -> None:
    assert too_many(await measure(PostgresSite(postgres_url, plans), statistics)) == []


@pytest.mark.parametrize("statistics", Statistics, ids=lambda each: each.value)
async def test_no_statement_of_mariadb_reads_what_lies_beside(mariadb_url: str, statistics: Statistics) -> None:
    assert too_many(await measure(MariaDbSite(mariadb_url), statistics)) == []


@pytest.mark.parametrize("statistics", Statistics, ids=lambda each: each.value)
async def test_no_statement_of_sqlite_reads_what_lies_beside(tmp_path: Path, statistics: Statistics) -> None:
    assert too_many(await measure(SqliteSite(tmp_path), statistics)) == []


async def test_limits_of_any_number_of_destinations_are_read_by_one_statement(tmp_path: Path) -> None:
    """So that a server plans it once."""
    site = SqliteSite(tmp_path)
    with site.made():
        async with site.open() as database:
            await set_up(database)
            with site.meter.step("limits"):
                for count in (1, 2, 3, 49, 50, 51, 1):
                    await database.store.load_limits([f"q-{number}" for number in range(count)])
    assert len({each.statement for each in site.meter.measurements if "destination_limit" in each.statement}) == 1


def too_many(meter: Meter) -> list[str]:
    """Return the statements that read more than their batch accounts for, each at its worst, with its plan."""
    assert len(meter.worst()) > 50
    bad = [each for each in meter.worst() if each.rows > meter.most]
    return [f"{each.step}: {each.rows} rows or steps: {each.statement}\n{each.plan}" for each in bad]
