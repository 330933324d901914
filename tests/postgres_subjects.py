"""PostgreSQL under the conformance suite: every subject has a schema of its own, with a name that has to be quoted."""

import itertools
import os
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager

import psycopg

from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.ports import DelayedMessageStore, MovingStore, Recording, Transport
from postdate.testing import StoreSubject, TransportSubject
from postdate.testing.conformance import Damage
from postdate.testing.damaged import Damages, damages_of

_NUMBERS = itertools.count(1)


def fresh_schema() -> str:
    """Return the name of a schema that does not exist: a point, a quote, a percent sign and a bracket are in it."""
    return f'po"st.date]% {os.getpid()}.{next(_NUMBERS)}'


def drop_schema(url: str, schema: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        quoted = schema.replace('"', '""')
        connection.execute(f'DROP SCHEMA IF EXISTS "{quoted}" CASCADE'.encode())


_DAMAGES = {
    Damage.HEADERS: """
        UPDATE content SET headers = '{"torn' WHERE number = %(content)s RETURNING convert_to(headers, 'UTF8')""",
    Damage.CONTENT: "DELETE FROM content WHERE number = %(content)s RETURNING ''::bytea",
}


def damaged(url: str, schema: str, find: str, due: str, message_id: str, damage: Damage) -> bytes:
    """Damage a message by hand.

    Args:
        url: of the server.
        schema: in which it is.
        find: the statement that finds the number of its content by the id.
        due: the statement that gives it a due time before the calendar begins, by the number of its content.
        message_id: of the message.
        damage: what to do.
    """
    with psycopg.connect(url, autocommit=True, options="-c timezone=UTC") as connection:
        connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", (schema,))
        (content,) = connection.execute(find.encode(), (message_id,)).fetchone() or (None,)
        row = connection.execute(_DAMAGES.get(damage, due).encode(), {"content": content}).fetchone()
        assert row is not None
        return row[0]


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

    def damages(self) -> Damages:
        return damages_of(self.damage)

    def damage(self, message_id: str, damage: Damage) -> bytes:
        find = "SELECT number FROM record WHERE message_id = %s AND kind = 1"
        with psycopg.connect(self.url) as connection:
            connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", (self.schema,))
            (table,) = connection.execute("SELECT name FROM store").fetchone() or (None,)
        due = (
            f"UPDATE \"{table}\" SET due = '0044-03-15 12:00:00+00 BC', attempt_at = '0044-03-15 12:00:00+00 BC' "
            f"WHERE number = %(content)s RETURNING convert_to(due::text, 'UTF8')"
        )
        if damage is Damage.DESTINATION:
            due = f"""
                UPDATE "{table}" SET destination = ' ' WHERE number = %(content)s
                RETURNING convert_to(destination, 'UTF8')"""
        return damaged(self.url, self.schema, find, due, message_id, damage)

    def refusals(self, store: DelayedMessageStore) -> Mapping[str, AbstractContextManager[object]]:
        states = {"read-only": "25006", "full": "53100", "out of memory": "53200", "failing disk": "58030"}
        states |= {"shutting down": "57P01", "serialization": "40001", "too many connections": "53300"}
        return {name: self._refusing(state) for name, state in states.items()}

    @contextmanager
    def _refusing(self, state: str) -> Generator[None]:
        """Have a trigger answer for the server."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", (self.schema,))
            connection.execute(
                f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ "
                f"BEGIN RAISE EXCEPTION 'as the server' USING ERRCODE = '{state}'; END $$".encode()
            )
            connection.execute("CREATE TRIGGER refuse BEFORE INSERT ON content EXECUTE FUNCTION refuse()")
            yield
            connection.execute("DROP FUNCTION refuse CASCADE")

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

    def damages(self) -> Damages:
        return damages_of(self.damage, [each for each in Damage if each is not Damage.DESTINATION])

    def damage(self, message_id: str, damage: Damage) -> bytes:
        find = "SELECT content FROM queue_message WHERE message_id = %s"
        due = (
            "UPDATE queue_message SET due = '-infinity' WHERE content = %(content)s "
            "RETURNING convert_to(due::text, 'UTF8')"
        )
        return damaged(self.url, self.schema, find, due, message_id, damage)

    def store(self) -> MovingStore:
        store = PostgresStore(self.url, schema=self.schema, table="conformance.timeouts")
        store.database.setup_blocking("conformance.timeouts")
        return store

    def drop(self) -> None:
        drop_schema(self.url, self.schema)
