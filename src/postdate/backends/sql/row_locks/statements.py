"""The SQL of a store as data: templates in which ``{pending}``, ``{record}`` and similar names stand for its tables.

A dialect is a subclass with the statements in which servers differ: how rows are locked and skipped, how an index is
forced, how much is read. Parameters are ``%(name)s``, and any other percent sign is doubled. Source: ADR 0008.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final

from typing_extensions import override

from postdate.backends.sql.dialect import SqlDialect
from postdate.backends.sql.migrations import fill_placeholders
from postdate.backends.sql.row_locks.names import RowLockNames
from postdate.backends.sql.row_locks.parts import MessageRow, PendingRow
from postdate.clock import to_microseconds
from postdate.ports import Scan
from postdate.ports.limits import LANE_WIDTH, LANES

EARLIEST: Final = -(2**63) + 1
"""A lower bound before every time. It also excludes NULL and unreadable rows, which have it as ``attempt_at``."""

LANES_START: Final = to_microseconds(LANES)
LANE_MICROSECONDS: Final = LANE_WIDTH // timedelta(microseconds=1)

_FRAGMENTS: Final = {
    "row": ", ".join(f"p.{column}" for column in MessageRow._fields),
    "content": ", ".join(MessageRow._fields),
    "waiting": ", ".join(f"p.{column}" for column in PendingRow._fields),
    "into_record": "INSERT INTO {record} (at, due, store_id, kind, message_id, destination, detail)",
    "as_record": "SELECT %(at)s, due, %(store)s, %(kind)s, message_id, destination, %(detail)s FROM",
    "due_first": "p.attempt_at > %(from)s AND p.attempt_at < %(at)s ORDER BY p.attempt_at, p.number",
    "share": "t.number >= %(first)s AND t.number < %(end)s",
}


class RowLockStatements:
    """Every statement of one store.

    The class has templates, or mappings of them; an object has them with names filled in.
    """

    fragments: ClassVar[Mapping[str, str]] = {}
    """Parts of several templates, by their names in braces; a later one may contain earlier ones.

    ``of_id``: one message by ``id`` and ``store``; ``scheduled``: its first record, which is unique; ``marked``:
    unreadable rows.
    """

    # --- storing
    find_store = "SELECT store_id FROM {store} WHERE name = %(name)s"
    insert_records: str
    """Writes *scheduled* records of new ids; returns number and id of each."""
    insert_messages: str
    lock_scheduled: str
    last_kind: str
    """The kind of the last record of a message that is not pending."""
    record_one = "{into_record} {as_record} {pending} WHERE number = %(number)s"

    # --- claims
    claim: str
    """Locks the oldest unlocked messages that may be attempted; returns number, ``attempt_at`` and row."""
    lease: str
    lock_holder: str
    """Prevents the removal of a number before the end of the transaction; returns no row if it was removed."""
    retry: str
    release: str
    lock: str
    headers_of: str
    reschedule: str

    # --- queries ------------------------------------------------------------------------
    next_attempt: str
    next_attempt_except: str
    next_due: str
    first_unclaimed: str
    """The first unlocked message; older ones are locked. It locks only that message for a moment."""
    statistics: str
    due_count: str
    moved_dues: str | None = None
    record_counts = "SELECT kind, COUNT(*) FROM {record} WHERE store_id = %(store)s GROUP BY kind ORDER BY kind"
    limits_of_held: str
    """See :class:`postdate.backends.sql.limits.SqlLimits`."""
    list_pending: str
    get: str
    history = "SELECT kind, message_id, at, due, destination, detail FROM {record} WHERE {of_id} ORDER BY number"
    now: str

    # --- heartbeats and holders ---------------------------------------------------------
    add_holder: str
    find_dead: str
    find_unknown = (
        "SELECT DISTINCT p.holder FROM {attempt} WHERE p.attempt_at IS NULL AND p.holder IS NOT NULL "
        "AND NOT EXISTS (SELECT 1 FROM {holder} AS h WHERE h.holder = p.holder)"
    )
    drop_holders: str
    """Reads only the named rows: a scan of all would wait for every process that is leasing."""
    report_clock = "UPDATE {holder} SET ahead = %(ahead)s WHERE holder = %(holder)s"
    reported_clocks: str

    # --- unreadable rows ----------------------------------------------------------------
    lock_unclaimed: str
    mark_unreadable: str
    remove_one: str
    record_unreadable = (
        "{into_record} VALUES (%(at)s, %(due)s, %(store)s, %(kind)s, %(id)s, %(destination)s, %(detail)s)"
    )
    count_unreadable = "SELECT COUNT(*) FROM {marked}"
    list_unreadable: str
    lock_unreadable: str

    # --- scans
    bounds: Mapping[str, str] = {
        "pending": "SELECT COALESCE(MIN(number), 0), COALESCE(MAX(number) + 1, 0) FROM {pending}",
        "records": "SELECT COALESCE(MIN(number), 0), COALESCE(MAX(number) + 1, 0) FROM {record}",
    }
    _shares: Mapping[str, str] = {
        "pending": "FROM {pending} AS t WHERE {share} AND t.unreadable IS NULL",
        "records": "FROM {record} AS t WHERE {share} AND t.store_id = %(store)s",
    }
    _dues: ClassVar[Mapping[str, str]] = {"due_from": "t.due >= %(due_from)s", "due_to": "t.due < %(due_to)s"}
    _listed: Mapping[str, str]
    """Conditions that a message is in a list: by ``destinations``, and ``pending`` and ``records`` by id."""

    def __init__(self, names: RowLockNames) -> None:
        placeholders = {f"{{{name}}}": f"{{{name}}}" for name in ("pending", "record", "store", "holder", "limits")}
        for name, text in {**_FRAGMENTS, **self.fragments}.items():
            placeholders[f"{{{name}}}"] = fill_placeholders(text, placeholders)
        tables = names.statement_replacements
        self.limits_table = tables["{limits}"]
        for name in dir(type(self)):
            template: Any = None if name.startswith("__") else getattr(type(self), name)
            if isinstance(template, str):
                setattr(self, name, fill_placeholders(fill_placeholders(template, placeholders), tables))
        for name in ("bounds", "_shares", "_listed"):
            pieces: Mapping[str, str] = getattr(type(self), name)
            setattr(
                self,
                name,
                {key: fill_placeholders(fill_placeholders(each, placeholders), tables) for key, each in pieces.items()},
            )

    def scan_statement(self, scan: Scan, values: Mapping[str, Any]) -> str:
        """Return the statement of a scan; ``values`` has its conditions by name."""
        columns = ", ".join("t.failures" if each == "number_of_failures" else f"t.{each}" for each in scan.columns)
        texts = {**self._dues, **self._listed, "message_ids": self._listed[scan.row_kind]}
        # An empty list is not valid SQL on every server.
        conditions = [texts[name] if value != () else "1 = 0" for name, value in values.items()]
        return " AND ".join([f"SELECT {columns or '1'} {self._shares[scan.row_kind]}", *conditions])


class ServerSqlDialect(SqlDialect):
    """The common statements in the form of a row-lock server.

    Bytes are sent as hexadecimal digits, because other literals depend on settings that a handler may change.
    """

    @override
    def statement_of(self, template: str) -> str:
        return template

    @override
    def rows(self, session: Any, statement: str, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        return session.rows(statement, values)

    @override
    def change(self, session: Any, statement: str, values: Mapping[str, Any]) -> int:
        return session.change(statement, values)

    @override
    def content(self, content: bytes | None) -> str | None:
        return None if content is None else content.hex()
