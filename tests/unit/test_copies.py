"""Whether a store has the message that it was given."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from postdate.core.copies import IN_ANOTHER_STORE, MISSING, difference
from postdate.messages import DelayedMessage
from postdate.ports import Record, RecordKind
from postdate.ports.migrating import MOVED_AWAY
from postdate.ports.scanning import ARCHIVED

NOW = datetime(2026, 11, 29, tzinfo=UTC)
DAY = timedelta(days=1)
MESSAGE = DelayedMessage("m-1", NOW + DAY, "orders", {"n": "1"}, b"body")


def record(kind: RecordKind, detail: str = "", due: datetime = MESSAGE.due, destination: str = "orders") -> Record:
    return Record(kind, "m-1", NOW, due, destination, detail)


SCHEDULED = record(RecordKind.SCHEDULED)


@pytest.mark.parametrize(
    ("copy", "records"),
    [
        (MESSAGE, []),
        (replace(MESSAGE, number_of_failures=3), [SCHEDULED]),
        (replace(MESSAGE, due=NOW + 9 * DAY, headers={}), [SCHEDULED, record(RecordKind.RESCHEDULED)]),
        (replace(MESSAGE, body=b"other"), [SCHEDULED, record(RecordKind.RESCHEDULED, "replaced")]),
        (None, [SCHEDULED, record(RecordKind.DELIVERED)]),
        (None, [SCHEDULED, record(RecordKind.CANCELLED)]),
        (None, [SCHEDULED, record(RecordKind.EXPIRED)]),
        (None, [SCHEDULED, record(RecordKind.FAILED, "no")]),
        (None, [SCHEDULED, record(RecordKind.RETRIED), record(RecordKind.HANDLED)]),
        (None, [record(RecordKind.SCHEDULED, ARCHIVED)]),
    ],
)
def test_a_copy_may_wait_as_it_was_or_be_changed_or_ended_by_the_store(
    copy: DelayedMessage | None, records: list[Record]
) -> None:
    assert difference(MESSAGE, copy, records) == ""


@pytest.mark.parametrize(
    ("copy", "records", "what"),
    [
        (replace(MESSAGE, body=b"other"), [SCHEDULED], "body"),
        (replace(MESSAGE, headers={}, body=b"other"), [], "headers, body"),
        (replace(MESSAGE, expires_at=NOW + 2 * DAY), [SCHEDULED], "expires_at"),
        (replace(MESSAGE, due=NOW + 9 * DAY), [record(RecordKind.SCHEDULED, due=NOW + 9 * DAY)], "due"),
        (
            None,
            [record(RecordKind.SCHEDULED, "", NOW, "other"), record(RecordKind.DELIVERED)],
            "due, destination",
        ),
        (None, [], MISSING),
        (None, [SCHEDULED], MISSING),
        (None, [SCHEDULED, record(RecordKind.RETRIED)], MISSING),
        (None, [SCHEDULED, record(RecordKind.CANCELLED, f"{MOVED_AWAY}: sqlite:/x")], IN_ANOTHER_STORE),
        (
            None,
            [SCHEDULED, record(RecordKind.CANCELLED, "moved to another store by migration 1 to x")],
            IN_ANOTHER_STORE,
        ),
    ],
)
def test_anything_else_is_named(copy: DelayedMessage | None, records: list[Record], what: str) -> None:
    assert difference(MESSAGE, copy, records) == what
