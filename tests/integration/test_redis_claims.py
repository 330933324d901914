"""What is held in Redis when answers are lost, or come late: nothing is held that nobody knows of."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from datetime import timedelta

import anyio
import pytest
from tests.integration.test_redis import NOW, SECOND, message, prepared, stop_beats
from tests.proxy import FaultyLink
from tests.redis_subjects import Prefix
from tests.waiting import until
from typing_extensions import override

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    Envelope,
    HandlerContext,
    Recoverability,
    SystemClock,
    TransactionMode,
)
from postdate.backends.redis.layout import Part
from postdate.backends.redis.liveness import HOLDS_AT_MOST
from postdate.backends.redis.login import RedisLogin
from postdate.backends.redis.server import RedisServer, script
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.errors import ClaimLost, PostdateError, StoreUnreachable, TransportUnreachable
from postdate.ports import Claim, Completion, Outcome, Received, RecordKind


@pytest.fixture
def link(prefix: Prefix) -> Iterator[FaultyLink]:
    """The way to a server that knows all scripts: else the first answer would be that it does not know one."""
    for name in ("claim", "receive", "release", "retry", "roll_back", "transact"):
        prefix.client.script_load(script(name).text)
    with FaultyLink(prefix.login.host, prefix.login.port) as made:
        yield made


@pytest.fixture
def through(prefix: Prefix, link: FaultyLink) -> RedisLogin:
    known = prefix.login
    return RedisLogin("127.0.0.1", link.port, known.database, known.prefix, known.user, known.password)


@pytest.fixture
async def store(through: RedisLogin) -> AsyncIterator[RedisStore]:
    made = await prepared(RedisStore(through))
    yield made
    await made.close()


@pytest.fixture
async def transport(through: RedisLogin) -> AsyncIterator[RedisTransport]:
    made = RedisTransport(through)
    await made.create_queues(["done", "error"])
    yield made
    await made.close()


def held(prefix: Prefix) -> list[object]:
    """Return the keys of all that any process holds, as the server has it."""
    holders = [key for key in prefix.all_keys() if b":held:" in key]
    return [key for holder in holders for key in prefix.client.hkeys(holder)]


def ready(prefix: Prefix, queue: str = "done") -> int:
    found = prefix.client.zcard(f"{prefix.login.tag}:q:{queue}:ready")
    assert isinstance(found, int)
    return found


async def lose_the_answer(
    link: FaultyLink, call: Callable[[], Awaitable[object]], has_run: Callable[[], bool], error: type[PostdateError]
) -> None:
    """Make a call whose script runs, and whose answer never comes: the connection ends first."""
    link.stall(replies_only=True)
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            with pytest.raises(error):
                await call()

        tasks.start_soon(wait)
        await until(has_run)
        link.cut()
        link.restore()


def hold_back_the_answer(server: RedisServer, name: str, monkeypatch: pytest.MonkeyPatch) -> anyio.Event:
    """Have the next answer of a script heard only when the event is set that is returned."""
    run, may_be_heard = server.run, anyio.Event()

    async def slow(called: str, *arguments: Part) -> object:
        answer = await run(called, *arguments)
        if called == name:
            monkeypatch.undo()
            await may_be_heard.wait()
        return answer

    monkeypatch.setattr(server, "run", slow)
    return may_be_heard


def fail_once(server: RedisServer, name: str, error: PostdateError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next call of a script fail before it is run."""
    run = server.run

    async def failing(called: str, *arguments: Part) -> object:
        if called == name:
            monkeypatch.undo()
            raise error
        return await run(called, *arguments)

    monkeypatch.setattr(server, "run", failing)


# --- queues -----------------------------------------------------------------------------------------------------------


