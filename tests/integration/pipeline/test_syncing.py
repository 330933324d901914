"""Messages of a load are changed one by one, on every store that can: a second time, and in any order, nothing more."""

import secrets
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate.errors import PipelineError
from postdate.messages import DelayedMessage, Headers
from postdate.pipeline.rows import to_columns
from postdate.pipeline.stores import OpenStore, StoreSpec, open_spec
from postdate.pipeline.syncing import Changes, change_messages, check_syncable, signatures_of

DUE = datetime(2031, 5, 1, 12, tzinfo=UTC)
LATER = DUE + timedelta(hours=1)


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """A store of each kind that can replace its messages."""
    schema = None
    match request.param:
        case "sqlite":
            spec = StoreSpec(f"sqlite:///{tmp_path / 'messages.db'}", synchronous="normal")
        case "postgres":
            schema = fresh_schema()
            spec = StoreSpec(request.getfixturevalue("postgres_url"), schema=schema)
        case _:
            spec = StoreSpec(request.getfixturevalue("mariadb_url"), table=f"t{secrets.token_hex(6)}")
    with open_spec(spec, create=True) as opened:
        opened.setup()
        yield opened
    if schema is not None:
        drop_schema(spec.address, schema)


@pytest.fixture
def prefix() -> str:
    """Ids of this test alone: servers keep those of others."""
    return secrets.token_hex(6)


def message(message_id: str, load: str | None = "plan") -> DelayedMessage:
    headers = {"é": '"'} if load is None else {"é": '"', Headers.LOAD: load}
    return DelayedMessage(message_id, DUE, "q", headers, b"\0x")


def change(store: OpenStore, messages: list[DelayedMessage], now: datetime, *, dry_run: bool = False) -> Changes:
    return change_messages(store, to_columns(messages), [False] * len(messages), now, dry_run=dry_run)


def test_each_message_is_compared_with_what_waits_at_that_moment(store: OpenStore, prefix: str, now: datetime) -> None:
    """The comparison of the tables found none of these: each was stored by another run since."""
    check_syncable(store)
    names = ("same", "moved", "body", "expiry", "theirs", "free")
    loads = {"theirs": "other", "free": None}
    first = [message(f"{prefix}-{name}", loads.get(name, "plan")) for name in names]
    assert change(store, first, now) == Changes(stored=[0, 1, 2, 3, 4, 5])
    plan = [message(each.message_id) for each in first]
    plan[1] = replace(plan[1], due=LATER)
    plan[2] = replace(plan[2], body=b"other", due=LATER)
    plan[3] = replace(plan[3], expires_at=LATER)
    plan.append(message(f"{prefix}-new"))
    conflicts = {
        4: "the store has this id under the load 'other', and keeps what it has",
        5: "the store has this id without a load, and keeps what it has",
    }
    expected = Changes(stored=[6], unchanged=[0], rescheduled=[1], replaced=[2, 3], conflicts=conflicts)
    assert change(store, plan, now, dry_run=True) == expected
    assert change(store, plan, now) == expected
    again = Changes(unchanged=[0, 1, 2, 3, 6], conflicts=conflicts)
    assert change(store, plan, now) == again
    assert change(store, plan[::-1], now).unchanged == [0, 3, 4, 5, 6]


def test_signatures_differ_in_what_differs() -> None:
    first = message("m")
    others = [
        replace(first, due=LATER),
        replace(first, destination="r"),
        replace(first, expires_at=LATER),
        replace(first, body=b"\0"),
        replace(first, headers={}),
        replace(first, headers={**first.headers, Headers.WALL_TIME: "2031-05-01T14:00:00 Europe/Paris"}),
        replace(first, headers={Headers.LOAD: "plan", "é": ""}),
    ]
    signatures = signatures_of(to_columns([first, *others]))
    assert len(set(signatures)) == len(signatures)
    reordered = replace(first, headers=dict(reversed([*first.headers.items()])))
    assert signatures_of(to_columns([reordered])) == signatures[:1]


def test_a_store_that_cannot_replace_is_refused(redis_url: str) -> None:
    with (
        open_spec(StoreSpec(redis_url, endpoint="syncing-refused")) as store,
        pytest.raises(PipelineError, match="RedisStore cannot be read in bulk"),
    ):
        check_syncable(store)
