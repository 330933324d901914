"""Rows whose ids a store knows: on every store, what differs from what it has is told, and what does not is not."""

import secrets
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate.core.upkeep.wall_times import WallTime
from postdate.messages import DelayedMessage, Headers
from postdate.pipeline.duplicates import find_conflicts, find_duplicate_ids
from postdate.pipeline.rows import to_columns
from postdate.pipeline.stores import OpenStore, StoreSpec, open_spec

DUE = datetime(2031, 5, 1, 12, tzinfo=UTC)
LATER = DUE + timedelta(hours=1)
PARIS = {Headers.WALL_TIME: str(WallTime.parse("2031-05-01T14:00:00", "Europe/Paris"))}


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path, now: datetime) -> Iterator[OpenStore]:
    """A store of each kind: two that are read in bulk, one of columns, and one that is asked for each message."""
    schema = None
    match request.param:
        case "sqlite":
            spec = StoreSpec(f"sqlite:///{tmp_path / 'messages.db'}", synchronous="normal")
        case "postgres":
            schema = fresh_schema()
            spec = StoreSpec(request.getfixturevalue("postgres_url"), schema=schema)
        case "mariadb":
            spec = StoreSpec(request.getfixturevalue("mariadb_url"), table=f"t{secrets.token_hex(6)}")
        case _:
            spec = StoreSpec(request.getfixturevalue("redis_url"), endpoint=f"e{secrets.token_hex(6)}")
    with open_spec(spec, create=True) as opened:
        opened.setup()
        yield opened
    if schema is not None:
        drop_schema(spec.address, schema)


@pytest.fixture
def prefix() -> str:
    """Ids of this test alone: servers keep those of others."""
    return secrets.token_hex(6)


def differences(store: OpenStore, messages: Sequence[DelayedMessage], now: datetime) -> dict[str, str]:
    """Store messages, as a task does; return what differs by the end of the id."""
    batch = to_columns(messages)
    report = store.store_batch(batch, now)
    conflicts = find_conflicts(store, batch, {*report.duplicate_ids})
    return {
        messages[position].message_id.partition("-")[2]: text.removeprefix(
            "the store has this id with another "
        ).removesuffix(", and keeps what it has")
        for position, text in conflicts.items()
    }


def test_a_known_id_with_other_content_is_told_and_one_with_the_same_is_not(
    store: OpenStore, prefix: str, now: datetime
) -> None:
    def message(name: str, due: datetime = DUE, destination: str = "q", **more) -> DelayedMessage:
        content: dict[str, Any] = {"headers": {"k": "v", "é": '"'}, "body": b"\0x", "expires_at": None, **more}
        return DelayedMessage(f"{prefix}-{name}", due, destination, **content)

    names = ("same", "order", "due", "destination", "header", "body", "expiry", "all")
    first = [message(name) for name in names]
    assert differences(store, first, now) == {}
    assert differences(store, first, now) == {}
    again = [
        message("same"),
        message("order", headers={"é": '"', "k": "v"}),
        message("due", LATER),
        message("destination", destination="other"),
        message("header", headers={"k": "v"}),
        message("body", body=b""),
        message("expiry", expires_at=LATER),
        message("all", LATER, "other", headers={}, body=b"y", expires_at=LATER),
        message("new"),
    ]
    assert differences(store, again, now) == {
        "due": "due time",
        "destination": "destination",
        "header": "header",
        "body": "body",
        "expiry": "expiry",
        "all": "due time and destination and expiry and header and body",
    }
    duplicates = find_duplicate_ids(store, to_columns([*again, message("unknown")]))
    assert duplicates == {each.message_id for each in again}


def test_a_message_that_has_ended_is_compared_with_its_records(store: OpenStore, prefix: str, now: datetime) -> None:
    """The store has no headers and no body of it any more."""
    ids = {name: f"{prefix}-{name}" for name in ("same", "body", "due", "destination")}
    assert differences(store, [DelayedMessage(id_, DUE, "q", body=b"x") for id_ in ids.values()], now) == {}
    for id_ in ids.values():
        assert store.call(lambda adapter, id_=id_: adapter.remove(id_, now))
    again = [
        DelayedMessage(ids["same"], DUE, "q", body=b"x"),
        DelayedMessage(ids["body"], DUE, "q", body=b"y"),
        DelayedMessage(ids["due"], LATER, "q", body=b"x"),
        DelayedMessage(ids["destination"], DUE, "other", body=b"x"),
    ]
    assert differences(store, again, now) == {"due": "due time", "destination": "destination"}


def test_a_message_that_was_rescheduled_since_is_the_same(store: OpenStore, prefix: str, now: datetime) -> None:
    """By an operator, or because the rules of its zone have changed: the table that it came from did not change."""
    plain = DelayedMessage(f"{prefix}-plain", DUE, "q", {"k": "v"})
    by_clock = DelayedMessage(f"{prefix}-clock", DUE, "q", PARIS)
    assert differences(store, [plain, by_clock], now) == {}
    assert store.call(lambda adapter: adapter.reschedule(plain.message_id, LATER, now))
    assert store.call(lambda adapter: adapter.reschedule(by_clock.message_id, LATER, now, PARIS[Headers.WALL_TIME]))
    assert differences(store, [plain, by_clock], now) == {}
    by_new_rules = DelayedMessage(by_clock.message_id, DUE - timedelta(hours=1), "q", PARIS)
    changed = DelayedMessage(plain.message_id, DUE, "q", {"k": "w"})
    neither = DelayedMessage(f"{prefix}-plain", DUE + timedelta(hours=2), "q", {"k": "v"})
    assert differences(store, [by_new_rules], now) == {}
    assert differences(store, [changed], now) == {"plain": "header"}
    assert differences(store, [neither], now) == {"plain": "due time"}
