"""Messages move from one Postdate store into another, both delivering, and the command is killed with -9 meanwhile.

    eval "$(scripts/services env)"; .venv/bin/python benchmarks/store_migration.py [--messages 50000] [--kills 20]

Both stores are in PostgreSQL, each with a service that moves what is due into a queue beside it. The command is killed
at random moments, again and again, and resumed or aborted each time; when a migration is through, the next begins with
new stores, until there were so many kills. In the end both services deliver everything that is left, due or not, and
every message must be in one of the two queues, once, as it was. See ``migration.py``, which has the kills.
"""

import argparse
import os
import random
import sys
import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from multiprocessing.synchronize import Event
from typing import ClassVar

import anyio
from migration import BODY_BYTES, ENDPOINT, NEAR_SECONDS, NEAR_SHARE, QUEUE, Site, killed_often

from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.clock import SystemClock
from postdate.messages import DelayedMessage
from postdate.pipeline.stores import StoreSpec, opened

STORED_AT_ONCE = 5_000


class StoreSite(Site):
    """Where it all happens; ``old`` is the schema of the old store."""

    option: ClassVar[str] = "--from-store"
    steps: ClassVar[str] = "SELECT count(*), 0 FROM record WHERE kind = 6"
    on_spark: ClassVar[bool] = False

    def fill(self, count: int) -> None:
        """Set the old store up, and store messages; each has another content, and some are due soon."""
        with opened(StoreSpec(self.url, schema=self.old, endpoint=ENDPOINT), create=True) as store:
            store.setup()
            anyio.run(self._make_queue)
            now, chance = SystemClock().now(), random.Random(count)
            for start in range(0, count, STORED_AT_ONCE):
                store.store_many(list(_messages(range(start, min(start + STORED_AT_ONCE, count)), now, chance)), now)
        with self.connect(self.old) as connection:
            connection.execute(
                f"""CREATE TABLE expected AS SELECT message_id AS id, due, headers, body
                FROM "{ENDPOINT}.timeouts" JOIN content USING (number)""".encode()
            )

    async def _make_queue(self) -> None:
        transport = PostgresTransport(self.url, schema=self.old)
        await transport.create_queues([QUEUE])
        await transport.close()

    def fire(self, stopping: Event, everything: Event) -> None:
        """Deliver what is due in the old store; once ``everything`` is set, what is not due as well."""
        anyio.run(self._fire, stopping, everything)

    async def _fire(self, stopping: Event, everything: Event) -> None:
        for ahead in (timedelta(0), timedelta(days=1_000)):
            store = PostgresStore(self.url, schema=self.old, table=f"{ENDPOINT}.timeouts")
            try:
                moved = 1
                while not stopping.is_set() and (moved or not everything.is_set()):
                    moved = (await store.move_due(SystemClock().now() + ahead, 1_000)).delivered
                    await anyio.sleep(0 if moved else 0.2)
            finally:
                await store.close()

    def accounted(self) -> dict[str, int]:
        """Return who delivered how many, and what is wrong, by id and by content; and what still waits anywhere."""
        delivered = " UNION ALL ".join(
            f'SELECT m.message_id AS id, m.due, c.headers, c.body FROM "{schema}".queue_message AS m '
            f'JOIN "{schema}".content AS c ON c.number = m.content'
            for schema in (self.old, self.new)
        )
        with self.connect(self.old) as connection:
            row = connection.execute(
                f"""
                WITH delivered AS ({delivered}), times AS (SELECT id, count(*) AS n FROM delivered GROUP BY id)
                SELECT (SELECT count(*) FROM expected), (SELECT count(*) FROM queue_message),
                    (SELECT count(*) FROM "{self.new}".queue_message),
                    (SELECT count(*) FROM expected LEFT JOIN times USING (id) WHERE n IS NULL),
                    (SELECT count(*) FROM times WHERE n > 1),
                    (SELECT count(*) FROM times LEFT JOIN expected AS e USING (id) WHERE e.id IS NULL),
                    (SELECT count(*) FROM delivered AS d JOIN expected AS e USING (id)
                        WHERE d.body <> e.body OR d.headers::jsonb <> e.headers::jsonb OR d.due <> e.due)
                """.encode()
            ).fetchone()
        assert row is not None
        names = ("messages", "by_old_service", "by_new_service", "never", "twice", "unknown", "changed")
        return dict(zip(names, row, strict=True))


def _messages(numbers: Iterable[int], now: datetime, chance: random.Random) -> Iterable[DelayedMessage]:
    for number in numbers:
        is_near = chance.random() < NEAR_SHARE
        near, far = timedelta(seconds=NEAR_SECONDS), timedelta(hours=1) + timedelta(days=300) * chance.random()
        due = now + (near * chance.random() if is_near else far)
        headers = {"NServiceBus.MessageId": str(number), "NServiceBus.ContentType": "application/json"}
        yield DelayedMessage(
            str(uuid.uuid4()), due, QUEUE, headers, f'{{"customer":{number}}}'.ljust(BODY_BYTES).encode()
        )


def main() -> int:
    """Run it all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", dest="timeouts", type=int, default=50_000)
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--url", default=os.environ.get("POSTDATE_POSTGRES_URL"))
    options = parser.parse_args()
    if not options.url:
        parser.error("which server? --url, or POSTDATE_POSTGRES_URL")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    return killed_often(options, seed, StoreSite)


if __name__ == "__main__":
    sys.exit(main())
