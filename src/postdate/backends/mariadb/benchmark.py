"""The target of ``postdate bench``: a database of the run, and bare rows into a table of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final, Self
from urllib.parse import urlsplit

from typing_extensions import override

from postdate.backends.mariadb.connection import MariaDbServer, literal
from postdate.ports.benchmarks import BareRow, BenchmarkRun, BenchmarkTarget, Inserter

_TABLE: Final = """
    CREATE TABLE {database}.bare_pending (
        id bigint AUTO_INCREMENT PRIMARY KEY, due bigint NOT NULL, message_id varchar(250) NOT NULL,
        destination varchar(200) NOT NULL DEFAULT 'bench', headers mediumtext NOT NULL, body mediumblob NOT NULL,
        KEY (due, id))
    ENGINE = InnoDB CHARACTER SET utf8mb4
"""
_ROWS_A_STATEMENT: Final = 1_000


class MariaDbTarget(BenchmarkTarget):
    """A database made for the run and dropped after it; that of the address is not used."""

    def __init__(self, address: str, run: BenchmarkRun) -> None:
        super().__init__(address, run)
        self.database = f"postdate_bench_{run.name}"
        self.session = MariaDbServer(address).connect()

    @override
    def address_of(self, scheme: str) -> str:
        return urlsplit(self.address)._replace(scheme=scheme, path=f"/{self.database}").geturl()

    def __enter__(self) -> Self:
        self.session.change(f"CREATE DATABASE {self.database}")
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()  # an interrupted statement leaves it unusable
        session = MariaDbServer(self.address).connect()
        session.change(f"DROP DATABASE {self.database}")
        session.close()

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
