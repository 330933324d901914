"""Bare rows into a table on MariaDB."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

from typing_extensions import override

from benchmarks.targets.target import BareRow, BenchmarkRun, BenchmarkTarget, Inserter
from postdate.backends.mariadb.connection import MariaDbServer, literal
from postdate.ports.backends import Scratch

_TABLE: Final = """
    CREATE TABLE {database}.bare_pending (
        id bigint AUTO_INCREMENT PRIMARY KEY, due bigint NOT NULL, message_id varchar(250) NOT NULL,
        destination varchar(200) NOT NULL DEFAULT 'bench', headers mediumtext NOT NULL, body mediumblob NOT NULL,
        KEY (due, id))
    ENGINE = InnoDB CHARACTER SET utf8mb4
"""
_ROWS_A_STATEMENT: Final = 1_000


class MariaDbTarget(BenchmarkTarget):
    """The database of the run."""

    def __init__(self, scratch: Scratch, run: BenchmarkRun) -> None:
        super().__init__(scratch, run)
        self.database = scratch.settings["schema"]
        self.session = MariaDbServer(scratch.address).connect()

    @override
    def __exit__(self, *_: object) -> None:
        self.session.close()

    @contextmanager
    @override
    def inserter(self) -> Generator[Inserter]:
        self.session.change(_TABLE.format(database=self.database))
        yield self._prepared
        self.session.change(f"DROP TABLE {self.database}.bare_pending")

    def _prepared(self, rows: Sequence[BareRow]) -> Callable[[], None]:
        into = f"INSERT INTO {self.database}.bare_pending (due, message_id, headers, body) VALUES ".encode()
        statements = [
            into + b",".join(map(_values, rows[first : first + _ROWS_A_STATEMENT]))
            for first in range(0, len(rows), _ROWS_A_STATEMENT)
        ]

        def insert() -> None:
            self.session.begin()
            for statement in statements:
                self.session.change(statement)
            self.session.commit()

        return insert


def _values(row: BareRow) -> bytes:
    return b"(%d,%b,%b,%b)" % (row.due, literal(row.message_id), literal(row.headers), literal(row.body))
