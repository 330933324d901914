"""Hiding a large table of PostgreSQL at once: it gets another name, and an empty one takes its place. Source: ADR 0015.

No row moves but the few that are due soon, so a million of them are hidden in a tenth of a second. The rest stays where
it is, in one piece, and is cut into batches afterwards, by due time: a batch is a range of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from typing_extensions import override

from postdate.backends.postgres.names import literal
from postdate.errors import StoreError, StoreUnavailable
from postdate.migrating.dialect import Dialect, Exchange, Hidden, Session
from postdate.migrating.names import (
    FIRST_ID,
    FIRST_TIME,
    LAST_ID,
    LAST_TIME,
    NUMBER,
    TIMEOUTS,
    former_table,
    ranges_table,
)
from postdate.persistence.timeouts import ID, TIME

log = logging.getLogger("postdate.migrating")

_WORTH: Final = 10
"""Calls that hide row by row: what takes fewer is not worth an exchange."""

_LOCK_SECONDS: Final = 2
"""While it waits for the table, the manager waits behind it. After one second the server ends a vacuum of its own."""

_TRIES: Final = 5

_OBSTACLES: Final = """
WITH live AS (SELECT * FROM pg_class WHERE oid = to_regclass(%(table)s)),
own AS (SELECT 'pg_class'::regclass::oid AS kind, oid FROM live UNION ALL SELECT 'pg_type'::regclass, reltype FROM live)
SELECT 'it is no plain table' FROM live WHERE relkind <> 'r' OR relpersistence <> 'p' OR relispartition
    OR reloftype <> 0 OR (SELECT amname FROM pg_am WHERE pg_am.oid = relam) <> 'heap'
UNION ALL SELECT 'it is inherited, or inherits' FROM live JOIN pg_inherits ON live.oid IN (inhrelid, inhparent)
UNION ALL SELECT 'it has the trigger or foreign key ' || tgname FROM live JOIN pg_trigger ON tgrelid = live.oid
UNION ALL SELECT 'it has the rule ' || rulename FROM live JOIN pg_rewrite ON ev_class = live.oid
UNION ALL SELECT 'it has row security' FROM live WHERE relrowsecurity OR relforcerowsecurity
    OR EXISTS (SELECT FROM pg_policy WHERE polrelid = live.oid)
UNION ALL SELECT 'the publication ' || pubname || ' has it' FROM live JOIN pg_namespace AS n ON n.oid = relnamespace
    JOIN pg_publication_tables ON schemaname = nspname AND tablename = relname
UNION ALL SELECT 'a subscription fills it' FROM live JOIN pg_subscription_rel ON srrelid = live.oid
UNION ALL SELECT 'rights are granted on the column ' || attname FROM live JOIN pg_attribute ON attrelid = live.oid
    WHERE attacl IS NOT NULL
UNION ALL SELECT pg_describe_object(classid, objid, objsubid) || ' depends on it' FROM own JOIN pg_depend
    ON refclassid = kind AND refobjid = oid WHERE deptype = 'n' AND NOT (classid = 'pg_constraint'::regclass
    AND EXISTS (SELECT FROM pg_constraint AS c WHERE c.oid = objid AND conrelid = own.oid))
UNION ALL SELECT 'the sequence ' || s.oid::regclass || ' is its own' FROM live JOIN pg_depend AS d
    ON refclassid = 'pg_class'::regclass AND refobjid = live.oid AND classid = 'pg_class'::regclass
    JOIN pg_class AS s ON s.oid = d.objid AND s.relkind = 'S'
UNION ALL SELECT 'it belongs to an extension' FROM live JOIN pg_depend
    ON classid = 'pg_class'::regclass AND objid = live.oid AND deptype = 'e'
UNION ALL SELECT 'the user of the migration is not its owner' FROM live WHERE NOT pg_has_role(relowner, 'USAGE')
UNION ALL SELECT 'its owner may not create tables in its schema' FROM live
    WHERE NOT has_schema_privilege(relowner, relnamespace, 'CREATE')
UNION ALL SELECT 'it or an index is in a tablespace of its own' FROM live WHERE reltablespace <> 0 OR EXISTS (SELECT
    FROM pg_index JOIN pg_class AS i ON i.oid = indexrelid WHERE indrelid = live.oid AND i.reltablespace <> 0)
