"""A client warns of a destination that does not exist: once for each queue, and only where it can know."""

import logging
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from tests import postgres_subjects

import postdate
from postdate import Client, LocalTransport, Postgres, SendOptions
from postdate.backends.sqlite.observation import FileObserver

HOUR = timedelta(hours=1)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Generator[list[str]]:
    """Return the warnings of missing queues, in order."""
    texts = list[str]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING and "queue" in record.getMessage():
                texts.append(record.getMessage())

    handler = Handler()
    logging.getLogger("postdate.client").addHandler(handler)
    yield texts
    logging.getLogger("postdate.client").removeHandler(handler)


@pytest.fixture
def client(tmp_path: Path) -> Generator[Client]:
    client = postdate.connect(f"sqlite:///{tmp_path / 'shop.db'}")
    yield client
    client.blocking.close()


async def test_each_missing_queue_is_named_once_with_the_command(
    client: Client, tmp_path: Path, warnings: list[str]
) -> None:
    queues = LocalTransport(tmp_path / "shop.db")
    await queues.create_queues(["bills"])
    await queues.close()
    for destination in ("mails", "bills", "mails", "stocks"):
        await client.send(b"", destination=destination, delay=HOUR)
    await client.send_many([(b"", SendOptions(each, HOUR)) for each in ("mails", "letters")])
    await client.replace(b"", key="k", destination="postcards", delay=HOUR)
    for text, queue in zip(warnings, ("mails", "stocks", "letters", "postcards"), strict=True):
        assert f"no queue '{queue}'" in text
        assert f"create it: postdate setup --queue {queue}" in text


async def test_a_queue_is_looked_for_once(client: Client, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    queries, browse = list[str](), FileObserver.browse

    async def count(self: FileObserver, queue: str, limit: int, after: int = 0):
        queries.append(queue)
        return await browse(self, queue, limit, after)

    monkeypatch.setattr(FileObserver, "browse", count)
    for _ in range(20):
        await client.send(b"", destination="mails", delay=HOUR)
    assert queries == ["mails"]
    assert len(warnings) == 1


async def test_queues_that_are_elsewhere_are_not_looked_for(tmp_path: Path, warnings: list[str]) -> None:
    async with postdate.connect(
        f"sqlite:///{tmp_path / 'shop.db'}", transport=f"sqlite:///{tmp_path / 'queues.db'}"
    ) as client:
        await client.send(b"", destination="mails", delay=HOUR)
    assert warnings == []


async def test_a_message_of_an_open_transaction_is_looked_at_too(postgres_url: str, warnings: list[str]) -> None:
    schema = postgres_subjects.fresh_schema()
    async with postdate.connect(postgres_url, schema=schema) as client:
        async with Postgres(postgres_url, schema=schema) as database:
            await database.queues.create_queues(["bills"])
        with psycopg.connect(postgres_url) as connection:
            for destination in ("mails", "bills", "mails"):
                await client.send(b"", destination=destination, delay=HOUR, transaction=connection)
    postgres_subjects.drop_schema(postgres_url, schema)
    (text,) = warnings
    assert "no queue 'mails'" in text
    assert "create it: postdate setup --queue mails" in text
