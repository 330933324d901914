"""Bare rows into a table on SQL Server."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from typing_extensions import override

from benchmarks.targets.target import BareRow, BenchmarkRun, BenchmarkTarget, Inserter
from postdate.backends.sqlserver.connection import SqlServerInstance
from postdate.ports.backends import Scratch


class SqlServerTarget(BenchmarkTarget):
    """The schema of the run."""

    def __init__(self, scratch: Scratch, run: BenchmarkRun) -> None:
        super().__init__(scratch, run)
        self.schema = scratch.settings["schema"]
        self.session = SqlServerInstance(scratch.address).connect()

    @override
    def __exit__(self, *_error: object) -> None:
        self.session.close()

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