UNION ALL SELECT 'it has a replica identity' FROM live WHERE relreplident <> 'd'
UNION ALL SELECT 'its column ' || attname || ' has another type than upstream''s' FROM live JOIN pg_attribute
    ON attrelid = live.oid WHERE attname = %(time)s AND atttypid <> 'timestamp'::regtype
    OR attname = %(id)s AND atttypid <> 'uuid'::regtype
UNION ALL SELECT 'it has no index on ' || %(time)s FROM live WHERE NOT EXISTS (SELECT FROM pg_index JOIN pg_attribute
    ON attrelid = indrelid AND attnum = indkey[0] JOIN pg_class AS i ON i.oid = indexrelid
    WHERE indrelid = live.oid AND attname = %(time)s AND indisvalid AND indpred IS NULL
    AND (SELECT amname FROM pg_am WHERE pg_am.oid = i.relam) = 'btree')
UNION ALL SELECT 'it has no unique index on ' || %(id)s FROM live WHERE NOT EXISTS (SELECT FROM pg_index
    JOIN pg_attribute ON attrelid = indrelid AND attnum = indkey[0] WHERE indrelid = live.oid AND attname = %(id)s
    AND indisvalid AND indisunique AND indnkeyatts = 1 AND indpred IS NULL)
LIMIT 1
"""
"""What an exchange could not carry over, or could not do without."""

_INDEXES: Final = """
SELECT i.relname, c.oid IS NOT NULL, coalesce(pg_get_constraintdef(c.oid), pg_get_indexdef(i.oid))
FROM pg_index JOIN pg_class AS i ON i.oid = indexrelid
LEFT JOIN pg_constraint AS c ON c.conindid = i.oid AND c.conrelid = indrelid AND c.contype IN ('p', 'u', 'x')
WHERE indrelid = to_regclass(%(table)s) ORDER BY i.oid
"""

_PROPERTIES: Final = """
SELECT quote_ident(pg_get_userbyid(c.relowner)), obj_description(c.oid, 'pg_class'), c.relacl IS NOT NULL,
    (SELECT array_agg(o) FROM unnest(c.reloptions) AS o) || ARRAY(SELECT 'toast.' || o FROM unnest(t.reloptions) AS o)
