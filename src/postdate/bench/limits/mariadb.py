"""What MariaDB does without us: bare rows into a table of its own, on the same server in the same run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pymysql
import pymysql.connections
import pymysql.cursors

from postdate.bench.workload import BODY, encoded_headers_of, id_of

if TYPE_CHECKING:
    Connection = pymysql.connections.Connection[pymysql.cursors.Cursor]
else:  # only its stubs have a parameter
    Connection = pymysql.connections.Connection
Error, OperationalError = pymysql.Error, pymysql.err.OperationalError

DEFAULT_PORT = 3306
_RUN = "0" * 12
_TABLE = """
    CREATE TABLE bare_pending (
        id bigint AUTO_INCREMENT PRIMARY KEY, due bigint NOT NULL, message_id varchar(250) NOT NULL,
        destination varchar(200) NOT NULL, headers mediumtext NOT NULL, body mediumblob NOT NULL, KEY (due, id))
    ENGINE = InnoDB CHARACTER SET utf8mb4
"""
_INSERT = "INSERT INTO bare_pending (due, message_id, destination, headers, body) VALUES (%s, %s, 'bench', %s, %s)"


def connect(url: str, database: str | None = None) -> Connection:
    """Return a connection on which every statement is a transaction of its own."""
    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname or "localhost",
        port=parts.port or DEFAULT_PORT,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=database,
        charset="utf8mb4",
        autocommit=True,
    )


def insert_limit(connection: Connection, n: int, batch: int) -> float:
    """Return rows a second of inserting many with one statement into a table with an index on the due time."""
    with connection.cursor() as cursor:
        cursor.execute(_TABLE)
        seconds = 0.0
        for first in range(0, n, batch):
            rows = [_row(number) for number in range(first, min(first + batch, n))]
            started = time.perf_counter()
            connection.begin()
            cursor.executemany(_INSERT, rows)
            connection.commit()
            seconds += time.perf_counter() - started
        cursor.execute("DROP TABLE bare_pending")
        return n / seconds


def _row(number: int) -> tuple[Any, ...]:
    message_id = id_of(number, _RUN)
    return number, message_id, encoded_headers_of(message_id), BODY
