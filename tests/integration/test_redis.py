"""Redis when something breaks: its memory, its role, its scripts, its answers, and the processes that use it."""

import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from redis.exceptions import AuthenticationError, BusyLoadingError, MovedError, ReadOnlyError, ResponseError
from tests.redis_subjects import Prefix
from tests.servers import Redis
from tests.waiting import Eventually, freeze_processes, until

from postdate import DelayedMessage, Envelope, TransactionMode, errors
from postdate.backends.redis.layout import Part, format_instant, instant_of
from postdate.backends.redis.login import parse_address
from postdate.backends.redis.server import QUEUES, STORE, translate
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.clock import EARLIEST, LATEST, SystemClock
from postdate.config import Address
from postdate.ports import DeliveredMessage, MessageFilter, Outcome, Received

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)


def message(message_id: str = "m-1", due: datetime = NOW, body: bytes = b"body") -> DelayedMessage:
    return DelayedMessage(message_id, due, "done", {"kind": "test"}, body)


async def prepared(store: RedisStore) -> RedisStore:
    await store.initialize("service", TransactionMode.TRANSACTION_SCOPE)
    await store.setup()
    return store


@pytest.fixture
async def store(prefix: Prefix) -> AsyncIterator[RedisStore]:
    made = await prepared(RedisStore(prefix.login))
    yield made
    await made.close()


@pytest.fixture
async def transport(prefix: Prefix) -> AsyncIterator[RedisTransport]:
    made = RedisTransport(prefix.login)
    await made.create_queues(["done"])
    yield made
    await made.close()


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instant", [EARLIEST, NOW, datetime(2255, 6, 6, 1, 2, 3, 4, tzinfo=UTC), LATEST])
def test_instants_keep_their_microseconds_and_their_order_over_the_whole_calendar(instant: datetime) -> None:
    assert instant_of(format_instant(instant).encode()) == instant
    if instant < LATEST:
        assert format_instant(instant) < format_instant(instant + MICROSECOND)


async def test_what_is_due_at_the_end_of_the_calendar_is_due_to_the_microsecond(store: RedisStore) -> None:
    await store.store_many([message("last", LATEST), message("before", LATEST - MICROSECOND)], NOW)
    assert await store.next_attempt() == LATEST - MICROSECOND
    assert await store.claim_due(LATEST - MICROSECOND, 10) == []
    assert [claim.message.due for claim in await store.claim_due(LATEST, 10)] == [LATEST - MICROSECOND]
    assert await store.next_due() == LATEST - MICROSECOND
    assert await store.next_attempt() == LATEST


def test_an_address_says_everything_and_shows_no_password() -> None:
    login = parse_address("rediss://me:s%2Fcret@host:7000/3?prefix=shop&ca=/ca.pem")
    assert (login.host, login.port, login.database, login.prefix) == ("host", 7000, 3, "shop")
    assert (login.user, login.password, login.tls, login.authority) == ("me", "s/cret", True, "/ca.pem")
    assert "s/cret" not in repr(login)
    assert "cret" not in Address("redis://:s%2Fcret@host").redacted_text
    assert parse_address("redis://HOST").identity == parse_address("redis://host:6379/0").identity


@pytest.mark.parametrize(
    "address", ["redis://", "redis://host/one", "redis://host?speed=1", "redis://host?ca=x", "redis://host?prefix={a}"]
)
def test_an_address_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(errors.ConfigurationError):
        parse_address(address)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BusyLoadingError("Redis is loading the dataset in memory"), errors.StoreUnreachable),
        (ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), errors.StoreFull),
        (ResponseError("BUSY Redis is busy running a script."), errors.StoreUnreachable),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), errors.StoreUnreachable),
        (AuthenticationError("invalid username-password pair"), errors.StoreUnreachable),
        (ReadOnlyError("You can't write against a read only replica."), errors.StoreUnreachable),
        (MovedError("1 127.0.0.1:7000"), errors.StoreUnreachable),
        (ResponseError("WRONGTYPE Operation against a key"), errors.StoreTroubled),
        (ConnectionResetError("reset"), errors.StoreUnreachable),
    ],
)
def test_what_the_server_says_is_an_outage_or_not(error: Exception, kind: type) -> None:
    assert type(translate(error, STORE, "Redis")) is kind


def test_a_full_server_is_an_outage_to_queues() -> None:
    assert type(translate(ResponseError("MISCONF x"), QUEUES, "Redis")) is errors.TransportUnreachable