async def test_what_was_received_beside_something_that_could_not_be_marked_is_given_back(
    transport: RedisTransport, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    await transport.send([Envelope("done", f"e-{number}") for number in range(2)], NOW)
    tag = prefix.login.tag.encode()
    (first, _) = [key for key in prefix.all_keys() if key.startswith(tag + b":qm:")]
    bad = prefix.client.hget(first, "i")
    prefix.client.hset(first, "h", "no headers")
    receiver = transport.receiver("done")
    fail_once(transport._server, "mark_unreadable", TransportUnreachable("away"), monkeypatch)
    with pytest.raises(TransportUnreachable):
        await receiver.receive(2)
    (again,) = await receiver.receive(2)
    assert again.envelope.message_id.encode() != bad
    await receiver.close()


async def test_what_could_not_be_given_back_when_a_receiver_was_closed_is_given_back_with_a_beat(
    transport: RedisTransport, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    await transport.send([Envelope("done", "e-1")], NOW)
    receiver = transport.receiver("done")
    assert len(await receiver.receive(1)) == 1
    fail_once(transport._server, "undo", TransportUnreachable("away"), monkeypatch)
    with pytest.raises(TransportUnreachable):
        await receiver.close()
    await until(lambda: ready(prefix) == 1)
    assert held(prefix) == []


async def test_a_message_received_again_before_its_giving_back_was_answered_is_held_and_can_be_committed(
    transport: RedisTransport, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same number in its queue: the late answer must not take the new claim for the old one."""
    await transport.send([Envelope("done", "e-1")], NOW)
    receiver = transport.receiver("done")
    (first,) = await receiver.receive(1)
    answered = hold_back_the_answer(transport._server, "roll_back", monkeypatch)
    received = list[Received]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receiver.roll_back, first)
        received += await receiver.receive(1)
        answered.set()
    await receiver.commit(received[0], NOW)
    with pytest.raises(ClaimLost):
        await receiver.commit(first, NOW)
    assert held(prefix) == []
    assert ready(prefix) == 0
    await receiver.close()


async def test_what_was_received_by_an_answer_that_was_lost_is_received_again(
    transport: RedisTransport, prefix: Prefix, link: FaultyLink
) -> None:
    receiver = transport.receiver("done")
    await transport.send([Envelope("done", "e-1")], NOW)
    (one,) = await receiver.receive(1)
    await receiver.commit(one, NOW)
    await transport.send([Envelope("done", f"e-{number}") for number in (2, 3)], NOW)
    await lose_the_answer(link, lambda: receiver.receive(10), lambda: len(held(prefix)) == 2, TransportUnreachable)
    received = await receiver.receive(10)
    assert [each.envelope.message_id for each in received] == ["e-2", "e-3"]
    for each in received:
        await receiver.commit(each, NOW)
    assert held(prefix) == []
    await receiver.close()


async def test_a_giving_back_whose_answer_was_lost_took_place_once(
    transport: RedisTransport, prefix: Prefix, link: FaultyLink
) -> None:
    receiver = transport.receiver("done")
    await transport.send([Envelope("done", "e-1")], NOW)
    (first,) = await receiver.receive(1)
    await lose_the_answer(link, lambda: receiver.roll_back(first), lambda: ready(prefix) == 1, TransportUnreachable)
    (again,) = await receiver.receive(1)
    assert again.failures == 1
    with pytest.raises(ClaimLost):
        await receiver.roll_back(first)
    await receiver.commit(again, NOW)
    assert (held(prefix), ready(prefix)) == ([], 0)
    await receiver.close()


async def test_a_commit_whose_answer_was_lost_took_place_once(
    transport: RedisTransport, prefix: Prefix, link: FaultyLink
) -> None:
    receiver = transport.receiver("done")
    await transport.send([Envelope("done", "e-1")], NOW)
    (received,) = await receiver.receive(1)
    end = Completion(outgoing=[Envelope("error", "sent")])

    async def commit() -> None:
        await receiver.commit(received, NOW, end)

    await lose_the_answer(link, commit, lambda: ready(prefix, "error") == 1, TransportUnreachable)
    with pytest.raises(ClaimLost):
        await receiver.commit(received, NOW, end)
    with pytest.raises(ClaimLost):
        await receiver.roll_back(received)
    assert (held(prefix), ready(prefix), ready(prefix, "error")) == ([], 0, 1)
    await receiver.close()


async def test_what_a_cancelled_call_received_is_given_back_with_a_beat(
    transport: RedisTransport, prefix: Prefix, link: FaultyLink
) -> None:
    """No other call of this receiver need follow."""
    receiver = transport.receiver("done")
    assert await receiver.receive(1, wait=False) == []
    await transport.send([Envelope("done", "e-1")], NOW)
    link.stall(replies_only=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receiver.receive, 1)
        await until(lambda: len(held(prefix)) == 1)
        tasks.cancel_scope.cancel()
    link.restore()
    await until(lambda: ready(prefix) == 1)
    assert held(prefix) == []
    await receiver.close()


# --- stores -----------------------------------------------------------------------------------------------------------


async def test_what_was_claimed_beside_something_that_could_not_be_marked_is_given_back(
    store: RedisStore, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.store_many([message("m-1"), message("m-2")], NOW)
    (bad,) = [key for key in prefix.all_keys() if key.endswith(b":m:m-1")]
    prefix.client.hset(bad, "h", "no headers")
    fail_once(store._server, "mark_unreadable", StoreUnreachable("away"), monkeypatch)
    with pytest.raises(StoreUnreachable):
        await store.claim_due(NOW + SECOND, 2)
    (again,) = await store.claim_due(NOW + SECOND, 2)
    assert again.message.message_id == "m-2"


@pytest.mark.parametrize("damaged", ["no instant", "9" * 18])
@pytest.mark.parametrize("listing", [False, True])
async def test_a_move_that_was_made_is_told_though_a_field_of_its_message_is_damaged(
    store: RedisStore, prefix: Prefix, damaged: str, listing: bool
) -> None:
    """It fails after it was made otherwise, and nobody hears of what it moved."""
    transport = RedisTransport(prefix.login)
    await transport.create_queues(["done"])
    await store.store_many([message("m-1"), message("m-2")], NOW)
    (bad,) = [key for key in prefix.all_keys() if key.endswith(b":m:m-1")]
    prefix.client.hset(bad, "D", damaged)
    told = await store.move_due(NOW + SECOND, 10, listing=listing)
    assert (told.delivered, told.by_destination, told.first_due) == (2, {"done": 2}, NOW + SECOND)
    assert (told.messages and told.messages.dues) == ([NOW + SECOND, NOW] if listing else None)
    await transport.close()


async def test_what_was_claimed_by_an_answer_that_was_lost_is_claimed_again(
    store: RedisStore, prefix: Prefix, link: FaultyLink
) -> None:
    await store.store_many([message("a"), message("b")], NOW)
    (one,) = await store.claim_due(NOW + SECOND, 1)

    async def claim() -> Sequence[Claim]:
        return await store.claim_due(NOW + SECOND, 10)

    await lose_the_answer(link, claim, lambda: len(held(prefix)) == 2, StoreUnreachable)
    (other,) = await claim()
    assert {one.message.message_id, other.message.message_id} == {"a", "b"}
    assert store.is_in_force(one)
    assert await store.finish([one, other], Outcome.DELIVERED, NOW) == 2
    assert held(prefix) == []


@pytest.mark.parametrize("how", ["retry", "release"])
async def test_a_message_claimed_again_before_its_giving_back_was_answered_is_held(
    store: RedisStore, prefix: Prefix, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    await store.store(message(), NOW)
    (first,) = await store.claim_due(NOW + SECOND, 1)
    answered = hold_back_the_answer(store._server, how, monkeypatch)

    async def give_back() -> None:
        if how == "retry":
            assert await store.retry_later(first, NOW, NOW, "")
        else:
            assert await store.release([first], NOW) == 1

    claims: list[Claim] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(give_back)
        claims += await until(lambda: store.claim_due(NOW + SECOND, 1))
        answered.set()
    assert store.is_in_force(claims[0])
    assert not await store.retry_later(first, NOW, NOW, "")
    assert await store.finish(claims, Outcome.DELIVERED, NOW) == 1
    assert held(prefix) == []


async def test_a_claim_whose_transaction_failed_is_held_still(
    store: RedisStore, transport: RedisTransport, prefix: Prefix
) -> None:
    await store.store(message(), NOW)
    (claim,) = await store.claim_due(NOW + SECOND, 1)
    work = store.finishing_work([claim], Outcome.DELIVERED, NOW)
    with pytest.raises(PostdateError):
        await transport.send([Envelope("missing", "e-1")], NOW, work=[work])
    assert store.is_in_force(claim)
    assert await transport.send([Envelope("done", "e-1")], NOW, work=[work]) == [None]
    assert not store.is_in_force(claim)
    assert held(prefix) == []


async def test_a_message_without_a_queue_ends_in_the_error_queue(
    store: RedisStore, transport: RedisTransport, prefix: Prefix
) -> None:
    delivery = DelayedDelivery(store, number_of_retries=1, missing_queue_wait=timedelta(0))
    endpoint = Endpoint(
        "service",
        transport=transport,
        delayed_delivery=delivery,
        transaction_mode=TransactionMode.TRANSACTION_SCOPE,
        send_only=True,
    )
    now = SystemClock().now()
    async with endpoint:
        await store.store(DelayedMessage("m-1", now, "missing", {"kind": "test"}, b""), now)
        await until(lambda: ready(prefix, "error") == 1)
    assert held(prefix) == []
    assert (await store.record_counts())[RecordKind.FAILED] == 1


# --- silence ----------------------------------------------------------------------------------------------------------


async def test_a_message_that_loses_its_claim_whenever_it_is_handled_ends_in_the_error_queue(
    transport: RedisTransport, prefix: Prefix, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("postdate.endpoint.handling.MOST_RESTARTS", 2)
    settings = Recoverability(immediate_retries=0, delayed_retries=0)
    endpoint = Endpoint("done", transport=transport, recoverability=settings)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        await transport._server.run("unregister", transport._liveness.current_holder)

    async with endpoint:
        await endpoint.send(b"slow", destination="done")
        await until(lambda: ready(prefix, "error"))
    assert ready(prefix) == 0
    assert "moved to error queue error: HandlingInterrupted: it came back 3 times without an answer" in caplog.text


class Later(SystemClock):
    """As if more time had passed since the machine started."""

    def __init__(self, more: timedelta) -> None:
        super().__init__()
        self._more_seconds = more.total_seconds()

    @override
    def seconds_since_boot(self) -> float:
        return super().seconds_since_boot() + self._more_seconds


async def test_what_was_let_go_of_in_a_silence_is_claimed_again_although_nobody_else_was_there_to_take_it(
    prefix: Prefix, link: FaultyLink, store: RedisStore
) -> None:
    """By its own clock its claims are void, and it does not act on them; the server has heard nothing of that."""
    lost = list[str]()
    store.listen_for_lost_claims(lost.extend)
    await store.store(message(), NOW)
    (claim,) = await store.claim_due(NOW + SECOND, 1)
    link.cut()
    store._liveness._clock = Later(2 * HOLDS_AT_MOST)  # more than a process may be silent
    assert not store.is_in_force(claim)
    assert len(held(prefix)) == 1
    link.restore()
    claims = await until(lambda: store.claim_due(NOW + SECOND, 1), despite=StoreUnreachable)
    assert lost == ["m-1"]
    assert await store.finish([claim], Outcome.DELIVERED, NOW) == 0
    assert await store.finish(claims, Outcome.DELIVERED, NOW) == 1
    assert held(prefix) == []


async def test_a_claim_that_others_may_have_is_void_and_released_and_no_other_claim_is(
    prefix: Prefix, link: FaultyLink, store: RedisStore
) -> None:
    """Without subscription others take it 3 s after the last beat, long before ``holds_at_most``."""
    await store.store_many([message("m-1"), message("m-2")], NOW)
    one, other = await store.claim_due(NOW + SECOND, 10)
    assert store.is_in_force(one)
    link.cut()
    await until(lambda: not store.is_in_force(one))
    assert store._liveness.is_in_force
    link.restore()
    await until(lambda: len(held(prefix)) == 1)
    await until(lambda: store.get("m-1"), despite=StoreUnreachable)
    assert await store.finish([one], Outcome.DELIVERED, NOW) == 0
    assert store.is_in_force(other)
    assert await store.finish([other], Outcome.DELIVERED, NOW) == 1
    (again,) = await store.claim_due(NOW + SECOND, 10)
    assert store.is_in_force(again)
    assert await store.finish([again], Outcome.DELIVERED, NOW) == 1


async def test_a_subscription_that_is_newer_than_the_last_beat_makes_no_claim_certain(store: RedisStore) -> None:
    """Others may have looked when there was none."""
    await store.store(message(), NOW)
    (claim,) = await store.claim_due(NOW + SECOND, 1)
    await stop_beats(store)
    liveness = store._liveness
    liveness._clock = Later(2 * SECOND)
    assert store.is_in_force(claim)
    for channel in liveness._listening._subscribed_at:
        liveness._listening._subscribed_at[channel] = liveness._last_beat_at + 1
    assert not store.is_in_force(claim)


async def test_a_beat_without_an_answer_is_given_up_before_the_process_counts_as_frozen(
    through: RedisLogin, link: FaultyLink, caplog: pytest.LogCaptureFixture
) -> None:
    store = RedisStore(through, holds_at_most=3 * SECOND, answers_within=timedelta(minutes=10))
    try:
        await store._liveness.ensure_holder()
        link.stall(replies_only=True)
        await until(lambda: "cannot write the heartbeat of this process" in caplog.text)
    finally:
        link.cut()
        link.restore()
        await store.close()
