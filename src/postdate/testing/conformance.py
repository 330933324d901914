"""Checks of conformance suites, and the errors with which they fail. Independent of any test framework.

Every framework can run a suite; with pytest, one parametrized test is enough::

    @pytest.mark.parametrize("check", store_checks(), ids=str)
    async def test_my_store(check, tmp_path):
        await check(MyStoreSubject(tmp_path))
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Generic, TypeVar, TypeVarTuple

import anyio

from postdate.errors import PostdateError

S = TypeVar("S")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

NEWS_SECONDS = 60.0
"""Longest real time that a check waits for an event that must come.

The event comes at once, so only a failing check waits this long.

A busy machine may stop for seconds, and a check must not fail because of that.
"""

WAKE_UP_SECONDS = 20.0
"""Longest time that a check waits for a wake-up. It is less than the minute after which every poller polls anyway."""


class ConformanceFailure(AssertionError):
    """The adapter does not keep a promise of its port."""


@dataclass(frozen=True, slots=True)
class Check(Generic[S]):
    """A check of one promise of a port.

    Args:
        topic: of the suite.
        name: unique within the topic; ``Guarantees`` lines cite ``topic.name``.
        proves: what the check proves, in one or two sentences.
        run: takes the subject; raises :class:`ConformanceFailure`.
    """

    topic: str
    name: str
    proves: str
    run: Callable[[S], Awaitable[None]]

    async def __call__(self, subject: S) -> None:
        """Run the check on a fresh subject."""
        await self.run(subject)

    def __str__(self) -> str:
        return f"{self.topic}.{self.name}"


class Topic(Generic[S]):
    """The checks of one topic, in the order in which they are written down.

    Args:
        name: of the topic.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.checks: list[Check[S]] = []

    def __call__(self, run: Callable[[S], Awaitable[None]]) -> Callable[[S], Awaitable[None]]:
        """Register a function as a check: its name is the promise, its docstring says what the check proves."""
        self.checks.append(Check(self.name, run.__name__, inspect.getdoc(run) or "", run))
        return run

    def with_fixtures(
        self, open_fixture: Callable[[S], AbstractAsyncContextManager[tuple[*Ts] | None]]
    ) -> Callable[[Callable[[*Ts], Awaitable[None]]], None]:
        """Register a function as a check; its arguments are the values that ``open_fixture`` yields.

        If ``open_fixture`` yields ``None`` for a subject, the check passes without running.
        """

        def register(check: Callable[[*Ts], Awaitable[None]]) -> None:
            @wraps(check)
            async def run(subject: S) -> None:
                async with open_fixture(subject) as arguments:
                    if arguments is not None:
                        await check(*arguments)

            self(run)

        return register

    def with_fixture(
        self, open_fixture: Callable[[S], AbstractAsyncContextManager[T]]
    ) -> Callable[[Callable[[T], Awaitable[None]]], None]:
        """Register a check as :meth:`with_fixtures` does; its only argument is the value of ``open_fixture``."""

        @asynccontextmanager
        async def open_one(subject: S) -> AsyncGenerator[tuple[T]]:
            async with open_fixture(subject) as value:
                yield (value,)

        return self.with_fixtures(open_one)


class Damage(enum.Enum):
    """The kind of damage that a row has; it is made directly in the storage, without the adapter."""

    HEADERS = "headers"
    """Headers that are no JSON object of texts."""
    DUE = "due"
    """A due time before the calendar begins: the message is due, and its due time cannot be read."""
    CONTENT = "content"
    """Headers and body are missing, the rest of the row is there."""
    DESTINATION = "destination"
    """A destination of spaces only; for messages of a store only."""


def expect(is_kept: bool, promise: str) -> None:
    """Raise `ConformanceFailure` with ``promise`` unless ``is_kept`` is true."""
    if not is_kept:
        raise ConformanceFailure(promise)


def expect_equal(actual: object, expected: object, subject: str) -> None:
    """Raise `ConformanceFailure` unless both values are equal; ``subject`` names them."""
    if actual != expected:
        raise ConformanceFailure(f"{subject}: expected {_shorten(expected)}, got {_shorten(actual)}")


@contextmanager
def expect_error(kind: type[PostdateError], occasion: str) -> Generator[None]:
    """Raise `ConformanceFailure` unless the block raises ``kind``."""
    try:
        yield
    except kind:
        return
    except PostdateError as error:
        raise ConformanceFailure(
            f"{occasion}: expected {kind.__name__}, got {type(error).__name__}: {error}"
        ) from error
    raise ConformanceFailure(f"{occasion}: expected {kind.__name__}, but nothing was raised")


@contextmanager
def expect_in_time(event: str, *, is_wake_up: bool = False) -> Generator[None]:
    """Raise `ConformanceFailure` when the block, which waits for something, takes too long.

    The limit is :data:`NEWS_SECONDS`, or :data:`WAKE_UP_SECONDS` with ``is_wake_up``.
    """
    seconds = WAKE_UP_SECONDS if is_wake_up else NEWS_SECONDS
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise ConformanceFailure(f"{event} did not happen within {seconds:g} s")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 500 else f"{text[:500]}… ({len(text):,} characters)"