# --- the server -------------------------------------------------------------------------------------------------------


async def test_scripts_that_the_server_forgot_are_sent_again(store: RedisStore, prefix: Prefix) -> None:
    await store.store(message(), NOW)
    prefix.client.script_flush()
    assert len(await store.claim_due(NOW + SECOND, 10)) == 1


async def test_a_claim_and_a_receive_have_a_bound_of_bytes(store: RedisStore, transport: RedisTransport) -> None:
    """At most 16 MiB at once, so that no answer fills the memory."""
    receiver = transport.receiver("done")
    for number in range(3):
        body = bytes(6 * 1024 * 1024)
        await store.store(message(f"m-{number}", body=body), NOW)
        assert await transport.send([Envelope("done", f"e-{number}", {}, body)], NOW) == [None]
    for size in (2, 1):
        assert len(await store.claim_due(NOW + SECOND, 10)) == size
        assert len(await receiver.receive(10)) == size
    await receiver.close()


async def test_messages_without_a_queue_that_fill_a_page_delay_nothing_behind_them(
    store: RedisStore, transport: RedisTransport
) -> None:
    """A move reads what is due in pages of 500."""
    stuck = [DelayedMessage(f"stuck-{number:03}", NOW, "missing", {}, b"") for number in range(500)]
    await store.store_many([*stuck, message("m-1", NOW + SECOND)], NOW)
    report = await store.move_due(NOW + 2 * SECOND, 10)
    assert (report.delivered, report.needs_claim) == (1, True)


async def test_a_move_looks_past_some_thousand_messages_without_a_queue_and_no_more(
    store: RedisStore, transport: RedisTransport
) -> None:
    """For the length of a move the server does nothing else."""
    for begin in range(0, 6_000, 1_000):
        stuck = [DelayedMessage(f"stuck-{begin + number}", NOW, "missing", {}, b"") for number in range(1_000)]
        await store.store_many(stuck, NOW)
    await store.store(message("m-1", NOW + SECOND), NOW)
    report = await store.move_due(NOW + 2 * SECOND, 10)
    assert (report.delivered, report.needs_claim) == (0, True)


