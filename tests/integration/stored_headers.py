"""The headers of stored messages, written by hand: rows as older versions left them."""

import sqlite3
from collections.abc import Callable
from contextlib import closing

import psycopg
from azure.data.tables import TableClient, UpdateMode
from tests.azure_store_subjects import AzureTableStoreSubject
from tests.conftest import SqliteStoreSubject
from tests.mariadb_subjects import MariaDbStoreSubject
from tests.postgres_subjects import PostgresStoreSubject
from tests.redis_subjects import RedisStoreSubject

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import MariaDbNames
from postdate.testing import StoreSubject

WITH_ROWS = ["SqliteStore", "PostgresStore", "MariaDbStore", "RedisStore", "AzureTableStore"]
"""Stores whose rows older versions have written."""

BESIDE_QUEUES = ["SqliteStore", "PostgresStore", "RedisStore"]
"""Those of them that move rows to their queues as they are."""


def rewrite_headers(subject: StoreSubject, rewritten: Callable[[str], str]) -> None:
    """Put another text in place of the headers of each message that is stored."""
    match subject:
        case SqliteStoreSubject():
            with closing(sqlite3.connect(subject.path)) as file, file:
                file.create_function("rewritten", 1, rewritten)
                file.execute("UPDATE content SET headers = rewritten(headers)")
        case PostgresStoreSubject():
            with psycopg.connect(subject.url) as connection:
                connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", (subject.schema,))
                for number, headers in connection.execute("SELECT number, headers FROM content").fetchall():
                    new = (rewritten(headers), number)
                    connection.execute("UPDATE content SET headers = %s WHERE number = %s", new)
        case MariaDbStoreSubject():
            with closing(MariaDbServer(subject.url).connect()) as session:
                ((table,),) = session.rows(f"SELECT name FROM {MariaDbNames(subject.schema, 'any').name_of('store')}")
                pending = MariaDbNames(subject.schema, table).pending
                for number, headers in session.rows(f"SELECT number, headers FROM {pending}"):
                    new = {"number": number, "headers": rewritten(headers)}
                    session.change(f"UPDATE {pending} SET headers = %(headers)s WHERE number = %(number)s", new)
        case RedisStoreSubject():
            for key in (each for each in subject.prefix.all_keys() if b":m:" in each):
                raw: bytes = subject.prefix.client.hget(key, "h")  # type: ignore[assignment]
                subject.prefix.client.hset(key, "h", rewritten(raw.decode()).encode())
        case AzureTableStoreSubject():
            with TableClient.from_connection_string(subject.connection, subject.table) as client:
                for entity in client.list_entities():
                    client.update_entity({**entity, "Headers": rewritten(entity["Headers"])}, UpdateMode.REPLACE)
        case _:
            raise NotImplementedError(subject)