FROM pg_class AS c LEFT JOIN pg_class AS t ON t.oid = c.reltoastrelid WHERE c.oid = to_regclass(%(table)s)
"""

_RIGHTS: Final = """
SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END, privilege_type, is_grantable
FROM pg_class, aclexplode(coalesce(relacl, acldefault('r', relowner))) WHERE pg_class.oid = to_regclass(%(table)s)
"""


class PostgresExchange(Exchange):
    """Puts an empty table in the place of a table of timeouts. What is in the way is said once; rows are moved then.

    Args:
        dialect: of the server, with the schema.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._sql = dialect
        self._made = set[str]()
        self._failures = Counter[str]()

    @override
    def was_made(self, session: Session, run_id: str) -> bool:
        if run_id not in self._made:
            ((found,),) = session.rows("SELECT to_regclass(%(table)s)", self._named(ranges_table(run_id)))
            if found is None:
                return False
            self._made.add(run_id)
        return True

    @override
    def is_worth_it(self, session: Session, run_id: str, table: str, limit: int) -> bool:
        most = _WORTH * limit
        if self._failures[run_id] >= _TRIES or self._count(session, table, ["TRUE"], {}, most) < most:
            return False
        obstacle = self._obstacle(session, table)
        if obstacle is not None:
            self._give_up(run_id, table, obstacle)
        return obstacle is None

    @override
    def failed(self, run_id: str, table: str, error: StoreError) -> None:
        self._failures[run_id] += 1
        if isinstance(error, StoreUnavailable) and self._failures[run_id] < _TRIES:
            log.info("%s is not exchanged now, some of its timeouts are moved row by row: %s", table, error)
        else:
            self._give_up(run_id, table, str(error))

    def _give_up(self, run_id: str, table: str, why: str) -> None:
        self._failures[run_id] = _TRIES
        log.warning("%s is not exchanged, its timeouts are moved row by row, which takes longer: %s", table, why)

    # --- the exchange ----------------------------------------------------------------------------------------------

    @override
    def make(self, session: Session, run_id: str, table: str, most: int, floor: datetime) -> bool:
        """See :class:`Exchange`; everything about the table that a manager could notice is carried over.

        While it waits for the table, and until the commit, managers wait as well.

        Raises:
            StoreUnavailable: gave up, for the table is in use, or there was no time.
            StoreError: something is in the way. The transaction is to be rolled back, as it is then.
        """
        values = {"floor": self._sql.floor(floor)}
        if self._count(session, table, self._near(), values, most + 1) > most:
            return False
        live, former = self._sql.table(table), self._sql.table(former_table(run_id))
        session.change(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'", {})
        session.change(f"LOCK TABLE {live} IN ACCESS EXCLUSIVE MODE", {})
        obstacle = self._obstacle(session, table)
        if obstacle is not None:
            raise StoreError(obstacle)
        named = self._named(table)
        indexes, properties = session.rows(_INDEXES, named), session.rows(_PROPERTIES, named)[0]
        rights = set(session.rows(_RIGHTS, named))
        for number, (index, _, _) in enumerate(indexes):
            name = self._sql.quoted(f"{former_table(run_id)}_{number}")
            session.change(f"ALTER INDEX {self._sql.table(index)} RENAME TO {name}", {})
        session.change(f"ALTER TABLE {live} RENAME TO {self._sql.quoted(former_table(run_id))}", {})
        session.change(f"CREATE TABLE {live} (LIKE {former} INCLUDING ALL EXCLUDING INDEXES)", {})
        self._dress(session, live, properties)
        for index, is_constraint, definition in indexes:
            made = str(definition).replace("%", "%%")
            add = f"ALTER TABLE {live} ADD CONSTRAINT {self._sql.quoted(index)} "
            session.change(f"{add}{made}" if is_constraint else made, {})
        self._grant(session, table, rights, are_given=properties[2])
        self._put_back(session, live, former, self._sql.columns(session, table), values)
        session.change(self._creating_ranges(run_id), {})
        return True

    def _obstacle(self, session: Session, live: str) -> str | None:
        found = session.rows(_OBSTACLES, {**self._named(live), "time": TIME, "id": ID})
        return str(found[0][0]) if found else None

    def _dress(self, session: Session, live: str, properties: Sequence[Any]) -> None:
        """Give a table its owner, its comment and its options."""
        owner, comment, _, options = properties
        session.change(f"ALTER TABLE {live} OWNER TO {str(owner).replace('%', '%%')}", {})
        if comment is not None:
            session.change(f"COMMENT ON TABLE {live} IS {_text(comment)}", {})
        for option in options or ():
            name, _, value = str(option).partition("=")
            session.change(f"ALTER TABLE {live} SET ({name} = {_text(value)})", {})

    def _grant(self, session: Session, live: str, rights: set[tuple[Any, ...]], *, are_given: bool) -> None:
        """Give the rights on the former table on the live one, and no others.

        Raises:
            StoreError: they are not the same then.
        """
        table, named = self._sql.table(live), self._named(live)
        given = set(session.rows(_RIGHTS, named))
        if are_given or given != rights:
            for grantee in {grantee for grantee, _, _ in given}:
                session.change(f"REVOKE ALL ON {table} FROM {_safe(grantee)}", {})
            for grantee, right, may_grant in sorted(rights):
                option = " WITH GRANT OPTION" if may_grant else ""
                session.change(f"GRANT {right} ON {table} TO {_safe(grantee)}{option}", {})
        if set(session.rows(_RIGHTS, named)) != rights:
            raise StoreError("its rights cannot be given to another table")

    def _put_back(
        self, session: Session, live: str, former: str, of_all: Sequence[str], values: Mapping[str, Any]
    ) -> None:
        columns = self._sql.list_of(of_all)
        for near in self._near():
            put = session.change(f"INSERT INTO {live} ({columns}) SELECT {columns} FROM {former} WHERE {near}", values)
            taken = session.change(f"DELETE FROM {former} WHERE {near}", values)
            if put != taken:  # nobody else has the table
                raise StoreError(f"{put} timeouts were put back and {taken} taken out")

    def _near(self) -> Sequence[str]:
        """Return the conditions of what is not to be hidden: due too soon, or nobody knows when."""
        return [self._sql.is_due_before(), f"{self._sql.quoted(TIME)} IS NULL"]

    def _count(
        self, session: Session, live: str, conditions: Sequence[str], values: Mapping[str, Any], most: int
    ) -> int:
        """Return how many timeouts fulfil one of the conditions, of which none two can; at most ``most``."""
        rows = " UNION ALL ".join(f"SELECT 1 FROM {self._sql.table(live)} WHERE {each}" for each in conditions)
        ((count,),) = session.rows(f"SELECT count(*) FROM ({rows} LIMIT {most}) AS found", values)
        return int(count)

    # --- batches ---------------------------------------------------------------------------------------------------

    def _creating_ranges(self, run_id: str) -> str:
        types = {NUMBER: "integer PRIMARY KEY", TIMEOUTS: "integer NOT NULL"}
        types |= dict.fromkeys((FIRST_TIME, LAST_TIME), "timestamp NOT NULL")
        types |= dict.fromkeys((FIRST_ID, LAST_ID), "uuid NOT NULL")
        columns = ", ".join(f"{self._sql.quoted(name)} {kind}" for name, kind in types.items())
        return f"CREATE TABLE {self._sql.table(ranges_table(run_id))} ({columns})"

    @override
    def cut(self, session: Session, run_id: str, first: int, batch_size: int) -> tuple[str, int] | None:
        """See :class:`Exchange`; one look through all of it. ``None`` also where nothing was hidden."""
        ranges, former = self._sql.table(ranges_table(run_id)), self._sql.table(former_table(run_id))
        ((is_cut,),) = session.rows(f"SELECT EXISTS (SELECT FROM {ranges})", {})
        if is_cut:
            return None
        for setting in ("enable_seqscan = on", "work_mem = '64MB'"):
            session.change(f"SET LOCAL {setting}", {})
        columns = self._sql.list_of((NUMBER, TIMEOUTS, FIRST_TIME, FIRST_ID, LAST_TIME, LAST_ID))
        order, time, timeout_id = self._sql.list_of((TIME, ID)), self._sql.quoted(TIME), self._sql.quoted(ID)
        session.change(
            f"""INSERT INTO {ranges} ({columns})
            WITH ordered AS (SELECT {time} AS due, {timeout_id} AS id, row_number() OVER one - 1 AS place,
                lead({timeout_id}) OVER one IS NULL AS is_last FROM {former} WINDOW one AS (ORDER BY {order})),
            ends AS (SELECT * FROM ordered WHERE is_last OR place %% {batch_size} IN (0, {batch_size} - 1))
            SELECT {first} + place / {batch_size}, max(place) - min(place) + 1,
                (array_agg(due ORDER BY place))[1], (array_agg(id ORDER BY place))[1],
                (array_agg(due ORDER BY place DESC))[1], (array_agg(id ORDER BY place DESC))[1]
            FROM ends GROUP BY place / {batch_size}""",
            {},
        )
        count = self._sql.quoted(TIMEOUTS)
        ((total,),) = session.rows(f"SELECT coalesce(sum({count}), 0) FROM {ranges}", {})
        if not total:
            return None
        number, earliest = self._sql.quoted(NUMBER), self._sql.quoted(FIRST_TIME)
        found = f"SELECT {number} AS batch, {count} AS messages, {earliest} AS earliest FROM {ranges}"
        return found, int(total)

    @override
    def hidden(self, session: Session, run_id: str, number: int) -> Hidden | None:
        if not self.was_made(session, run_id):
            return None
        # As JSON, instants are written as every session reads them; one of Python's could not be infinity.
        wanted = ", ".join(f"to_json({self._sql.quoted(name)}) #>> '{{}}'" for name in (FIRST_TIME, LAST_TIME))
        found = session.rows(
            f"SELECT {wanted}, {self._sql.list_of((FIRST_ID, LAST_ID))} FROM {self._sql.table(ranges_table(run_id))} "
            f"WHERE {self._sql.quoted(NUMBER)} = {number}",
            {},
        )
        if not found:
            return None
        first_time, last_time, first_id, last_id = found[0]
        row, time = f"({self._sql.list_of((TIME, ID))})", self._sql.quoted(TIME)
        first, last = f"timestamp '{first_time}'", f"timestamp '{last_time}'"
        return Hidden(
            self._sql.table(former_table(run_id)),
            f"{time} BETWEEN {first} AND {last} "
            f"AND {row} >= ({first}, uuid '{first_id}') AND {row} <= ({last}, uuid '{last_id}')",
        )

    def _named(self, table: str) -> dict[str, str]:
        return {"table": self._sql.table(table).replace("%%", "%")}


def _text(value: object) -> str:
    return literal(str(value)).replace("%", "%%")


def _safe(name: object) -> str:
    return str(name).replace("%", "%%")