async def test_large_messages_are_listed_a_few_at_a_time(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the length of an answer the server does nothing else."""
    for number in range(5):
        await store.store(DelayedMessage(f"m-{number}", NOW + number * SECOND, "q", {}, bytes(5_000_000)), NOW)
    run, answers = store._server.run, list[int]()

    async def count_answer(script: str, *values: Any) -> Any:
        answer = await run(script, *values)
        if script == "page":
            answers.append(len(answer[1]))
        return answer

    monkeypatch.setattr(store._server, "run", count_answer)
    page = await store.read_pending(MessageFilter(), 10)
    assert [each.message_id for each in page.messages] == [f"m-{number}" for number in range(5)]
    assert answers == [2, 2, 1, 0]


async def test_a_full_server_takes_nothing_and_loses_nothing(redis_server: Redis) -> None:
    store, transport = await prepared(RedisStore(redis_server.url)), RedisTransport(redis_server.url)
    try:
        await transport.create_queues(["done"])
        await store.store(message("before"), NOW)
        assert redis_server.command("CONFIG", "SET", "maxmemory", "1") == b"+OK"
        with pytest.raises(errors.StoreFull, match="maxmemory"):
            await store.store_many([message("a"), message("b")], NOW)
        with pytest.raises(errors.TransportUnreachable):
            await transport.send([Envelope("done", "e-1")], NOW)
        assert redis_server.command("CONFIG", "SET", "maxmemory", "0") == b"+OK"
        assert await store.get("a") is None
        claims = await store.claim_due(NOW + SECOND, 10)
        assert [claim.message.message_id for claim in claims] == ["before"]
    finally:
        await store.close()
        await transport.close()


async def test_a_server_that_throws_keys_away_is_refused(redis_server: Redis) -> None:
    redis_server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    redis_server.command("CONFIG", "SET", "maxmemory", "1000000000")
    store = RedisStore(redis_server.url, table="any")
    with pytest.raises(errors.ConfigurationError, match="noeviction"):
        await store.setup()
    await store.close()


async def test_a_master_that_became_a_replica_is_an_outage(redis_server: Redis) -> None:
    store = await prepared(RedisStore(redis_server.url))
    try:
        redis_server.command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(errors.StoreUnreachable, match="replica"):
            await store.store(message(), NOW)
        redis_server.command("REPLICAOF", "NO", "ONE")
        await store.store(message(), NOW)
    finally:
        await store.close()


async def test_a_wrong_password_is_said_without_showing_it(redis_server: Redis) -> None:
    store = RedisStore(redis_server.url.replace("postdate@", "wrong@"), table="any")
    with pytest.raises(errors.StoreUnavailable, match="check user and password") as caught:
        await store.setup()
    assert ":wrong" not in str(caught.value)
    await store.close()


async def test_a_server_that_hangs_is_given_up_in_time_and_found_again(redis_server: Redis) -> None:
    store = await prepared(RedisStore(redis_server.url))
    hasty = RedisStore(redis_server.url, answers_within=SECOND)
    assert redis_server.pid is not None
    try:
        await store.store(message(), NOW)
        await hasty.initialize("service", TransactionMode.TRANSACTION_SCOPE)
        await until(lambda: hasty.get("m-1"), despite=errors.StoreUnreachable)
        freeze_processes(redis_server.pid)
        with pytest.raises(errors.StoreUnreachable):
            await hasty.store(message("m-2"), NOW)
        os.kill(redis_server.pid, signal.SIGCONT)
        assert await until(lambda: hasty.get("m-1"), despite=errors.StoreUnreachable) == message()
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
        await hasty.close()
        await store.close()


async def test_after_a_restart_who_listens_is_woken_and_who_receives_goes_on(redis_server: Redis) -> None:
    store, transport = await prepared(RedisStore(redis_server.url)), RedisTransport(redis_server.url)
    woken = anyio.Event()
    try:
        await transport.create_queues(["done"])
        receiver, received = transport.receiver("done"), list[str]()

        async def receive() -> None:
            came = await until(lambda: receiver.receive(10), despite=errors.TransportUnreachable)
            received.extend(each.envelope.message_id for each in came)

        stop = await store.listen(woken.set)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await anyio.to_thread.run_sync(redis_server.kill)
            await anyio.to_thread.run_sync(redis_server.start)
            await woken.wait()
            await transport.send([Envelope("done", "e-1")], NOW)
        assert received == ["e-1"]
        stop()
        await receiver.close()
    finally:
        await store.close()
        await transport.close()


@pytest.mark.parametrize("look", ["move", "ZRANGE"])
async def test_what_is_stored_while_the_answer_to_a_look_is_under_way_is_in_the_answer(
    store: RedisStore, transport: RedisTransport, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """It is due after what was the earliest until then, so that nobody is woken for it."""
    stop = await store.listen(lambda: None)
    await store.store(message("before"), NOW)
    for name in ("run", "execute_command"):
        ask = getattr(store._server, name)

        async def ask_and_store(*words: Part, ask: Callable[..., Awaitable[Any]] = ask) -> Any:
            answer = await ask(*words)
            if words[0] == look:
                await store.store(message("meanwhile", NOW + SECOND), NOW)
            return answer

        monkeypatch.setattr(store._server, name, ask_and_store)
    if look == "move":
        again_at = (await store.move_due(NOW + MICROSECOND, 10)).next_attempt
    else:
        await store.finish(await store.claim_due(NOW + MICROSECOND, 10), Outcome.DELIVERED, NOW)
        again_at = await store.next_attempt()
    assert again_at is not None
    assert again_at <= NOW + SECOND  # sooner, if the server has told meanwhile of what was stored before
    stop()


# --- processes --------------------------------------------------------------------------------------------------------


async def test_a_cancelled_claim_holds_nothing(store: RedisStore) -> None:
    await store.store_many([message(f"m-{number}") for number in range(50)], NOW)
    for checkpoints in range(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.claim_due, NOW + SECOND, 5)
            for _ in range(checkpoints % 12):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    held = {claim.message.message_id for claim in await store.claim_due(NOW + SECOND, 100)}
    there = (await store.statistics(NOW)).claimed
    assert held
    assert len(held) + len(store._claims.keys() - held) == there


async def test_who_was_frozen_loses_what_it_held_and_is_told(prefix: Prefix, store: RedisStore) -> None:
    frozen = await prepared(RedisStore(prefix.login))
    try:
        await frozen.store(message(), NOW)
        (claim,) = await frozen.claim_due(NOW + SECOND, 10)
        assert frozen.is_in_force(claim)
        lost = list[str]()
        frozen.listen_for_lost_claims(lost.extend)
        await freeze(frozen, SECOND)
        await store._liveness.ensure_holder()
        claims = await until(lambda: store.claim_due(NOW + SECOND, 10))
        assert not frozen.is_in_force(claim)
        assert await frozen.claim_due(NOW + SECOND, 10) == []
        assert lost == ["m-1"]
        assert await frozen.finish([claim], Outcome.DELIVERED, NOW) == 0
        assert await store.finish(claims, Outcome.DELIVERED, NOW) == 1
    finally:
        await frozen.close()


async def test_a_process_shows_that_it_lives_while_its_event_loop_stands(
    prefix: Prefix, store: RedisStore, eventually: Eventually
) -> None:
    await store.store(message(), NOW)
    claims = await store.claim_due(NOW + SECOND, 1)

    def heard() -> object:
        return prefix.client.zrange(f"{prefix.login.tag}:holders", 0, -1, withscores=True)

    before = heard()
    eventually(lambda: heard() != before, "a beat, while this test keeps the event loop as a handler may")
    assert await store.finish(claims, Outcome.DELIVERED, NOW) == 1


async def freeze(store: RedisStore, holds_at_most: timedelta) -> None:
    """Have it beat no more, while its connections stand; from now on it may be silent for so long."""
    liveness = store._liveness
    assert liveness._beats is not None
    liveness._beats.stop()
    await anyio.to_thread.run_sync(liveness._beats.join)
    liveness.holds_at_most = holds_at_most
    await liveness._register()


async def test_who_is_not_heard_for_some_seconds_keeps_what_it_has_until_its_subscription_ends(
    prefix: Prefix, store: RedisStore
) -> None:
    silent = await prepared(RedisStore(prefix.login))
    try:
        await silent.store(message(), NOW)
        (claim,) = await silent.claim_due(NOW + SECOND, 10)
        await freeze(silent, timedelta(minutes=10))
        holders, holder = f"{prefix.login.tag}:holders", silent._liveness.current_holder
        prefix.client.zincrby(holders, -10 * SECOND / MICROSECOND, holder)
        other = await store._liveness.ensure_holder()
        registered = prefix.client.zscore(holders, other)
        await until(lambda: prefix.client.zscore(holders, other) != registered)  # it has looked at all holders
        assert await store.claim_due(NOW + SECOND, 10) == []
        await silent._liveness._listening.close()
        claims = await until(lambda: store.claim_due(NOW + SECOND, 10))
        assert await silent.finish([claim], Outcome.DELIVERED, NOW) == 0
        assert await store.finish(claims, Outcome.DELIVERED, NOW) == 1
    finally:
        await silent.close()


async def test_who_is_heard_keeps_what_it_has_although_its_subscription_is_interrupted(
    prefix: Prefix, store: RedisStore
) -> None:
    holding = await prepared(RedisStore(prefix.login))
    try:
        await holding.store(message(), NOW)
        claims = await holding.claim_due(NOW + SECOND, 10)
        await holding._liveness._listening.close()
        holders, other = f"{prefix.login.tag}:holders", await store._liveness.ensure_holder()
        registered = prefix.client.zscore(holders, other)
        await until(lambda: prefix.client.zscore(holders, other) != registered)  # it has looked at all holders
        assert await holding.finish(claims, Outcome.DELIVERED, NOW) == 1
    finally:
        await holding.close()


async def test_a_process_that_was_forgotten_leaves_no_subscription_behind(prefix: Prefix, store: RedisStore) -> None:
    liveness, tag = store._liveness, prefix.login.tag
    names = set[str]()
    for _ in range(3):
        names.add(await liveness.ensure_holder())
        liveness.void_holder(liveness.current_holder)
    assert len(names) == 3
    prefix.client.set(f"{tag}:holders", "refuses to register any process")
    for _ in range(5):
        with pytest.raises(ResponseError):
            await liveness.ensure_holder()
    listeners = [each for callbacks in liveness._listening._callbacks.values() for each in callbacks]
    assert len(listeners) == 1
    # All channels, compared here: the prefix has characters that mean something in a pattern of Redis.
    shown = f"{tag}:alive:".encode()

    def open_channels() -> int:
        return sum(isinstance(each, bytes) and each.startswith(shown) for each in prefix.client.pubsub_channels())

    await until(lambda: open_channels() == 1)
    prefix.client.delete(f"{tag}:holders")


async def stop_beats(adapter: RedisStore | RedisTransport) -> str:
    """Stop the beats of a process; return the name of its holder."""
    holder, beats = await adapter._liveness.ensure_holder(), adapter._liveness._beats
    assert beats is not None
    beats.stop()
    await anyio.to_thread.run_sync(beats.join)
    return holder


async def beat_once(adapter: RedisStore | RedisTransport) -> None:
    await adapter._server.run("beat", adapter._liveness.current_holder, 3 * SECOND // MICROSECOND, "{}")


async def let_die(prefix: Prefix, dead: RedisTransport, other: RedisTransport) -> None:
    """Have the server, asked by another process, see that a process has died."""
    holder = await stop_beats(dead)
    await dead._liveness._listening.close()
    prefix.client.zincrby(f"{prefix.login.tag}:holders", -10 * SECOND / MICROSECOND, holder)
    await other._liveness.ensure_holder()
    await beat_once(other)
    await dead.close()


def counts(received: Sequence[Received]) -> list[tuple[str, int, int, bool]]:
    return [(each.envelope.message_id, each.failures, each.unanswered, each.is_suspect) for each in received]


async def test_a_queue_counts_the_processes_that_died_with_a_message_and_gives_a_suspect_out_alone(
    prefix: Prefix, transport: RedisTransport
) -> None:
    receiver = transport.receiver("done")
    await transport.send([Envelope("done", name) for name in ("first", "a", "b")], NOW)
    (first,) = await receiver.receive(1)
    for deaths in range(3):
        dead = RedisTransport(prefix.login)
        received = await dead.receiver("done").receive(10)
        assert counts(received) == [("a", deaths, deaths, False), ("b", deaths, deaths, False)]
        await let_die(prefix, dead, transport)
    await receiver.roll_back(first, failed=False)
    for expected in ([("first", 0, 0, False)], [("a", 3, 3, True)], [("b", 3, 3, True)]):
        assert counts(await receiver.receive(10)) == expected
    await receiver.close()


async def test_a_queue_counts_no_process_that_stops_or_gives_a_message_back(
    prefix: Prefix, transport: RedisTransport
) -> None:
    await transport.send([Envelope("done", "a")], NOW)
    receiver, other = transport.receiver("done"), RedisTransport(prefix.login)
    (received,) = await receiver.receive(1)
    await receiver.roll_back(received)
    assert len(await receiver.receive(1)) == 1
    await receiver.close()
    assert len(await other.receiver("done").receive(1)) == 1
    await other.close()
    assert counts(await transport.receiver("done").receive(1)) == [("a", 1, 0, False)]


@pytest.mark.parametrize("first_back", ["a process that beats", "a new process"])
async def test_a_time_in_which_the_server_heard_no_process_counts_as_silence_of_none(
    prefix: Prefix, store: RedisStore, first_back: str
) -> None:
    """After a restart of the server one process is back first: the others live, and are not subscribed yet."""
    holding, new = await prepared(RedisStore(prefix.login)), await prepared(RedisStore(prefix.login))
    try:
        await holding.store(message(), NOW)
        claims = await holding.claim_due(NOW + SECOND, 10)
        holders = [await stop_beats(each) for each in (holding, store)]
        await holding._liveness._listening.close()
        for holder in holders:
            prefix.client.zincrby(f"{prefix.login.tag}:holders", -10 * SECOND / MICROSECOND, holder)
        first = store if first_back == "a process that beats" else new
        await first._liveness.ensure_holder()
        await beat_once(first)
        assert await store.claim_due(NOW + SECOND, 10) == []
        assert await holding.finish(claims, Outcome.DELIVERED, NOW) == 1
    finally:
        await new.close()
        await holding.close()


async def test_a_dead_process_is_dead_although_the_clock_of_the_server_was_set_back(
    prefix: Prefix, store: RedisStore
) -> None:
    dead = await prepared(RedisStore(prefix.login))
    try:
        await dead.store(message(), NOW)
        assert len(await dead.claim_due(NOW + SECOND, 10)) == 1
        holder = await stop_beats(dead)
        await dead._liveness._listening.close()
        await stop_beats(store)
        prefix.client.zincrby(f"{prefix.login.tag}:holders", 3600 * SECOND / MICROSECOND, holder)
        await beat_once(store)
        prefix.client.zincrby(f"{prefix.login.tag}:holders", -10 * SECOND / MICROSECOND, holder)
        await beat_once(store)
        assert len(await store.claim_due(NOW + SECOND, 10)) == 1
    finally:
        await dead.close()


async def test_what_a_killed_process_held_is_claimed_by_another_row_25(prefix: Prefix, redis_url: str, start) -> None:
    prefix.name = f"kill-{os.getpid()}"
    prefix.login = parse_address(f"{redis_url}?prefix={prefix.name}")
    store = await prepared(RedisStore(prefix.login))
    try:
        now = SystemClock().now()
        await store.store_many([message(f"m-{number}", now - SECOND) for number in range(100)], now)
        holder = start("holder", f"{redis_url}?prefix={prefix.name}")
        assert holder.says("ready") == "ready 100"
        assert await store.claim_due(now, 1_000) == []
        holder.kill()
        claims = list[object]()

        async def all_are_claimed() -> bool:
            claims.extend(await store.claim_due(now, 1_000))
            return len(claims) == 100

        await until(all_are_claimed)
    finally:
        await store.close()


async def test_processes_of_other_machines_are_told_with_their_names(prefix: Prefix, store: RedisStore) -> None:
    said = {"pid": os.getpid(), "machine": "elsewhere", "started": format_instant(NOW), "delivers": True}
    for holder, more in (("one", {}), ("two", {"receives": ["a"]}), ("three", {"pid": 1})):
        prefix.client.hset(f"{prefix.login.tag}:about", holder, json.dumps({**said, **more}))
    found = sorted(await store.observer().processes(), key=lambda each: each.pid)
    assert [(each.pid, each.host, each.receives) for each in found] == [
        (1, "elsewhere", ()),
        (os.getpid(), "elsewhere", ("a",)),
    ]
    assert all(each.delivers and not each.alive and each.started_at == NOW for each in found)


async def test_a_process_delivers_from_the_stores_that_it_says_and_from_no_other(
    prefix: Prefix, store: RedisStore
) -> None:
    """Several endpoints share a prefix; a service of another one delivers nothing from this store."""
    said = {"machine": "elsewhere", "started": format_instant(NOW)}
    for pid, stores in ((1, [store.key_prefix]), (2, [f"{store.key_prefix}2"]), (3, True), (4, [])):
        text = json.dumps({**said, "pid": pid, "delivers": stores})
        prefix.client.hset(f"{prefix.login.tag}:about", f"h{pid}", text)
    found = await store.observer().processes()
    assert {each.pid: each.delivers for each in found} == {1: True, 2: False, 3: True, 4: False}


async def test_an_operator_sees_queues_and_who_holds(store: RedisStore, transport: RedisTransport) -> None:
    observer, queues = store.observer(), transport.observer()
    await store.store_many([message("a"), message("b", NOW + 9 * SECOND)], NOW)
    (claim,) = await store.claim_due(NOW + SECOND, 10)
    standing = await observer.pending_state_of("a")
    assert standing is not None
    assert (standing.attempt_at, standing.claimed_by) == (None, os.getpid())
    await store.release([claim], None)
    assert (await store.move_due(NOW + SECOND, 10)).delivered == 1
    await transport.send([Envelope("done", "c")], NOW)
    receiver = transport.receiver("done")
    (held,) = await receiver.receive(1)
    shown = await queues.browse("done", 10)
    assert [(each.envelope.message_id, each.received_by) for each in shown] == [("a", os.getpid()), ("c", None)]
    assert await queues.queue_lengths() == {"done": 2}
    assert await transport.lengths_of(["done", "missing"]) == {"done": 1}
    assert [each.queue for each in await queues.find_in_queues("c")] == ["done"]
    assert await observer.latest_deliveries(2) == [DeliveredMessage(NOW + SECOND, None)]
    await receiver.commit(held, NOW)
    assert [record.kind.name for record in await store.history("a")] == ["SCHEDULED", "DELIVERED", "HANDLED"]
    with pytest.raises(errors.ClaimLost):
        await receiver.commit(held, NOW)
    await receiver.close()
    facts = await store.server_facts()
    assert (facts.product, facts.settings["aof_enabled"]) == ("Redis", "1")
    await store.report_clock(3 * SECOND)
    assert list((await store.reported_clocks()).values()) == [3 * SECOND]
