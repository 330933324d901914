"""Policies of the application, what cannot be done, what error copies say (specification 5, rows 109, 111, 112)."""

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from postdate import (
    Audit,
    DelayedDelivery,
    DelayedRetry,
    Discard,
    Endpoint,
    Envelope,
    HandlerContext,
    Headers,
    ImmediateRetry,
    LocalTransport,
    MemoryStore,
    MemoryTransport,
    MoveToError,
    Recoverability,
    SqliteStore,
)
from postdate.core.recoverability import (
    DATA_ENTRIES,
    DATA_KEY_LIMIT,
    DATA_LIMIT,
    Host,
    customize_headers,
    decide_handling_failure,
    error_headers,
)
from postdate.endpoint.completions import POLICY_FAILURES
from postdate.errors import ConfigurationError, TransportUnavailable
from postdate.messages import format_timestamp
from postdate.ports import RecordKind
from postdate.testing import Fault, FaultyTransport, VirtualClock

SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)


class World:
    """An endpoint in memory whose handler of raw messages always fails."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.queues, self.store = clock, MemoryTransport(), MemoryStore()
        self.error: BaseException = RuntimeError("no")
        self.attempts: list[tuple[datetime, Mapping[str, str], bytes]] = []
        self.critical: list[str] = []

    def endpoint(
        self, recoverability: Recoverability | None = None, *, delays: bool = True, **settings: Any
    ) -> Endpoint:
        endpoint = Endpoint(
            "sales",
            transport=self.queues,
            delayed_delivery=DelayedDelivery(self.store) if delays else None,
            recoverability=recoverability,
            clock=self.clock,
            critical_error=lambda text, _: self.critical.append(text),
            **settings,
        )
        endpoint.handler(bytes)(self.fail)
        return endpoint

    async def fail(self, message: bytes, context: HandlerContext) -> None:
        self.attempts.append((self.clock.now(), dict(context.headers), message))
        raise self.error

    async def run(self, endpoint: Endpoint, duration: timedelta = timedelta(hours=1), **headers: str) -> None:
        """Put a raw message into the queue; let time pass."""
        await self.queues.create_queues(["sales", "error"])
        await self.queues.send([Envelope("sales", "native-1", headers, b"\0raw")], self.clock.now())
        async with endpoint:
            await self.clock.advance(duration)

    def in_queue(self, name: str) -> list[Envelope]:
        return [envelope for envelope, _ in self.queues.queues[name].messages]


@pytest.fixture
def world(clock: VirtualClock) -> World:
    return World(clock)


# --- numbers and headers (rows 109, 110) ------------------------------------------------------------------------------


async def test_24_attempts_at_exact_times_with_exact_headers_row_109(world: World) -> None:
    await world.run(world.endpoint(), own="1")
    start = world.attempts[0][0]
    rounds = [0 * SECOND, 10 * SECOND, 30 * SECOND, 60 * SECOND]
    # A delayed message is fetched when it is due strictly before now: a microsecond later each time.
    times = [at - start for at, _, _ in world.attempts]
    assert times == [each + number * MICROSECOND for number, each in enumerate(rounds) for _ in range(6)]
    first, second = world.attempts[0][1], world.attempts[6][1]
    assert first == {"own": "1"}
    assert second == {
        "own": "1",
        Headers.MESSAGE_ID: "native-1",
        Headers.DELAYED_RETRIES: "1",
        Headers.DELAYED_RETRIES_TIMESTAMP: format_timestamp(start),
    }
    assert [world.attempts[number][1].get(Headers.DELAYED_RETRIES) for number in (0, 6, 12, 18)] == [
        None,
        "1",
        "2",
        "3",
    ]
    (copy,) = world.in_queue("error")
    assert Headers.DELAYED_RETRIES not in copy.headers


async def test_delayed_retries_end_24_hours_after_the_last_was_scheduled_row_109(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endpoint, "_longest_sleep", timedelta(days=30))
    settings = Recoverability(immediate_retries=0, delayed_retries=100, time_increase=timedelta(hours=10))
    await world.run(world.endpoint(settings), timedelta(days=30))
    times = [at - world.attempts[0][0] for at, _, _ in world.attempts]
    assert [round(each / timedelta(hours=1)) for each in times] == [0, 10, 30, 60]  # the fourth came after 30 hours
    assert len(world.in_queue("error")) == 1


# --- policies of the application --------------------------------------------------------------------------------------


def by_text(
    error: BaseException, failures: int, headers: Mapping[str, str], settings: Recoverability, now: datetime
) -> Any:
    """Decide by the text of the error and how often it came; else as usual."""
    match str(error):
        case "once":
            return ImmediateRetry() if failures == 1 else MoveToError()
        case "later":
            return DelayedRetry(5 * SECOND) if Headers.DELAYED_RETRIES not in headers else MoveToError("broken")
        case "away":
            return Discard("nobody wants it")
        case "odd":
            return "retry"
        case "raise":
            raise KeyError("in the policy")
        case _:
            return decide_handling_failure(error, failures, headers, settings, now)


@pytest.mark.parametrize(
    ("text", "attempts", "queue"),
    [("once", [0, 0], "error"), ("later", [0, 5], "broken"), ("away", [0], None), ("else", [0, 0, 0], "error")],
)
async def test_a_policy_decides(world: World, text: str, attempts: list[int], queue: str | None) -> None:
    await world.queues.create_queues(["broken"])
    world.error = RuntimeError(text)
    settings = Recoverability(policy=by_text, immediate_retries=2, delayed_retries=0)
    await world.run(world.endpoint(settings))
    assert [round((at - world.attempts[0][0]) / SECOND) for at, _, _ in world.attempts] == attempts
    left = {name: len(world.in_queue(name)) for name in ("sales", "error", "broken")}
    assert left == {"sales": 0, "error": 0, "broken": 0} | ({queue: 1} if queue else {})


async def test_what_a_policy_writes_into_the_headers_that_it_is_given_stays_there(world: World) -> None:
    def policy(
        error: BaseException, failures: int, headers: dict[str, str], settings: Recoverability, now: datetime
    ) -> Any:
        headers["written"] = headers.pop("own")
        return ImmediateRetry() if failures == 1 else MoveToError()

    await world.run(world.endpoint(Recoverability(policy=policy)), own="1")  # type: ignore[arg-type]
    assert [headers for _, headers, _ in world.attempts] == 2 * [{"own": "1"}]
    (copy,) = world.in_queue("error")
    assert (copy.headers["own"], copy.headers.get("written")) == ("1", None)
    assert world.critical == []


async def test_a_discarded_message_is_recorded_and_told_at_level_info(
    tmp_path: Path, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(tmp_path / "all.db", synchronous="normal")
    transport = LocalTransport(tmp_path / "all.db", synchronous="normal", clock=clock)
    endpoint = Endpoint(
        "sales",
        transport=transport,
        delayed_delivery=DelayedDelivery(store),
        recoverability=Recoverability(policy=by_text),
        clock=clock,
    )

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        raise RuntimeError("away")

    caplog.set_level(logging.INFO, "postdate.endpoint")
    async with endpoint:
        await endpoint.send(b"raw", destination="sales", delay=SECOND, message_id="m-1")
        await clock.advance(2 * SECOND)
        lengths = await transport.queue_lengths()
    record = (await store.history("m-1"))[-1]
    assert (record.kind, record.detail) == (RecordKind.DISCARDED, "nobody wants it: RuntimeError: away")
    assert (lengths["sales"], lengths["error"]) == (0, 0)
    (line,) = [each for each in caplog.records if "discarded" in each.getMessage()]
    assert (line.levelname, "nobody wants it" in line.getMessage()) == ("INFO", True)
    await store.close()
    await transport.close()


@pytest.mark.parametrize("text", ["raise", "odd"])
async def test_a_policy_that_fails_is_a_critical_error_and_loses_nothing(world: World, text: str) -> None:
    world.error = RuntimeError(text)
    await world.run(world.endpoint(Recoverability(policy=by_text)))
    assert len(world.critical) == len(world.attempts) == POLICY_FAILURES + 1
    assert "Failed to execute the recoverability policy for message native-1" in world.critical[0]
    (copy,) = world.in_queue("error")
    assert copy.headers[Headers.EXCEPTION_MESSAGE] == text  # the error of the handler


# --- what cannot be done (row 111) ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"immediate_retries": 1}, "immediate_retries=1"),
        ({"immediate_retries": 5}, "immediate_retries=5"),
        ({"immediate_retries": 0, "delayed_retries": 3}, "delayed_retries=3"),
    ],
)
def test_retries_that_were_asked_for_are_refused_where_they_cannot_be_row_111(
    world: World, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        world.endpoint(Recoverability(**settings), transaction_mode="none")
    if "delayed_retries" in settings:
        with pytest.raises(ConfigurationError, match=said):
            world.endpoint(Recoverability(**settings), delays=False)
    none = Recoverability(immediate_retries=0, delayed_retries=0)
    assert world.endpoint(none, transaction_mode="none", delays=False).name == "sales"


async def test_retries_that_nobody_chose_give_way_row_111(world: World) -> None:
    await world.run(world.endpoint(Recoverability("broken"), transaction_mode="none"))
    assert len(world.attempts) == len(world.in_queue("broken")) == 1


@pytest.mark.parametrize("setting", ["policy", "customize_headers"])
def test_what_cannot_be_called_is_refused(setting: str) -> None:
    wrong: dict[str, Any] = {setting: "often"}
    with pytest.raises(ConfigurationError, match=setting):
        Recoverability(**wrong)


# --- error copies (row 112) -------------------------------------------------------------------------------------------


class Refused(Exception):
    """An error that says more than its text."""

    def __init__(self, content: object, link: object) -> None:
        super().__init__("refused")
        self.data, self.help_link = content, link


async def test_headers_of_error_copies_can_be_customized_row_112(world: World) -> None:
    def customize(headers: Mapping[str, str]) -> Mapping[str, str]:
        kept = {key: value for key, value in headers.items() if key != Headers.EXCEPTION_STACK_TRACE}
        return {**kept, "team": "payments \0", Headers.EXCEPTION_MESSAGE: "(hidden)"}

    await world.run(world.endpoint(Recoverability(immediate_retries=0, delayed_retries=0, customize_headers=customize)))
    (copy,) = world.in_queue("error")
    assert copy.headers["team"] == "payments \\x00"
    assert copy.headers[Headers.EXCEPTION_MESSAGE] == "(hidden)"
    assert Headers.EXCEPTION_STACK_TRACE not in copy.headers
    assert copy.headers[Headers.FAILED_QUEUE] == "sales"


def test_customizing_that_fails_does_not_keep_a_copy_from_leaving_row_112(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Mapping[str, str]) -> Mapping[str, str]:
        raise KeyError("no")

    def number(_: Mapping[str, str]) -> Any:
        return {"number": 1}

    assert customize_headers({"a": "b"}, fail) == customize_headers({"a": "b"}, number) == {"a": "b"}
    assert len(caplog.records) == 2


def told(error: BaseException) -> dict[str, str]:
    """Return what an error copy says beside what every one says."""
    now = VirtualClock().now()
    usual = error_headers({}, ValueError("x"), "sales", now, Host("sales"))
    return {
        key: value for key, value in error_headers({}, error, "sales", now, Host("sales")).items() if key not in usual
    }


def test_an_error_copy_has_the_data_and_the_help_link_of_its_exception_row_112() -> None:
    assert told(Refused({"order": 4711, 2: "x" * 20_000}, "https://help/1")) == {
        "NServiceBus.ExceptionInfo.Data.order": "4711",
        "NServiceBus.ExceptionInfo.Data.2": "x" * 16_384,
        "NServiceBus.ExceptionInfo.HelpLink": "https://help/1",
    }
    assert told(Refused(["no", "mapping"], 4711)) == {}
    assert told(Refused({"lone \ud800": "bad \0"}, "")) == {"NServiceBus.ExceptionInfo.Data.lone \\ud800": "bad \\x00"}


def test_data_that_cannot_be_read_does_not_keep_a_copy_from_leaving_row_112() -> None:
    class Unreadable(Exception):
        @property
        def data(self) -> object:
            raise OSError("gone")

    assert told(Unreadable()) == {"NServiceBus.ExceptionInfo.Data.unreadable": "OSError"}


def test_data_of_an_exception_is_bounded_in_number_and_size_row_112() -> None:
    assert len(told(Refused(dict.fromkeys(range(100), "x"), ""))) == DATA_ENTRIES
    (key,) = told(Refused({"k" * 1_000_000: "x"}, ""))
    assert len(key) == len(Headers.EXCEPTION_DATA_PREFIX) + DATA_KEY_LIMIT
    much = told(Refused(dict.fromkeys(range(10), "x" * 10000), ""))
    assert DATA_LIMIT - 200 <= sum(len(key) + len(value) for key, value in much.items()) <= DATA_LIMIT


# --- what was decided and cannot be carried out (row 111) -------------------------------------------------------------


@pytest.mark.parametrize(
    "decision",
    [
        MoveToError("nowhere"),
        MoveToError(" "),
        MoveToError(7),  # type: ignore[arg-type]
        DelayedRetry(timedelta.max),
        DelayedRetry(5),  # type: ignore[arg-type]
    ],
    ids=str,
)
async def test_what_cannot_be_carried_out_leads_to_the_error_queue_with_a_warning_row_111(
    world: World, caplog: pytest.LogCaptureFixture, decision: Any
) -> None:
    await world.run(world.endpoint(Recoverability(policy=lambda *_: decision)))
    assert len(world.attempts) == len(world.in_queue("error")) == 1
    (line,) = [each for each in caplog.records if "goes to the error queue" in each.getMessage()]
    assert line.levelname == "WARNING"


async def test_an_error_copy_that_is_too_large_leaves_in_brief_row_111(world: World) -> None:
    world.queues = MemoryTransport(largest_message_bytes=1_000)
    world.error = Refused({"some": "data"}, "https://help/1")
    settings = Recoverability(
        immediate_retries=0,
        delayed_retries=0,
        customize_headers=lambda headers: {**headers, "much": "y" * 1_000_000},
    )
    await world.run(world.endpoint(settings), own="1")
    assert len(world.attempts) == 1
    (copy,) = world.in_queue("error")
    assert (copy.body, copy.headers["own"], copy.headers[Headers.FAILED_QUEUE]) == (b"\0raw", "1", "sales")
    assert copy.headers[Headers.EXCEPTION_MESSAGE] == "refused"
    left_out = {Headers.EXCEPTION_STACK_TRACE, Headers.EXCEPTION_HELP_LINK, Headers.EXCEPTION_DATA_PREFIX + "some"}
    assert not left_out & copy.headers.keys()


@pytest.mark.parametrize("refused", [[1], [1, 2]], ids=["the audit copy", "the first error copy, too"])
async def test_in_mode_none_what_cannot_be_sent_leads_to_the_error_queue_at_once(
    clock: VirtualClock, refused: list[int]
) -> None:
    """The message is off its queue already, so nobody could give it back."""
    queues = MemoryTransport()
    faulty = FaultyTransport(queues)
    endpoint = Endpoint("sales", transport=faulty, transaction_mode="none", audit=Audit("audit"), clock=clock)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        first = faulty.faults.calls["send"]
        faulty.faults.add(Fault("send", TransportUnavailable("blip"), [first + each for each in refused]))

    async with endpoint:
        await endpoint.send(b"raw", destination="sales")
        await clock.run_until_idle()
        assert await queues.queue_lengths() == {"sales": 0, "error": 1, "audit": 0}
