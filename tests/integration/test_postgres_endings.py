"""Messages that end at the same time share a commit, and each ends as if it were alone. ADR 0018."""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
from tests.integration.postgres_place import Place, now, placed
from tests.waiting import until

from postdate.errors import ClaimLost, PostdateError, QueueNotFound, StoreUnreachable
from postdate.messages import Envelope
from postdate.ports import Completion, Received, Receiver, RecordKind, Settlement

pytestmark = pytest.mark.anyio


async def held(place: Place, count: int) -> tuple[Receiver, Sequence[Received]]:
    await place.transport.send([Envelope("consumer", f"m-{n}") for n in range(count)], now())
    receiver = place.transport.receiver("consumer")
    return receiver, await receiver.receive(count)


async def ended(receiver: Receiver, ends: Sequence[tuple[Received, Completion]]) -> list[str]:
    """End messages at once; return how each ended: in the order of the messages."""
    outcomes = [""] * len(ends)

    async def end(number: int, received: Received, how: Completion) -> None:
        try:
            await receiver.commit(received, now(), how)
        except PostdateError as error:
            outcomes[number] = type(error).__name__

    async with anyio.create_task_group() as tasks:
        for number, (received, how) in enumerate(ends):
            tasks.start_soon(end, number, received, how)
    return outcomes


def sending(destination: str, number: int) -> Completion:
    return Completion(RecordKind.HANDLED, outgoing=[Envelope(destination, f"out-{number}")])


def transactions(place: Place) -> set[str]:
    """Return the transactions that have put messages into the queue ``next``."""
    return {
        str(xmin)
        for (xmin,) in place.rows(
            "SELECT m.xmin::text FROM queue_message AS m JOIN queue AS q USING (queue_id) WHERE q.name = 'next'"
        )
    }


async def test_those_that_end_at_once_share_a_transaction(postgres_url: str) -> None:
    async with placed(postgres_url, "next") as place:
        receiver, messages = await held(place, 20)
        assert await ended(receiver, [(each, sending("next", n)) for n, each in enumerate(messages)]) == [""] * 20
        assert (place.length("consumer"), place.length("next")) == (0, 20)
        assert len(transactions(place)) < 5


async def test_one_that_cannot_end_spoils_nothing_for_the_others(postgres_url: str) -> None:
    async with placed(postgres_url, "next") as place:
        receiver, messages = await held(place, 20)
        place.run("UPDATE queue_message SET holder = 0 WHERE message_id = 'm-7'")  # as after the loss of our connection
        ends = [(each, sending("nowhere" if n == 3 else "next", n)) for n, each in enumerate(messages)]
        expected = {3: QueueNotFound.__name__, 7: ClaimLost.__name__}
        assert await ended(receiver, ends) == [expected.get(n, "") for n in range(20)]
        assert (place.length("consumer"), place.length("next")) == (2, 18)
        assert not place.rows("SELECT 1 FROM queue_message WHERE message_id = 'out-7'")


async def test_of_those_that_send_nothing_only_what_was_lost_is_told(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        receiver, messages = await held(place, 20)
        place.run("UPDATE queue_message SET holder = 0 WHERE message_id = 'm-7'")
        expected = [ClaimLost.__name__ if n == 7 else "" for n in range(20)]
        assert await ended(receiver, [(each, Completion()) for each in messages]) == expected
        assert place.length("consumer") == 1


async def test_an_outage_is_told_to_all_and_nothing_is_lost(postgres_url: str) -> None:
    async with placed(postgres_url, "next") as place:
        receiver, messages = await held(place, 20)
        place.run("ALTER TABLE queue_message RENAME TO elsewhere")
        ends = [(each, sending("next", n)) for n, each in enumerate(messages)]
        assert all(await ended(receiver, ends))
        place.run("ALTER TABLE elsewhere RENAME TO queue_message")
        assert await ended(receiver, ends) == [""] * 20
        assert (place.length("consumer"), place.length("next")) == (0, 20)


async def test_a_commit_that_waits_for_others_is_no_failure_of_those_that_end(postgres_url: str) -> None:
    """As where the disk is slow: commits that notify go one after the other."""
    waits = "wait_event_type = 'Lock' AND query = 'COMMIT' AND clock_timestamp() - query_start > interval '200 ms'"
    async with placed(postgres_url) as place:
        receiver, messages = await held(place, 3)
        place.run(
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_advisory_xact_lock(27); RETURN NULL; END $$"
        )
        place.run(
            "CREATE CONSTRAINT TRIGGER wait AFTER DELETE ON queue_message DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION wait()"
        )
        outcomes, does_something = list[Sequence[Exception | None]](), Completion(work=[lambda _: None])

        async def settle() -> None:
            outcomes.append(await receiver.settle([Settlement(each, now(), does_something) for each in messages]))

        with place.connect() as connection:
            connection.execute("SELECT pg_advisory_lock(27)")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(settle)
                await until(lambda: bool(outcomes or place.rows(f"SELECT 1 FROM pg_stat_activity WHERE {waits}")))
                connection.execute("SELECT pg_advisory_unlock(27)")
        assert outcomes == [[None, None, None]]
        assert place.length("consumer") == 0


async def test_ending_goes_by_the_numbers_also_when_the_planner_thinks_that_nothing_is_held(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        await place.transport.send([Envelope("consumer", f"m-{n}") for n in range(500)], now())
        place.run("ANALYZE queue_message")
        numbers = [number for (number,) in place.rows("SELECT number FROM queue_message LIMIT 5")]
        values = {"queue": 1, "numbers": numbers, "holder": 1, "destination": "consumer"}
        values |= {key: list[object]() for key in ("recorded", "times", "kinds", "details")}
        with place.transport.database.connect() as connection:
            plan = connection.execute(b"EXPLAIN " + place.transport.sql.commit, values).fetchall()
        told = "\n".join(line for (line,) in plan)
        assert "queue_message_pkey" in told
        assert "queue_message_held" not in told


async def test_a_return_whose_answer_was_lost_does_not_free_the_next_claim_when_it_is_repeated(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the message was free while its handler ran, and two handlers had it."""
    async with placed(postgres_url) as place:
        receiver, (first,) = await held(place, 1)
        database = place.transport.database
        run = database.run_blocking

        def lose_answer(work: Callable[[Any], Any]) -> None:
            run(work)
            raise StoreUnreachable("the answer was lost")

        with monkeypatch.context() as patch:
            patch.setattr(database, "run_blocking", lose_answer)
            with pytest.raises(PostdateError, match="the answer was lost"):
                await receiver.roll_back(first)
        (second,) = await receiver.receive(1)
        await receiver.roll_back(first)
        await receiver.commit(second, now())
        assert place.length("consumer") == 0
