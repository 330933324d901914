"""What a lost answer leaves in doubt is settled, and what others do to the tables harms nobody. ADR 0007."""

from typing import Any

import anyio
import psycopg
import pytest
from tests.integration.postgres_place import SECOND, now, placed
from tests.waiting import received, until

from postdate.errors import StoreUnavailable, TransportUnavailable
from postdate.messages import Envelope
from postdate.ports import Outcome
from postdate.runtime.threads import WakeUp

pytestmark = pytest.mark.anyio


async def test_a_message_rescheduled_while_it_is_being_moved_is_delivered_once(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        await place.store.store_many([place.work(n, now() - (10 - n) * SECOND) for n in range(3)], now())
        sql = place.store._sql
        quick = sql.move_few
        # At the first row it waits for us, so that the others are changed after the statement has its snapshot.
        lock = f"{place.store.database.names.lock_class}, -1"
        waits = f"(p.message_id <> 'm-0' OR pg_advisory_xact_lock({lock}) IS NOT NULL)"
        sql.move_few = quick.decode().replace("WHERE (NOT EXISTS", f"WHERE {waits} AND (NOT EXISTS", 1).encode()
        async with anyio.create_task_group() as tasks:
            with place.connect() as connection:
                connection.execute(f"SELECT pg_advisory_lock({lock})".encode())
                tasks.start_soon(place.store.move_due, now(), 100)
                ours = f"classid = ({place.store.database.names.lock_class})::integer::oid AND objid::integer = -1"
                await until(lambda: place.rows(f"SELECT 1 FROM pg_locks WHERE NOT granted AND {ours}"))
                assert await place.store.reschedule("m-2", now() - SECOND, now())
                sql.move_few = quick
        await place.store.move_due(now(), 100)
        assert sorted(id_ for id_, _ in place.in_queue("consumer")) == ["m-0", "m-1", "m-2"]
        assert place.rows('SELECT count(*) FROM "service.timeouts"') == [(0,)]


class _LosesTheAnswerToCommit:
    """A connection whose COMMIT arrives, but not the answer."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def commit(self) -> None:
        self._connection.commit()
        self._connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")


async def test_the_rest_of_a_batch_whose_commit_is_in_doubt_can_be_given_back(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        await place.store.store_many([place.work(n, now() - SECOND, "elsewhere") for n in range(3)], now())
        claims = await place.store.claim_due(now(), 10)
        batch: Any = place.store._claims.tokens_of(claims)[0].batch
        batch.session = _LosesTheAnswerToCommit(batch.session)
        with pytest.raises(StoreUnavailable):
            await place.store.finish(claims[:1], Outcome.DELIVERED, now())
        given_back = [await place.store.retry_later(claim, now(), now(), "why") for claim in claims]
        assert given_back == [False, True, True]
        assert len(await place.store.claim_due(now() + SECOND, 10)) == 2


async def test_a_lease_that_nobody_was_given_is_freed_as_soon_as_the_server_answers(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with placed(postgres_url) as place:
        await place.store.store(place.work(1, now() - SECOND, "elsewhere"), now())
        claims: Any = place.store._claims

        def hold_and_lose(connection: Any, rows: Any) -> Any:
            tokens = type(claims).remember_batch(claims, connection, rows)
            tokens[0].batch.session = _LosesTheAnswerToCommit(connection)
            return tokens

        def unreachable(work: Any) -> Any:
            raise StoreUnavailable("the server is restarted")

        with monkeypatch.context() as outage:
            outage.setattr(claims, "remember_batch", hold_and_lose)
            outage.setattr(place.store.database, "run_blocking", unreachable)
            with pytest.raises(StoreUnavailable):
                await place.store.fetch_next_due(now())
        assert place.rows('SELECT holder IS NOT NULL FROM "service.timeouts"') == [(True,)]
        found = await place.store.fetch_next_due(now())
        assert found is not None
        assert found.message_id == "m-1"
        assert await place.store.remove("m-1", now())


async def test_received_messages_whose_claim_is_in_doubt_are_received_again(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with placed(postgres_url) as place:
        await place.transport.send([Envelope("consumer", f"e-{n}") for n in range(3)], now())
        receiver = place.transport.receiver("consumer")
        run, lost = place.transport.database.run_blocking, list[object]()

        def lose_the_answer(work: Any) -> Any:
            result = run(work)
            if isinstance(result, tuple) and result[0] and not lost:
                lost.append(result)
                raise StoreUnavailable("the connection was lost after the claim was committed")
            return result

        monkeypatch.setattr(place.transport.database, "run_blocking", lose_the_answer)
        with pytest.raises(TransportUnavailable):
            await receiver.receive(2)
        assert [each.envelope.message_id for each in await received(receiver, 3)] == ["e-0", "e-1", "e-2"]
        await receiver.close()


async def test_what_is_held_under_a_number_that_was_buried_is_freed(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        await place.transport.send([Envelope("consumer", "e-1")], now())
        await place.store.store(place.work(1, now() - SECOND, "elsewhere"), now())
        place.run("UPDATE queue_message SET holder = 2000000000")
        place.run('UPDATE "service.timeouts" SET holder = 2000000000, attempt_at = NULL')
        receiver = place.transport.receiver("consumer")
        assert [each.envelope.message_id for each in await received(receiver, 1)] == ["e-1"]
        alarm = WakeUp()
        stop = await place.store.listen(alarm.wake)
        while not await place.store.claim_due(now(), 10):
            await until(alarm.event.is_set)
            alarm.reset()
        stop()
        await receiver.close()


async def test_a_store_whose_table_was_dropped_harms_no_other(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        place.run("INSERT INTO store (name) VALUES ('retired')")
        place.run("INSERT INTO holder (holder, pid, machine, started_at) VALUES (2000000000, 1, 'dead', now())")
        await place.transport.send([Envelope("consumer", "e-1")], now())
        place.run("UPDATE queue_message SET holder = 2000000000")
        receiver = place.transport.receiver("consumer")
        listener = place.transport.database.listener()
        number = listener.wait_for_holder()
        await received(receiver, 1)
        assert listener.wait_for_holder() == number
        # What it held is free, and received, before it is buried.
        await until(lambda: place.rows("SELECT count(*) FROM holder WHERE holder = 2000000000") == [(0,)])
        await receiver.close()


async def test_notifications_of_strangers_do_no_harm(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        alarm = WakeUp()
        stop = await place.store.listen(alarm.wake)
        listener = place.store.database.listener()
        number = listener.wait_for_holder()
        store_id = place.rows("SELECT store_id FROM store")[0][0]
        with place.connect() as stranger:
            for payload in ("", "due", f"due {store_id} {10**20}", "due x y", "\U0001f570 1 2"):
                stranger.execute("SELECT pg_notify(%s, %s)", (listener.names.channel, payload))
        other = place.another_store()
        await other.initialize("service", next(iter(other.capabilities.transaction_modes)))
        await other.store(place.work(1, now()), now())
        await until(alarm.event.is_set)
        assert listener.wait_for_holder() == number
        stop()
        await other.close()


async def test_nothing_is_remembered_of_messages_that_ended_in_a_transaction_of_the_queues(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        await place.store.store_many([place.work(n, now() - SECOND, "elsewhere") for n in range(5)], now())
        claims = await place.store.claim_due(now(), 10)
        work = place.store.finishing_work(claims, Outcome.FAILED, now())
        await place.transport.send([Envelope("error", "copy")], now(), work=[work])
        assert await place.store.claim_due(now(), 10) == []
        assert place.store._claims._tokens == {}
