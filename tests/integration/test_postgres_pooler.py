"""PostgreSQL behind a pooler, which gives sessions away, and says other numbers of them: refused, in one sentence."""

from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from tests.servers import PgBouncer, PostgreSQL

from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.clock import SystemClock
from postdate.errors import StoreUnreachable, TransportUnreachable
from postdate.messages import DelayedMessage

SAID = "a pooler such as pgbouncer answers there.* name host and port of PostgreSQL itself$"


async def test_a_pooler_is_recognised_at_connect_whatever_is_asked_first(pgbouncer_url: str, postgres_url: str) -> None:
    """It takes settings of sessions without a word; nothing was locked, or prepared, on a session of the server."""
    store, transport = PostgresStore(pgbouncer_url, table="any"), PostgresTransport(pgbouncer_url)
    now = SystemClock().now()
    for asked in (
        store.setup,
        store.next_due,
        store.server_facts,
        lambda: store.store(DelayedMessage("m", now, "q"), now),
    ):
        with pytest.raises(StoreUnreachable, match=SAID):
            await asked()
    with pytest.raises(TransportUnreachable, match=SAID):
        await transport.queue_lengths()
    await store.close()
    await transport.close()
    with psycopg.connect(postgres_url) as connection:
        locks = connection.execute(
            "SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid) "
            "WHERE l.locktype = 'advisory' AND a.datname = current_database()"
        )
        assert locks.fetchone() == (0,)


@pytest.mark.parametrize(("mode", "ignores"), [("transaction", ""), ("session", "options")])
async def test_so_is_one_that_refuses_settings_of_sessions_and_one_that_keeps_a_session_for_each(
    server_folder: Path, postgres_url: str, mode: str, ignores: str
) -> None:
    """A session is begun with settings, and is ended by its number when it does not answer: neither comes through."""
    pooler = PgBouncer(server_folder / "pgbouncer", _Behind(postgres_url), ignores, mode)
    pooler.start()
    try:
        store = PostgresStore(pooler.url, table="any")
        with pytest.raises(StoreUnreachable, match=SAID):
            await store.setup()
        await store.close()
    finally:
        pooler.kill()


class _Behind(PostgreSQL):
    """A server that runs already, whoever has started it."""

    def __init__(self, url: str) -> None:
        self._url = url

    def is_up(self) -> bool:
        return True

    @property
    def port(self) -> int:
        return urlsplit(self._url).port or 5432
