"""What each adapter can do is generated from the adapters and reviewed as a diff of docs/capabilities.md."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.conformance.answers import ANSWERS, QUESTIONS, answers_table
from tests.conformance.matrix import capability_matrix, promise_matrix
from tests.conformance.test_documents import existing
from tests.msmq_fake import QueueManager

from postdate import (
    AzureStorageQueueTransport,
    AzureTableStore,
    LocalTransport,
    MariaDbStore,
    MemoryStore,
    MemoryTransport,
    MsmqTransport,
    PostgresStore,
    PostgresTransport,
    RabbitMqTransport,
    SqliteStore,
    SqlServerStore,
)
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.backends.registry import _import_own_backends
from postdate.testing import store_checks, transport_checks

DOCUMENT = Path(__file__).parents[2] / "docs" / "capabilities.md"


@pytest.mark.parametrize("matrix", [capability_matrix, promise_matrix], ids=lambda matrix: matrix.__name__)
async def test_the_documented_matrix_is_what_the_adapters_say(matrix: Callable[..., str], tmp_path: Path) -> None:
    """To bring the document up to date, put the table that this test prints into it."""
    async with AsyncExitStack() as adapters:
        # None of the servers is asked: what an adapter can do is known before it connects.
        stores = {
            "`MemoryStore`": MemoryStore(),
            "`SqliteStore`": SqliteStore(tmp_path / "a.db"),
            "`PostgresStore`": PostgresStore("postgresql://nowhere/a"),
            "`MariaDbStore`": MariaDbStore("mariadb://nowhere/a"),
            "`SqlServerStore`": SqlServerStore("mssql://nowhere/a"),
            "`RedisStore`": RedisStore("redis://nowhere"),
            "`AzureTableStore`": AzureTableStore("UseDevelopmentStorage=true"),
        }
        transports = {
            "`MemoryTransport`": MemoryTransport(),
            "`LocalTransport`": LocalTransport(tmp_path / "a.db"),
            "`PostgresTransport`": PostgresTransport("postgresql://nowhere/a"),
            "`RabbitMqTransport`": RabbitMqTransport("amqp://nowhere"),
            "`RedisTransport`": RedisTransport("redis://nowhere"),
            "`AzureStorageQueueTransport`": AzureStorageQueueTransport("UseDevelopmentStorage=true"),
            "`MsmqTransport`": MsmqTransport(com=QueueManager().process()),
        }
        for adapter in (*stores.values(), *transports.values()):
            adapters.push_async_callback(adapter.close)
        table = matrix(stores, transports)
    is_documented(table)


def is_documented(table: str) -> None:
    if table not in DOCUMENT.read_text(encoding="utf-8"):
        pytest.fail(f"{DOCUMENT.name} must contain\n\n{table}", pytrace=False)


def test_every_backend_answers_the_same_questions_as_the_document_says() -> None:
    """To bring the document up to date, change ``answers.py``, and put the table that this test prints into it."""
    assert list(ANSWERS) == [each.product for each in _import_own_backends()]
    assert all(set(answers) == set(QUESTIONS) for answers in ANSWERS.values())
    is_documented(answers_table())


def test_each_answer_names_a_check_that_its_backend_is_put_to_or_a_test() -> None:
    known, of_stores, of_queues = existing(), set(map(str, store_checks())), set(map(str, transport_checks()))
    for backend in _import_own_backends():
        checks = (of_stores if backend.store else set()) | (of_queues if backend.transport else set())
        for question, answer in ANSWERS[backend.product].items():
            assert answer.proofs, (backend.product, question)
            for proof in answer.proofs:
                assert proof in (known if "::" in proof else checks), (backend.product, question, proof)
