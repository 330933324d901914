"""Saga instances in a schema of PostgreSQL, beside the delayed messages and queues there: one transaction for all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from typing_extensions import override

from postdate.backends.postgres.access import Access, Connection, OpenDatabase, SchemaPart
from postdate.backends.postgres.names import part_steps, sql, steps
from postdate.backends.postgres.statements import PostgresSqlDialect, columns_of
from postdate.backends.sql.dialect import Values
from postdate.backends.sql.sagas import SqlSagaStore
from postdate.ports import SagaChangeKind

_TABLE: Final = "saga"


class PostgresSagaStore(SchemaPart, SqlSagaStore):
    """Keeps saga instances in PostgreSQL; several processes may use it at once.

    Args:
        database: ``postgresql://user:password@host:port/database``, any connection string of libpq, or a
            :class:`postdate.Postgres` that other adapters use, too.
        schema: of the table; a store and queues in the same schema share their transactions with it. ``None``: the
            schema of the database, by default ``postdate``.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. ``None``: the
            setting of the database, by default 20 seconds.

    Raises:
        ConfigurationError: the address, the schema or the duration is invalid.
    """

    def __init__(
        self, database: str | OpenDatabase, *, schema: str | None = None, answers_within: timedelta | None = None
    ) -> None:
        self.database = Access(database, schema, answers_within=answers_within)
        table, identity = self.database.names.name_of(_TABLE), self.database.identity
        super().__init__(self.database, PostgresSqlDialect(), table, identity)
        self._batch_statements = _build_batch_statements(table)
        schema = self.database.names.schema
        # With the tables of the queues, whose transactions it shares.
        self._set_database(self.database, [*steps(schema, None), *part_steps(schema, "sagas", _TABLE)])

    @override
    def rows_of(
        self, session: Connection, statement_name: str, keys: Sequence[Values]
    ) -> Sequence[tuple[Any, ...] | None]:
        rows = session.execute(self._batch_statements[statement_name], columns_of(keys), prepare=True).fetchall()
        return [None if row[0] is None else row for row in rows]

    @override
    def change(self, transaction: Connection, fate: SagaChangeKind, rows: Sequence[Values]) -> int:
        return transaction.execute(self._batch_statements[fate], columns_of(rows), prepare=True).rowcount


def _build_batch_statements(table: str) -> dict[str | SagaChangeKind, bytes]:
    """Return the statements of :class:`SqlSagaStore`, each for many instances: a column is an array."""
    row = "s.saga_id, s.saga_type, s.property, s.value, s.state, s.details, s.version"
    types = "%(saga_type)s::text[]"
    values = f"unnest({types}, %(saga_id)s::text[], %(version)s::bigint[], %(state)s::text[], %(details)s::text[])"

    def first_instance_query(columns: str, *key: str) -> str:
        """Return the query for the first instance from a key on, in the order of the key's index.

        Both indexes begin with the type. With conditions of equality alone, the planner uses either one if it believes
        that there is one instance. Then it may read all instances of a type to find one. The order leaves it only one
        index.
        """
        *equal, last = key
        conditions = [*(f"{each} = k.{each}" for each in equal), f"{last} >= k.{last}"]
        return (
            f"LATERAL (SELECT {columns} FROM {table} WHERE {' AND '.join(conditions)} "
            f"ORDER BY {', '.join(key)} LIMIT 1)"
        )

    unchanged = (
        f"{values} AS k(saga_type, saga_id, version, state, details) "
        f"CROSS JOIN {first_instance_query('ctid AS place, saga_id', 'saga_type', 'saga_id')} AS target "
        f"WHERE s.ctid = target.place AND target.saga_id = k.saga_id AND s.version = k.version"
    )
    return {
        "find": sql(f"""
            SELECT {row} FROM unnest({types}, %(property)s::text[], %(value)s::text[])
                WITH ORDINALITY AS k(saga_type, property, value, position)
                LEFT JOIN {first_instance_query("*", "saga_type", "property", "value")} AS s ON s.value = k.value
            ORDER BY k.position"""),
        "load": sql(f"""
            SELECT {row} FROM unnest({types}, %(saga_id)s::text[]) WITH ORDINALITY AS k(saga_type, saga_id, position)
                LEFT JOIN {first_instance_query("*", "saga_type", "saga_id")} AS s ON s.saga_id = k.saga_id
            ORDER BY k.position"""),
        SagaChangeKind.COMPLETED: sql(f"""
            DELETE FROM {table} AS s USING {unchanged}"""),
        SagaChangeKind.SET_ASIDE: sql(f"""
            UPDATE {table} AS s SET property = s.saga_id, version = s.version + 1
            FROM {unchanged}"""),
        SagaChangeKind.UPDATED: sql(f"""
            UPDATE {table} AS s SET state = k.state, details = k.details, version = s.version + 1
            FROM {unchanged}"""),
        SagaChangeKind.CREATED: sql(f"""
            INSERT INTO {table} (saga_id, saga_type, property, value, state, details, version)
            SELECT * FROM unnest(%(saga_id)s::text[], {types}, %(property)s::text[], %(value)s::text[],
                %(state)s::text[], %(details)s::text[], %(version)s::bigint[])
            ON CONFLICT DO NOTHING"""),
    }
