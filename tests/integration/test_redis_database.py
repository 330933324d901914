"""One object for a database of Redis: an endpoint takes all from it, on one set of connections and one sign of life."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

import anyio
import pytest
from tests.integration.test_redis import NOW, SECOND, message
from tests.redis_subjects import Prefix
from tests.waiting import received, until

from postdate import Endpoint, Envelope, HandlerContext, Headers, Recoverability, SystemClock, TransactionMode
from postdate.backends.redis.database import Redis
from postdate.backends.redis.layout import format_instant
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.endpoint.outgoing import timeouts_queue_envelope
from postdate.errors import ConfigurationError
from postdate.ports import Completion, Outcome
from postdate.wiring import open_store, open_transport
from postdate.wiring.adapters import Databases


@pytest.fixture
async def database(prefix: Prefix) -> AsyncIterator[Redis]:
    async with Redis(prefix.login) as made:
        await made.store.initialize("service", TransactionMode.TRANSACTION_SCOPE)
        await made.queues.create_queues(["done"])
        yield made


def holders(prefix: Prefix) -> int:
    found = prefix.client.zcard(f"{prefix.login.tag}:holders")
    assert isinstance(found, int)
    return found


@dataclass
class Work:
    number: int


async def test_an_endpoint_takes_store_and_queues_from_it(prefix: Prefix) -> None:
    async with Redis(prefix.login) as database:
        endpoint = Endpoint("sales", database, transaction_mode=TransactionMode.TRANSACTION_SCOPE)
        handled, done = list[int](), anyio.Event()

        @endpoint.handler(Work, name="Work")
        async def handle(work: Work, _context: HandlerContext) -> None:
            handled.append(work.number)
            done.set()

        assert endpoint.transport is database.queues
        assert endpoint.delayed_delivery is not None
        assert endpoint.delayed_delivery.store is database.store
        await database.store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
        await database.store.setup()
        await database.queues.create_queues(["sales", "sales.timeouts", "error"])
        async with endpoint:
            await endpoint.send(Work(7), destination="sales", delay=timedelta(milliseconds=50))
            await done.wait()
            assert holders(prefix) == 1
        assert handled == [7]
    assert holders(prefix) == 0


async def test_another_message_under_a_used_id_is_an_error_of_the_handler_that_delays_it(prefix: Prefix) -> None:
    async with Redis(prefix.login) as database:
        one_try = Recoverability(immediate_retries=0, delayed_retries=0)
        endpoint = Endpoint("sales", database, recoverability=one_try)
        hour = timedelta(hours=1)

        @endpoint.handler(Work, name="Work")
        async def handle(work: Work, context: HandlerContext) -> None:
            await context.send(b"%d" % work.number, destination="sales", delay=hour, message_id="mine")

        async with endpoint:
            await endpoint.send(b"1", destination="sales", delay=hour, message_id="mine")
            await endpoint.send(Work(1))  # the same again, which passes
            await endpoint.send(Work(2), message_id="handled")
            receiver = database.queues.receiver("error")
            (failed,) = await received(receiver, 1)
            await receiver.close()
            waiting = await database.store.get("mine")
    assert waiting is not None
    assert waiting.body == b"1"
    assert failed.envelope.message_id == "handled"
    assert failed.envelope.headers[Headers.ERROR_CODE] == "duplicate_message"


async def test_what_failed_comes_back_through_the_timeouts_queue(prefix: Prefix) -> None:
    """`errors return` puts it there; what takes it off the queue stores it, in one script."""
    async with Redis(prefix.login) as database:
        endpoint = Endpoint("sales", database)
        async with endpoint:
            late = message(due=SystemClock().now() + timedelta(hours=1))
            await database.store.store(late, NOW)
            (claim,) = await database.store.claim_due(late.due + SECOND, 1)
            await database.store.finish([claim], Outcome.FAILED, NOW)
            await database.queues.send([timeouts_queue_envelope(late, "sales.timeouts")], NOW)
            assert await until(lambda: database.store.get(late.message_id)) == late


async def test_a_second_endpoint_that_delays_messages_needs_an_object_of_its_own(prefix: Prefix) -> None:
    async with Redis(prefix.login) as database:
        Endpoint("sales", database)
        with pytest.raises(ConfigurationError, match="'sales' wait in the store of this Redis"):
            Endpoint("billing", database)


async def test_each_is_made_once_and_others_are_made_from_it(database: Redis) -> None:
    assert database.store is database.store
    assert database.queues is database.queues
    other = RedisStore(database, table="other")
    assert other is not database.store
    await other.close()
    with pytest.raises(ConfigurationError, match="holds_at_most="):
        RedisStore(database, holds_at_most=SECOND)
    with pytest.raises(ConfigurationError, match="answers_within="):
        RedisTransport(database, answers_within=SECOND)


async def test_a_transaction_announces_the_earliest_of_all_that_it_stores(database: Redis, prefix: Prefix) -> None:
    """Its messages come in one part for each call that delays some."""
    with prefix.client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(f"{database.store.key_prefix}:wake")
        await database.queues.send([Envelope("done", "e-1")], NOW)
        receiver = database.queues.receiver("done")
        (received,) = await receiver.receive(1)
        later, soon = message("later", NOW + 60 * SECOND), message("soon", NOW + SECOND)
        work = [database.store.storing_work([each], NOW) for each in (later, soon)]
        await receiver.commit(received, NOW, Completion(work=work))
        said = await until(lambda: channel.get_message(timeout=0))
        assert said["data"].decode() == format_instant(soon.due)
        await receiver.close()


async def test_closing_the_store_gives_back_its_claims_and_leaves_the_queues_alone(
    database: Redis, prefix: Prefix
) -> None:
    await database.store.store(message(), NOW)
    await database.queues.send([Envelope("done", "e-1")], NOW)
    receiver = database.queues.receiver("done")
    (received,) = await receiver.receive(1)
    (claim,) = await database.store.claim_due(NOW + SECOND, 1)
    await database.store.close()
    assert not database.store.is_in_force(claim)
    again = RedisStore(prefix.login, table="service.timeouts")
    assert len(await again.claim_due(NOW + SECOND, 1)) == 1
    await again.close()
    await receiver.commit(received, NOW)


async def test_closing_the_queues_gives_back_what_was_received_and_leaves_the_store_alone(
    database: Redis, prefix: Prefix
) -> None:
    await database.store.store(message(), NOW)
    await database.queues.send([Envelope("done", "e-1")], NOW)
    receiver = database.queues.receiver("done")
    await receiver.receive(1)
    (claim,) = await database.store.claim_due(NOW + SECOND, 1)
    await database.queues.close()
    elsewhere = RedisTransport(prefix.login)
    other = elsewhere.receiver("done")
    assert len(await other.receive(1)) == 1
    await other.close()
    await elsewhere.close()
    assert database.store.is_in_force(claim)
    assert await database.store.release([claim], None) == 1


async def test_the_last_that_closes_closes_all(database: Redis, prefix: Prefix) -> None:
    now = SystemClock().now()
    await database.store.claim_due(now, 1)
    assert holders(prefix) == 1
    await database.queues.close()
    assert holders(prefix) == 1
    await database.store.close()
    assert holders(prefix) == 0
    await database.close()
    await database.close()


async def test_equal_addresses_in_the_settings_are_one_database(redis_url: str) -> None:
    shared, address = Databases(), f"{redis_url}?prefix=shared-by-wiring"
    store = open_store(address, shared, table="service.timeouts")
    queues = open_transport(address, shared)
    assert isinstance(store, RedisStore)
    assert isinstance(queues, RedisTransport)
    assert store._database is queues._database
    await store.close()
    await queues.close()
