"""PostgreSQL under the conformance suite: every subject has a schema of its own, with a name that has to be quoted."""

import itertools
import os

import psycopg

from postdate.ports import DelayedMessageStore, EnlistingStore, Recording, Transport
from postdate.stores.postgres import PostgresStore
from postdate.testing import StoreSubject, TransportSubject
from postdate.transports.postgres import PostgresTransport

_NUMBERS = itertools.count(1)


def fresh_schema() -> str:
    """Return the name of a schema that does not exist: a point, a quote, a percent sign and a bracket are in it."""
    return f'po"st.date]% {os.getpid()}.{next(_NUMBERS)}'


def drop_schema(url: str, schema: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        quoted = schema.replace('"', '""')
        connection.execute(f'DROP SCHEMA IF EXISTS "{quoted}" CASCADE'.encode())


class PostgresStoreSubject(StoreSubject):
    """The store in PostgreSQL."""

    def __init__(self, url: str) -> None:
        self.url, self.schema = url, fresh_schema()
        self._recording = Recording.ALL

    def open(self, *, recording: Recording = Recording.ALL, **settings) -> PostgresStore:
        self._recording = recording
        return PostgresStore(self.url, schema=self.schema, recording=recording, **settings)

    def open_elsewhere(self) -> DelayedMessageStore:
        return PostgresStore(self.url, schema=self.schema)

    def transport(self) -> Transport:
        return PostgresTransport(self.url, schema=self.schema, recording=self._recording)

    def drop(self) -> None:
        drop_schema(self.url, self.schema)


class PostgresTransportSubject(TransportSubject):
    """The queues in PostgreSQL."""

    def __init__(self, url: str) -> None:
        self.url, self.schema = url, fresh_schema()

    def open(self, **settings) -> PostgresTransport:
        return PostgresTransport(self.url, schema=self.schema, **settings)

    def open_elsewhere(self) -> Transport:
        return PostgresTransport(self.url, schema=self.schema)

    def store(self) -> EnlistingStore:
        store = PostgresStore(self.url, schema=self.schema, table="conformance.timeouts")
        store.database.setup_blocking("conformance.timeouts")
        return store

    def drop(self) -> None:
        drop_schema(self.url, self.schema)
