"""The target of ``postdate bench``: a schema of the run, and bare rows into a table of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from typing_extensions import override

from postdate.backends.sqlserver.connection import SqlServerInstance
from postdate.ports.benchmarks import BareRow, BenchmarkRun, BenchmarkTarget, Inserter


class SqlServerTarget(BenchmarkTarget):
    """A schema made for the run in the address' database, and dropped after it."""

    def __init__(self, address: str, run: BenchmarkRun) -> None:
        super().__init__(address, run)
        self.schema = f"postdate_bench_{run.name}"
        self.session = SqlServerInstance(address).connect()

    def __enter__(self) -> Self:
        self.session.change(f"CREATE SCHEMA [{self.schema}]")
        return self

    def __exit__(self, *_error: object) -> None:
        self.session.close()  # an interrupted statement leaves it unusable
        session = SqlServerInstance(self.address).connect()
        select = "SELECT name FROM sys.tables WHERE schema_id = SCHEMA_ID(%(schema)s)"
        for (table,) in session.rows(select, {"schema": self.schema}):
            session.change(f"DROP TABLE [{self.schema}].[{table}]")
        session.change(f"DROP SCHEMA [{self.schema}]")
        session.close()

    @property
    @override
    def settings(self) -> Mapping[str, str]:
        return {"schema": self.schema}

    @contextmanager
    @override
    def inserter(self) -> Generator[Inserter]:
        table = f"[{self.schema}].[bare_pending]"
        self.session.change(
            f"CREATE TABLE {table} (id bigint NOT NULL IDENTITY PRIMARY KEY, due bigint NOT NULL, "
            f"message_id nvarchar(500) NOT NULL, destination nvarchar(400) NOT NULL, headers nvarchar(max) NOT NULL, "
            f"body varbinary(max) NOT NULL, INDEX [due] (due, id))"
        )
        insert = (
            f"INSERT INTO {table} (due, message_id, destination, headers, body) "
            f"SELECT i.due, i.id, N'bench', i.headers, CAST(i.body AS varbinary(max)) FROM OPENJSON(%(rows)s) WITH "
            f"(due bigint '$.due', id nvarchar(500) '$.id', headers nvarchar(max) '$.headers', "
            f"body nvarchar(max) '$.body') AS i"
        )

        def prepared(rows: Sequence[BareRow]) -> Callable[[], None]:
            text = json.dumps([
                {"due": row.due, "id": row.message_id, "headers": row.headers, "body": row.body.decode("latin-1")}
                for row in rows
            ])  # fmt: skip

            def run() -> None:
                self.session.begin()
                self.session.change(insert, {"rows": text})
                self.session.commit()

            return run

        yield prepared
        self.session.change(f"DROP TABLE {table}")
