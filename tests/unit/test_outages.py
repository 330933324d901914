"""A server that cannot be reached: no message is given up for it, and the log says it once.

Source: specification 1.6, 1.10; rows 37 and 42 are about failures that a server, or a store of one's own, tells of.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import anyio
import pytest

from postdate import DelayedMessage, Envelope, Headers, errors
from postdate.backends.postgres.transport import PostgresTransport
from postdate.core.due.dispatcher import Dispatcher
from postdate.endpoint.outgoing import timeouts_queue_envelope
from postdate.ports import Claim, Received, RecordKind, Work
from postdate.testing import Fault, FaultyStore

SECOND = timedelta(seconds=1)
QUEUE = "sales.timeouts"
STORE_GONE, BROKER_GONE = (
    errors.StoreUnreachable("connection refused"),
    errors.TransportUnreachable("connection refused"),
)


@pytest.fixture
async def bench(make_bench):
    bench = make_bench()
    await bench.create_queues("billing")
    return bench


async def arrive(bench, message: DelayedMessage) -> Received:
    return await bench.put_in_timeouts_queue(timeouts_queue_envelope(message, QUEUE))


@pytest.mark.parametrize("error", [STORE_GONE, errors.StoreNotSetUp("no tables")], ids=lambda error: error.code)
async def test_a_message_in_hand_waits_for_a_store_that_cannot_be_reached(bench, error: errors.PostdateError) -> None:
    """Also without retries: it is stored at the first attempt after an outage of minutes."""
    bench.store.faults.add(Fault("store", error))
    received = await arrive(bench, bench.message(due_in=60))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.pump.handle, received)
        await bench.clock.advance(29.5 * SECOND)
        assert bench.store.faults.calls["store"] == 30
        await bench.clock.advance(120 * SECOND)
        assert bench.store.faults.calls["store"] < 45
        assert bench.critical_errors == ["store"]
        bench.store.faults.clear()
        await bench.clock.advance(10 * SECOND)
    assert (await bench.memory.statistics(bench.start)).pending == 1  # not sent past the store, though due by now
    assert bench.ids("error") == bench.ids(QUEUE) == bench.ids("billing") == []


async def test_a_stop_gives_it_back_at_once_and_nothing_is_counted(bench) -> None:
    bench.store.faults.add(Fault("store", STORE_GONE))
    received = await arrive(bench, bench.message(due_in=600))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.pump.handle, received)
        await bench.clock.advance(0.5 * SECOND)
        bench.intake.outage.stop()
        bench.pump.stop()
    (again,) = await bench.receiver.receive(1)
    assert (again.envelope.message_id, again.failures) == ("m-1", 0)


async def test_what_is_due_already_and_cannot_be_sent_is_not_the_stores_failure(bench) -> None:
    bench.transport.faults.add(Fault("commit", BROKER_GONE))
    received = await arrive(bench, bench.message(due_in=-1))
    await bench.handle(received)
    (again,) = await bench.receiver.receive(1)
    assert again.failures == 0
    assert bench.store_breaker.deadline is None
    assert bench.ids("error") == []


async def test_while_the_broker_cannot_be_reached_due_messages_wait_whatever_they_have_behind_them(bench) -> None:
    bench.transport.faults.add(lambda call: BROKER_GONE if call.method == "send" and call.number <= 8 else None)
    await bench.keep(bench.message(due_in=-1))
    await bench.look_for(240 * SECOND)
    assert bench.ids("billing") == ["m-1"]
    assert bench.ids("error") == []
    assert bench.transport.faults.calls["send"] == 9


async def test_while_the_broker_is_away_for_a_minute_nothing_is_recorded_and_little_is_claimed(bench) -> None:
    """3,000 were due: 26,251 records of retries, and 28 seconds of processor time."""
    bench.transport.faults.add(Fault("send", BROKER_GONE))
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(3_000)])
    async with bench.polling():
        await bench.clock.advance(60 * SECOND)
        calls = bench.store.faults.calls
        assert calls["retry_later"] == calls["finish"] == 0
        assert calls["claim_due"] <= 45
        assert calls["release"] <= 45
        assert calls["next_attempt"] <= 1
        assert (await bench.memory.statistics(bench.clock.now())).failing == 0
        assert await bench.memory.record_counts() == {RecordKind.SCHEDULED: 3_000}
        bench.transport.faults.clear()
        await bench.clock.advance(2 * SECOND)
        assert sorted(bench.ids("billing")) == sorted(f"m-{n}" for n in range(3_000))


async def test_wake_ups_while_the_broker_is_away_ask_the_store_nothing(bench) -> None:
    bench.transport.faults.add(Fault("send", BROKER_GONE))
    await bench.keep(bench.message("m-1", -1))
    async with bench.polling():
        await bench.clock.advance(30 * SECOND)
        calls = bench.store.faults.calls["claim_due"]
        for n in range(1_000):
            await bench.memory.store(bench.message(f"n-{n}", -2 - n), bench.start)  # each is due before all others
            await bench.clock.advance(timedelta(milliseconds=2))
        assert bench.store.faults.calls["claim_due"] - calls <= 2


async def test_a_full_queue_holds_up_only_what_is_meant_for_it(bench) -> None:
    await bench.create_queues("full")
    full, send = True, bench.queues.send

    async def refuse(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        sent = await send([each for each in envelopes if not full or each.destination != "full"], now)
        assert not any(sent)
        return [
            errors.DestinationUnavailable("full") if full and each.destination == "full" else None for each in envelopes
        ]

    bench.queues.send = refuse
    bench.queues._capabilities = replace(bench.queues.capabilities, pipelines=True)
    await bench.keep(*[bench.message(f"f-{n}", -1, "full") for n in range(120)])
    async with bench.polling():
        for n in range(60):
            await bench.memory.store(bench.message(f"m-{n}", n + 0.5), bench.start)
            await bench.clock.advance(SECOND)
        assert bench.ids("billing") == [f"m-{n}" for n in range(60)]
        assert bench.ids("error") == []
        assert await bench.memory.record_counts() == {RecordKind.SCHEDULED: 180, RecordKind.DELIVERED: 60}
        assert bench.transport.faults.calls["send"] <= 60 + 45
        full = False
        await bench.clock.advance(2 * SECOND)
        assert len(bench.ids("full")) == 120
    assert bench.critical_errors == []


class FullQueue:
    """A queue of a broker that refuses what it has no room for; nothing else is sent."""

    def __init__(self, bench) -> None:
        self.bench, self.room, self.refused, self.taken = bench, 0, 0, 0
        bench.queues.send = self.send
        bench.queues._capabilities = replace(bench.queues.capabilities, pipelines=True)

    async def send(self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        taken = min(self.room, len(envelopes))
        self.room, self.taken = self.room - taken, self.taken + taken
        self.refused += len(envelopes) - taken
        return [None] * taken + [errors.DestinationUnavailable("full")] * (len(envelopes) - taken)


def count_claims(bench) -> list[int]:
    claim_due, counts = bench.memory.claim_due, list[int]()

    async def counted(now: datetime, limit: int) -> Sequence[Claim]:
        claims = await claim_due(now, limit)
        counts.append(len(claims))
        return claims

    bench.memory.claim_due = counted
    return counts


async def test_a_full_queue_with_thousands_due_is_asked_with_one_and_few_of_the_others_are_claimed(bench) -> None:
    """They were all claimed, sent and given back each time, so that could not be often: every ten seconds."""
    full, counts = FullQueue(bench), count_claims(bench)
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(3_000)])
    async with bench.polling():
        await bench.clock.advance(5 * SECOND)
        counts.clear()
        full.refused = 0
        await bench.clock.advance(60 * SECOND)
        claimed, looks, refused = sum(counts), len(counts), full.refused
        full.room = 3_000
        await bench.clock.advance(2 * SECOND)
        after_two = full.taken
        await bench.clock.advance(5 * SECOND)
    assert claimed <= 60 * 700
    assert looks <= 60 * 4
    assert refused <= 45
    assert after_two >= 1_000
    assert full.taken == 3_000


async def test_a_queue_that_drains_slowly_is_not_asked_more_often_for_that(bench) -> None:
    """Each time it takes some it looks as though it was well."""
    full, counts = FullQueue(bench), count_claims(bench)
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(1_000)])
    async with bench.polling():
        for _ in range(100):
            full.room += 1
            await bench.clock.advance(SECOND / 2)
    assert 80 <= full.taken <= 100
    assert sum(counts) <= 50 * 1_500
    assert bench.critical_errors == []


@pytest.mark.parametrize("pipelines", [False, True])
async def test_a_message_that_breaks_every_connection_keeps_no_other_from_being_sent(bench, pipelines: bool) -> None:
    """Being the oldest it was every probe, and for all the others the transport was out for ever."""
    send = bench.queues.send

    async def break_off(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        if any(each.message_id == "poison" and each.destination != "error" for each in envelopes):
            raise ConnectionError("closed by peer")
        return await send(envelopes, now)

    bench.queues.send = break_off
    bench.queues._capabilities = replace(bench.queues.capabilities, pipelines=pipelines)
    await bench.keep(bench.message("poison", -10), *[bench.message(f"m-{n}", -5) for n in range(20)])
    async with bench.polling():
        await bench.clock.advance(5 * SECOND)
        soon = len(bench.ids("billing"))
        for n in range(20):
            await bench.memory.store(bench.message(f"later-{n}", n + 6), bench.start)
        await bench.clock.advance(60 * SECOND)
    assert soon == 20
    assert len(bench.ids("billing")) == 40
    assert bench.ids("error") == ["poison"]


async def test_a_message_that_is_the_probe_of_many_outages_is_not_to_blame_for_them(bench) -> None:
    """The broker comes back for moments only; each message that was sent meanwhile was another."""
    await bench.keep(bench.message("m-0", -1))
    async with bench.polling():
        for n in range(1, 11):
            bench.transport.faults.add(Fault("send", BROKER_GONE))
            await bench.memory.store(bench.message(f"m-{n}", -1), bench.start)
            await bench.clock.advance(20 * SECOND)
            bench.transport.faults.clear()
            await bench.clock.advance(2 * SECOND)
    assert len(bench.ids("billing")) == 11
    assert bench.ids("error") == []


async def test_no_answer_from_a_transport_that_pipelines_counts_against_nothing(bench) -> None:
    """A frozen broker, a memory alarm, a silent network: messages went to the error queue and arrived as well."""
    bench.queues._capabilities = replace(bench.queues.capabilities, pipelines=True)
    send, silent = bench.queues.send, anyio.Event()

    async def say_nothing(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        await silent.wait()
        return await send(envelopes, now)

    bench.queues.send = say_nothing
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(100)])
    async with bench.polling():
        await bench.clock.advance(100 * SECOND)
        silent.set()
        await bench.clock.advance(5 * SECOND)
        assert sorted(bench.ids("billing")) == sorted(f"m-{n}" for n in range(100))
    assert bench.ids("error") == []
    assert await bench.memory.record_counts() == {RecordKind.SCHEDULED: 100, RecordKind.DELIVERED: 100}


async def test_a_process_that_stood_still_while_sending_moves_nothing_to_the_error_queue_under_its_old_claim(
    bench,
) -> None:
    """Others may have had the messages meanwhile, and delivered them."""
    send, answered = bench.queues.send, anyio.Event()

    async def refuse_late(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        if envelopes[0].destination == "error":
            return await send(envelopes, now)
        await answered.wait()
        return [errors.TransportUnavailable("nack")] * len(envelopes)

    bench.queues.send = refuse_late
    await bench.keep(bench.message("m-1", -1), bench.message("m-2", -1))
    async with bench.polling():
        await bench.clock.advance(15 * SECOND)  # on a clock that goes on while a process is stopped
        del bench.memory._entries["m-1"]  # another has it, and has delivered it
        answered.set()
        await bench.clock.advance(SECOND / 2)
        assert bench.ids("error") == []
        await bench.clock.advance(5 * SECOND)
    assert bench.ids("error") == ["m-2"]
    assert await bench.waiting() is None


@pytest.mark.parametrize("count", [1, 3])
async def test_an_outage_met_by_error_copies_that_leave_later_is_not_recorded_against_their_messages(
    bench, count: int
) -> None:
    """Found by the simulator, seeds 28667 and, for those behind the first, 49783: each try was one more failure."""
    send, refused, is_out = bench.queues.send, 0, True

    async def refuse_late(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        nonlocal refused
        if envelopes[0].destination == "error":
            return [errors.TransportUnreachable("away")] * len(envelopes) if is_out else await send(envelopes, now)
        refused += 1
        await bench.clock.sleep(12 * SECOND)
        return [errors.TransportUnavailable("nack")] * len(envelopes)

    bench.queues.send = refuse_late
    ids = [f"m-{number}" for number in range(1, count + 1)]
    await bench.keep(*(bench.message(id_, due_in=-1) for id_ in ids))
    async with bench.polling():
        await bench.clock.advance(50 * SECOND)
        assert bench.ids("error") == []
        is_out = False
        await bench.clock.advance(60 * SECOND)
    assert (sorted(bench.ids("error")), refused) == (ids, 1)
    for id_ in ids:
        assert [record.kind for record in await bench.memory.history(id_)].count(RecordKind.RETRIED) == 1


async def test_error_copies_behind_a_slow_one_leave_later_and_their_messages_have_one_record(bench) -> None:
    """Found by the simulator, seed 99904: the second had waited so long for the first that it was recorded again."""
    send, refused, slow = bench.queues.send, 0, 2

    async def send_slowly(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        nonlocal refused, slow
        if envelopes[0].destination == "error":
            if slow:
                slow -= 1
                await bench.clock.sleep(12 * SECOND)
            return await send(envelopes, now)
        refused += 1
        await bench.clock.sleep(12 * SECOND)
        return [errors.TransportUnavailable("nack")] * len(envelopes)

    bench.queues.send = send_slowly
    ids = ["m-1", "m-2", "m-3"]
    await bench.keep(*(bench.message(id_, due_in=-1) for id_ in ids))
    async with bench.polling():
        await bench.clock.advance(120 * SECOND)
    assert (sorted(bench.ids("error")), refused) == (ids, 1)
    for id_ in ids:
        assert [record.kind for record in await bench.memory.history(id_)].count(RecordKind.RETRIED) == 1


@pytest.mark.parametrize("what", ["another with its id", "returned", "attempted by others", "long after"])
async def test_what_is_to_leave_for_the_error_queue_is_attempted_when_it_is_not_the_same_any_more(
    bench, what: str
) -> None:
    """It was refused by a slow destination, so its claim was old: the copy was to leave under the next."""
    send, is_bad = bench.queues.send, True

    async def refuse_late(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        if not is_bad:
            return await send(envelopes, now)
        await bench.clock.sleep(12 * SECOND)
        return [errors.TransportUnavailable("nack")] * len(envelopes)

    bench.queues.send = refuse_late
    message = bench.message(due_in=-1)
    await bench.keep(message)
    async with bench.polling():
        await bench.clock.advance(12.5 * SECOND)
        is_bad, entry = False, bench.memory._entries["m-1"]
        if what == "another with its id":
            entry.message = replace(entry.message, body=b"another")
        elif what == "returned":
            entry.message = message
        elif what == "attempted by others":
            entry.message = replace(entry.message, number_of_failures=3)
        else:
            entry.attempt_at = bench.clock.now() + 150 * SECOND
        await bench.clock.advance(200 * SECOND)
    assert bench.ids("error") == []
    assert bench.ids("billing") == ["m-1"]


class Leased(FaultyStore):
    """A store whose claims end at an instant of which nobody tells: the process stood still."""

    ends_at = 0.0

    def __init__(self, bench) -> None:
        super().__init__(bench.memory)
        self.clock = bench.clock
        bench.dispatcher = Dispatcher(
            self, bench.transport, bench.settings, bench.clock, bench.breaker, bench.failure_rate
        )

    def listen_for_lost_claims(self, on_lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        return lambda: None

    def is_in_force(self, claim: Claim) -> bool:
        return self.clock.monotonic() < self.ends_at


async def test_a_process_frozen_in_the_middle_of_error_copies_sends_none_of_the_others_when_it_wakes(bench) -> None:
    """Others have the rest meanwhile, and have delivered it: 100 delivered messages were in an error queue."""
    store, send = Leased(bench), bench.queues.send
    store.ends_at = bench.clock.monotonic() + 5

    async def freeze_at_the_third_copy(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        if envelopes[0].destination != "error":
            return [errors.TransportUnavailable("nack")] * len(envelopes)
        if len(bench.ids("error")) == 2:
            await bench.clock.sleep(6 * SECOND)
        return await send(envelopes, now)

    bench.queues.send = freeze_at_the_third_copy
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(100)])
    async with bench.polling():
        await bench.clock.advance(7 * SECOND)
    assert bench.ids("error") == ["m-0", "m-1", "m-2"]  # the third had left already
    assert store.faults.calls["retry_later"] == 0


async def test_a_copy_in_brief_does_not_leave_under_a_claim_that_is_over_by_then(bench) -> None:
    store, copies = Leased(bench), 0
    store.ends_at = bench.clock.monotonic() + 5

    async def refuse(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        nonlocal copies
        if envelopes[0].destination != "error":
            return [errors.TransportUnavailable("nack")] * len(envelopes)
        copies += 1
        await bench.clock.sleep(6 * SECOND)
        return [errors.MessageTooLarge("too large")]

    bench.queues.send = refuse
    await bench.keep(bench.message(due_in=-1))
    async with bench.polling():
        await bench.clock.advance(7 * SECOND)
    assert copies == 1
    assert bench.failure_rate.deadline is None


async def test_what_waited_for_its_turn_is_not_sent_under_a_claim_that_is_over_by_then(bench) -> None:
    """Four groups of one destination are sent at once; the fifth begins when the process wakes."""
    store, send, sent = Leased(bench), bench.queues.send, list[str]()
    store.ends_at = bench.clock.monotonic() + 5

    async def be_slow(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        sent.extend(each.message_id for each in envelopes)
        await bench.clock.sleep(6 * SECOND)
        return await send(envelopes, now)

    bench.queues.send = be_slow
    async with bench.polling():
        for n in range(5):
            await bench.memory.store(bench.message(f"m-{n}", -1), bench.start)
            await bench.clock.advance(1.2 * SECOND if n < 3 else SECOND / 10)
        first = list(sent)
        await bench.clock.advance(15 * SECOND)
    assert sent == first == ["m-0", "m-1", "m-2", "m-3"]


async def test_what_neither_queue_nor_error_queue_can_take_stays_and_waits_longer_each_time(
    bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.keep(bench.message(due_in=-1, headers={"big": "x" * 60_000}))
    send, copies = bench.queues.send, list[Envelope]()

    async def refuse(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        copies.extend(each for each in envelopes if each.destination == "error")
        return [errors.MessageTooLarge("a frame takes 60,000 bytes of headers") for _ in envelopes]

    bench.queues.send = refuse
    await bench.look_for(600 * SECOND)
    assert Headers.EXCEPTION_STACK_TRACE in copies[0].headers
    assert Headers.EXCEPTION_STACK_TRACE not in copies[1].headers
    assert len(copies) <= 2 * 16
    assert (await bench.memory.statistics(bench.clock.now())).pending == 1
    said = [each for each in caplog.messages if each.startswith("error queue error does not accept messages")]
    assert 1 <= len(said) <= 11
    bench.queues.send = send
    await bench.look_for(61 * SECOND)
    assert bench.ids("billing") == ["m-1"]


async def test_a_move_says_what_failed(bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.pump.handle(await arrive(bench, bench.message(due_in=-1, destination="nowhere")))
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "message m-1 of sales.timeouts failed, attempt 1",
        "message m-1 of sales.timeouts moved to error queue error",
    ]


# --- the log ----------------------------------------------------------------------------------------------------------


async def test_debug_lines_say_what_was_stored_and_delivered(bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await bench.pump.handle(await arrive(bench, bench.message("later", due_in=60)))
    await bench.pump.handle(await arrive(bench, bench.message("now", due_in=-1)))
    await bench.keep(bench.message("a", -0.014), bench.message("b", -0.003))
    await bench.look()
    assert caplog.messages == [
        f"message later stored, for billing, due {bench.start + 60 * SECOND}",
        f"message now was due already and is sent to billing, due {bench.start - SECOND}",
        "2 messages delivered to billing, latest 14 ms late",
    ]


# --- adapters ---------------------------------------------------------------------------------------------------------


async def test_no_connection_is_unreachable_for_store_and_queues_alike() -> None:
    """Nobody listens at port 1."""
    from postdate.backends.mariadb.store import MariaDbStore
    from postdate.backends.postgres.store import PostgresStore
    from postdate.backends.rabbitmq.transport import RabbitMqTransport

    url = "postgresql://postdate@127.0.0.1:1/postdate"
    for store in (PostgresStore(url), MariaDbStore("mariadb://postdate@127.0.0.1:1/postdate")):
        with pytest.raises(errors.StoreUnreachable):
            await store.next_attempt()
        await store.close()
    queues = PostgresTransport(url)
    with pytest.raises(errors.TransportUnreachable):
        await queues.queue_lengths()
    await queues.close()
    rabbitmq = RabbitMqTransport("amqp://guest:guest@127.0.0.1:1/")
    with pytest.raises(errors.TransportUnreachable):
        await rabbitmq.create_queues(["sales"])
    await rabbitmq.close()


def test_of_sql_server_what_no_server_said_is_unreachable_and_what_one_said_is_not() -> None:
    from postdate.backends.sqlserver.connection import translate

    assert translate(OSError("refused"), "there").code == "store_unreachable"
    assert [translate(_said(*said), "there").code for said in ((40613, 20), (3906, 16), (8645, 17), (8152, 16))] == [
        "store_unreachable",
        "store_read_only",
        "store_troubled",
        "store_error",
    ]


def _said(number: int, severity: int) -> Exception:
    error = Exception("text")
    error.number, error.severity = number, severity  # pyright: ignore[reportAttributeAccessIssue]
    return error


# --- queues that do not exist yet -------------------------------------------------------------------------------------

MINUTES = timedelta(minutes=1)


@pytest.fixture
async def awaiting(make_bench):
    bench = make_bench(missing_queue_wait=10 * MINUTES)
    await bench.create_queues("billing")
    return bench


async def test_a_missing_queue_is_awaited_and_gets_its_messages_when_it_exists(awaiting, caplog) -> None:
    """A consumer that starts after the service: its queue is created some minutes after the first message is due."""
    bench = awaiting
    await bench.keep(*[bench.message(f"m-{n}", -1, "mails") for n in range(300)], bench.message("b", 60))
    async with bench.polling():
        await bench.clock.advance(9 * MINUTES)
        assert bench.ids("error") == []
        assert bench.ids("billing") == ["b"]
        assert (await bench.memory.statistics(bench.clock.now())).failing == 0
        assert bench.transport.faults.calls["send"] <= 9 * 60
        await bench.queues.create_queues(["mails"])
        await bench.clock.advance(3 * SECOND)
        assert sorted(bench.ids("mails")) == sorted(f"m-{n}" for n in range(300))
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert told[0] == (
        "some queues accept no messages now: there is no queue 'mails' for message 'm-0'; messages wait 10 min for it"
    )
    assert len(told) == 9, "once a minute"
    assert bench.critical_errors == []


async def test_after_the_wait_all_messages_of_a_missing_queue_fail_at_once(awaiting) -> None:
    bench = awaiting
    await bench.keep(*[bench.message(f"m-{n}", -1, "mails") for n in range(300)])
    async with bench.polling():
        await bench.clock.advance(10 * MINUTES - SECOND)
        assert bench.ids("error") == []
        await bench.clock.advance(15 * SECOND)
        assert sorted(bench.ids("error")) == sorted(f"m-{n}" for n in range(300))
        await bench.memory.store(bench.message("late", 700, "mails"), bench.clock.now())
        await bench.clock.advance(2 * MINUTES)
        assert bench.ids("error")[-1] == "late", "it is not awaited again"


async def test_a_queue_that_existed_is_awaited_anew_when_it_is_deleted(awaiting) -> None:
    bench = awaiting
    await bench.keep(bench.message("m-1", -1, "mails"), bench.message("m-2", 12 * 60, "mails"))
    async with bench.polling():
        await bench.clock.advance(11 * MINUTES)
        assert bench.ids("error") == ["m-1"]
        await bench.queues.create_queues(["mails"])
        await bench.clock.advance(2 * MINUTES)
        assert bench.ids("mails") == ["m-2"]
        del bench.queues.queues["mails"]
        await bench.memory.store(bench.message("m-3", 14 * 60, "mails"), bench.clock.now())
        await bench.clock.advance(9 * MINUTES)
        assert bench.ids("error") == ["m-1"]
        await bench.clock.advance(3 * MINUTES)
        assert bench.ids("error") == ["m-1", "m-3"]


async def test_what_is_due_already_when_it_arrives_is_stored_if_its_queue_is_missing(awaiting) -> None:
    bench = awaiting
    (received,) = [await arrive(bench, bench.message(due_in=-1, destination="mails"))]
    for _ in range(2):
        await bench.pump.handle(received)
        if not bench.ids(QUEUE):
            break
        (received,) = await bench.receiver.receive(1)
    assert bench.ids("error") == bench.ids(QUEUE) == []
    assert await bench.memory.get("m-1") is not None
