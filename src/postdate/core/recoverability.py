"""Decisions after failures: one pure function for each place where failures occur. See docs/cli/errors.md."""

from __future__ import annotations

import enum
import logging
import os
import platform
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Final, TypeAlias, TypeVar, cast

from postdate import errors, messages
from postdate.ports import Received

log = logging.getLogger("postdate.recoverability")

T = TypeVar("T")

LONGEST_RETRY_DELAY = timedelta(minutes=1)

LONGEST_OUTAGE_DELAY = timedelta(seconds=10)
"""The longest pause after an outage. When the server is back, due messages are sent within this time."""
EXCEPTION_MESSAGE_LIMIT = 16_384
STACK_TRACE_LIMIT = 16_384
DATA_ENTRIES = 64
"""The most entries of an exception's mapping ``data`` that are reported, in their order."""
DATA_KEY_LIMIT = 200
DATA_LIMIT = 32_768
"""Bytes of keys and values together, in UTF-8."""
_BRIEF_MESSAGE_LIMIT = 200
DEFAULT_ERROR_QUEUE = "error"
_RETRIES_END_AFTER = timedelta(hours=24)
_LONGEST_COUNT: Final = 9
"""Digits of a number of retries in a header, which may be anybody's: Python refuses to read more than 4,300."""


@dataclass(frozen=True, slots=True)
class ImmediateRetry:
    """Return the message to its queue; it is handled again at once."""


@dataclass(frozen=True, slots=True)
class DelayedRetry:
    """Try again after ``delay``."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class MoveToError:
    """Move the message to the error queue ``queue``, which must exist; ``None``: the error queue of the endpoint."""

    queue: str | None = None


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove the message from its queue and record the reason. No copy is kept."""

    reason: str


Decision: TypeAlias = ImmediateRetry | DelayedRetry | MoveToError | Discard

Policy: TypeAlias = "Callable[[BaseException, int, Mapping[str, str], Recoverability, datetime], Decision]"
"""Decides about a message whose handling failed; arguments as of :func:`decide_handling_failure`.

Pure: time is an argument. An error that it raises is a critical error, and the message is handled again.
"""

CustomizeHeaders: TypeAlias = Callable[[Mapping[str, str]], Mapping[str, str]]
"""Returns the headers of an error copy; its argument is the headers that the copy has otherwise. Pure."""


class _Default(int):
    """A default number of retries, which no user has chosen. If it is impossible it is ignored and not refused."""

    __slots__ = ()


IMMEDIATE_RETRIES: Final = _Default(5)
DELAYED_RETRIES: Final = _Default(3)


@dataclass(frozen=True, slots=True)
class Recoverability:
    """How often handling a message is tried.

    Args:
        error_queue: the queue for messages that cannot be handled; ``None``: the endpoint's error queue.
        immediate_retries: attempts in a row after the first; 0 or more.
        delayed_retries: rounds after a delay, each with its own immediate retries; 0 or more.
        time_increase: the n-th delayed retry waits n times this duration.
        unrecoverable: exceptions after which a retry is useless; subclasses count.
        policy: decides instead of :func:`decide_handling_failure`, which it may call.
        customize_headers: makes the final headers of error copies.

    Raises:
        ConfigurationError: a number or the increase is negative, or a function is not callable.
    """

    error_queue: str | None = None
    immediate_retries: int = IMMEDIATE_RETRIES
    delayed_retries: int = DELAYED_RETRIES
    time_increase: timedelta = timedelta(seconds=10)
    unrecoverable: tuple[type[BaseException], ...] = (errors.MessageError,)
    policy: Policy | None = None
    customize_headers: CustomizeHeaders | None = None

    def __post_init__(self) -> None:
        for name in ("policy", "customize_headers"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise errors.ConfigurationError(f"{name} must be a function, not {getattr(self, name)!r}")
        if self.immediate_retries < 0 or self.delayed_retries < 0 or self.time_increase < timedelta(0):
            raise errors.ConfigurationError("numbers of retries and their time increase must not be negative")


def decide_handling_failure(
    error: BaseException, failures: int, headers: Mapping[str, str], policy: Recoverability, now: datetime
) -> Decision:
    """Decide about a message whose handling failed.

    Args:
        error: the error that the handler raised.
        failures: how often handling has failed in this round, this failure included; 1 or more.
        headers: of the message: the number of delayed retries, and when the last one was scheduled.
        policy: the numbers of retries.
        now: UTC.
    """
    if isinstance(error, policy.unrecoverable):
        return MoveToError(policy.error_queue or DEFAULT_ERROR_QUEUE)
    if failures <= policy.immediate_retries:
        return ImmediateRetry()
    performed_retries = count_delayed_retries(headers)
    # Without a count the timestamp is of an earlier life: it stays in an error copy, which may be returned days later.
    if performed_retries < policy.delayed_retries and not (performed_retries and _has_retried_too_long(headers, now)):
        return DelayedRetry(policy.time_increase * (performed_retries + 1))
    return MoveToError(policy.error_queue or DEFAULT_ERROR_QUEUE)


def check_retries(settings: Recoverability, *, immediate: bool, delayed: bool) -> None:
    """Refuse retries that a user has chosen and that are impossible; defaults are not refused.

    ``immediate``: whether a message can return to its queue; not in transaction mode ``none``. ``delayed``: whether it
    can be delivered again later; this needs a store, and is impossible in that mode, too.
    """
    retries, rounds = settings.immediate_retries, settings.delayed_retries
    if retries > 0 and not immediate and not isinstance(retries, _Default):
        raise errors.ConfigurationError(
            f"immediate_retries={retries} is not possible in transaction mode 'none', which removes a message from "
            f"its queue before it is handled: use 'receive_only', or immediate_retries=0"
        )
    if rounds > 0 and not delayed and not isinstance(rounds, _Default):
        raise errors.ConfigurationError(
            f"delayed_retries={rounds} is not possible without delayed_delivery=DelayedDelivery(store), nor in "
            f"transaction mode 'none': add the store or change the mode, or set delayed_retries=0"
        )


def unavailability_reason(decision: Decision, *, immediate: bool, delayed: bool) -> str | None:
    """Return why a decision cannot be carried out, or ``None`` (row 111); flags as in :func:`check_retries`."""
    if isinstance(decision, ImmediateRetry) and not immediate:
        return "no immediate retry in transaction mode 'none'"
    if isinstance(decision, DelayedRetry) and not delayed:
        return "no delayed retry without a store, nor in transaction mode 'none'"
    return None


def count_delayed_retries(headers: Mapping[str, str]) -> int:
    """Return how many delayed retries a message has had; an unreadable count is 0."""
    text = headers.get(messages.Headers.DELAYED_RETRIES, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _LONGEST_COUNT else 0


def _has_retried_too_long(headers: Mapping[str, str], now: datetime) -> bool:
    text = headers.get(messages.Headers.DELAYED_RETRIES_TIMESTAMP)
    if text is None:
        return False
    try:
        return now - messages.parse_timestamp(text) > _RETRIES_END_AFTER
    except errors.InvalidTimestamp:  # specified: ignored when unreadable
        return False


def delayed_retry_headers(headers: Mapping[str, str], now: datetime) -> dict[str, str]:
    return {
        **headers,
        messages.Headers.DELAYED_RETRIES: str(count_delayed_retries(headers) + 1),
        messages.Headers.DELAYED_RETRIES_TIMESTAMP: messages.format_timestamp(now),
    }


def decide_dispatch_failure(
    error: errors.PostdateError, failures: int, number_of_retries: int, error_queue: str
) -> Decision:
    """Decide about a due message that could not be sent to its destination, after ``failures`` earlier failures.

    A message is attempted ``number_of_retries + 1`` times in total (upstream makes two or more:
    docs/specification-rows.md, row 37). A missing queue is not retried (row 38), once the time is over for which
    messages wait for it. While the server of the queues is out of reach the message waits, and these attempts do not
    count.
    """
    if is_outage(error):
        return DelayedRetry(retry_delay(failures, error))
    if isinstance(error, (errors.QueueNotFound, errors.MessageError)) or failures >= number_of_retries:
        return MoveToError(error_queue)
    return DelayedRetry(retry_delay(failures))


def is_outage(error: BaseException) -> bool:
    """Return whether the store or the queues themselves fail. No message caused that, so none is given up for it."""
    return isinstance(error, errors.PostdateError) and error.outage


def can_concern_one_message(error: BaseException) -> bool:
    """Return whether an outage may concern a single row. A store that is read-only, full or away fails for all rows."""
    of_store = error.__cause__ if isinstance(error, errors.TransportUnreachable) else error
    return isinstance(of_store, errors.StoreTroubled | errors.NotADatabase)


def check_answers(adapter: object, count: int, answers: Sequence[T]) -> Sequence[T]:
    """Return the answers of a transport or receiver for ``count`` messages that it was to send or to end.

    Raises:
        TransportUnavailable: the number of answers differs. A message without an answer may be lost otherwise.
    """
    if len(answers) != count:
        raise errors.TransportUnavailable(f"{type(adapter).__name__} answered for {len(answers)} of {count} messages")
    return answers


def retry_delay(failures: int, error: BaseException | None = None) -> timedelta:
    """Return the pause after a failed attempt: 1 s, doubled by each earlier failure, at most one minute.

    After an outage it is at most :data:`LONGEST_OUTAGE_DELAY`, as the message is not the cause of the failures.
    """
    longest = LONGEST_OUTAGE_DELAY if error is not None and is_outage(error) else LONGEST_RETRY_DELAY
    return min(timedelta(seconds=1) * 2 ** min(failures, 10), longest)


# --- received messages -----------------------------------------------------------------------------------------------

MOST_OWN_FAILURES: Final = 10
"""How often a message may fail while others do not. Up to this number it may be a coincidence."""

MOST_STEP_RETRIES: Final = 1_000
"""How often a step is called again at once.

Each conflict of a saga means that another message succeeded. After so many conflicts in a row this is not plausible:
the store must report a conflict in every case.
"""


class Resolution(enum.Enum):
    """The next step for a message whose step failed or whose end was refused."""

    RETRY_NOW = "its step is asked again at once"
    WAIT_FOR_STORE = "it stays in hand until its store takes something again"
    WAIT_ALONE = "it stays in hand, and its store takes others meanwhile"
    REQUEUE = "it goes back to its queue after a pause"
    POLICY = "its policy decides"
    ERROR_COPY = "an error copy with everything"
    BRIEF_ERROR_COPY = "an error copy in brief"
    STUCK = "nothing takes it: it waits longer each time"


@dataclass(frozen=True, slots=True)
class RecoveryRules:
    """The rules for failures of one kind of outcome.

    Args:
        retry_now_errors: errors after which the step is called again: another message was faster, or the step has
            another way.
        waits_in_hand: the claim of a message is kept while its store takes nothing; otherwise it returns to its queue.
        shares_database: store and queues share a database, so queues out of reach are an outage of the store.
        counts_transient: transient failures count against the message, after a pause; otherwise it returns to its
            queue.
        is_off_queue: the message is off its queue already, so it cannot return (transaction mode ``none``).
    """

    retry_now_errors: tuple[type[errors.PostdateError], ...] = ()
    waits_in_hand: bool = False
    shares_database: bool = False
    counts_transient: bool = False
    is_off_queue: bool = False


def is_lasting(error: errors.PostdateError) -> bool:
    """Return whether the same call would fail again after any wait, although the claim is in force."""
    return not (error.transient or error.outage or isinstance(error, errors.ClaimLost))


def resolve_failure(
    refused: Resolution | None,
    error: errors.PostdateError,
    received: Received,
    own_failures: int,
    rules: RecoveryRules,
    *,
    other_messages_succeeded: bool = False,
) -> Resolution:
    """Decide about a received message whose step failed, or whose end was refused.

    No message returns for ever because of an error that only this message meets: after :data:`MOST_OWN_FAILURES` times
    the error counts as its failure.

    Args:
        refused: the earlier resolution that could not be carried out; ``None``: there is none.
        error: of the step, or of the end.
        received: the message.
        own_failures: how often it failed while other messages succeeded, not counting errors of the message itself.
        rules: of the kind of outcome.
        other_messages_succeeded: whether any message has succeeded since the last of these failures.
    """
    is_final = rules.is_off_queue or is_lasting(error) or own_failures > MOST_OWN_FAILURES
    if refused is not None:
        return resolve_copy_failure(refused, error) if is_final else Resolution.REQUEUE
    if isinstance(error, rules.retry_now_errors) and received.attempts + 1 < MOST_STEP_RETRIES:
        return Resolution.RETRY_NOW
    if (
        is_outage(error)
        and own_failures <= MOST_OWN_FAILURES
        and not (rules.is_off_queue or (received.is_dropped_if_returned and rules.waits_in_hand))
    ):
        if not rules.waits_in_hand or (isinstance(error, errors.TransportUnreachable) and not rules.shares_database):
            return Resolution.REQUEUE
        return Resolution.WAIT_ALONE if own_failures > 1 and other_messages_succeeded else Resolution.WAIT_FOR_STORE
    is_counted = is_final or isinstance(error, rules.retry_now_errors)
    return (
        Resolution.POLICY
        if is_counted or (rules.counts_transient and not isinstance(error, errors.ClaimLost))
        else Resolution.REQUEUE
    )


def resolve_copy_failure(refused: Resolution, error: errors.PostdateError) -> Resolution:
    """Return the resolution after ``refused`` could not be carried out: a full error copy, then a brief one."""
    if refused is Resolution.BRIEF_ERROR_COPY:
        return Resolution.STUCK if isinstance(error, errors.MessageError) else Resolution.REQUEUE
    return Resolution.BRIEF_ERROR_COPY if refused is Resolution.ERROR_COPY else Resolution.ERROR_COPY


# --- error copies -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Host:
    """The process that handled a message; part of every error copy."""

    endpoint: str
    machine: str = field(default_factory=platform.node)
    host_id: str = field(default_factory=lambda: uuid.uuid5(uuid.NAMESPACE_DNS, platform.node()).hex)
    display_name: str = field(default_factory=lambda: f"{platform.node()} {os.getpid()}")


def error_headers(
    headers: Mapping[str, str],
    error: BaseException,
    failed_queue: str,
    now: datetime,
    host: Host,
    *,
    brief: bool = False,
) -> dict[str, str]:
    """Return the headers of an error copy: the headers of the message, and headers about the failure.

    They include the mapping ``data`` and the text ``help_link`` of an exception. ``brief`` leaves out these and the
    stack trace, and all but 200 characters of the text. Source: docs/cli/errors.md.
    """
    message_headers = {
        name: value
        for name, value in headers.items()
        if name not in {messages.Headers.DELAYED_RETRIES, messages.Headers.IMMEDIATE_RETRIES}
    }
    failure_headers = {
        messages.Headers.FAILED_QUEUE: failed_queue,
        messages.Headers.TIME_OF_FAILURE: messages.format_timestamp(now),
        messages.Headers.PROCESSING_MACHINE: host.machine,
        messages.Headers.PROCESSING_ENDPOINT: host.endpoint,
        messages.Headers.HOST_ID: host.host_id,
        messages.Headers.HOST_DISPLAY_NAME: host.display_name,
        messages.Headers.EXCEPTION_TYPE: _type_name(error),
        messages.Headers.EXCEPTION_MESSAGE: text_of(error)[:EXCEPTION_MESSAGE_LIMIT],
        messages.Headers.EXCEPTION_SOURCE: type(error).__module__,
        messages.Headers.EXCEPTION_STACK_TRACE: _shorten_trace(
            escape_unstorable("".join(traceback.format_exception(error)))
        ),
    }
    if error.__cause__ is not None:
        failure_headers[messages.Headers.EXCEPTION_INNER_TYPE] = _type_name(error.__cause__)
    if isinstance(error, errors.PostdateError):
        failure_headers[messages.Headers.ERROR_CODE] = error.code
    if not brief:
        return {**message_headers, **failure_headers, **_help_and_data_headers(error)}
    # A stack trace of an earlier failure would look like the one of this failure.
    for each in (
        message_headers,
        failure_headers,
    ):
        each.pop(messages.Headers.EXCEPTION_STACK_TRACE, None)
    failure_headers[messages.Headers.EXCEPTION_MESSAGE] = failure_headers[messages.Headers.EXCEPTION_MESSAGE][
        :_BRIEF_MESSAGE_LIMIT
    ]
    return {**message_headers, **failure_headers}


def _help_and_data_headers(error: BaseException) -> dict[str, str]:
    """Return headers for an exception's ``help_link`` and ``data``, within the limits above. Never raises."""
    headers: dict[str, str] = {}
    free_bytes = DATA_LIMIT
    try:
        link, content = getattr(error, "help_link", None), getattr(error, "data", None)
        if isinstance(link, str) and link:
            headers[messages.Headers.EXCEPTION_HELP_LINK] = escape_unstorable(link)[:EXCEPTION_MESSAGE_LIMIT]
        if isinstance(content, Mapping):
            for key, value in islice(cast("Mapping[object, object]", content).items(), DATA_ENTRIES):
                name = messages.Headers.EXCEPTION_DATA_PREFIX + escape_unstorable(str(key))[:DATA_KEY_LIMIT]
                free_bytes -= len(name.encode())
                if free_bytes < 0:
                    break
                text = escape_unstorable(str(value))[:EXCEPTION_MESSAGE_LIMIT].encode()[:free_bytes]
                free_bytes -= len(text)
                headers[name] = text.decode(errors="ignore")
    except Exception as failure:  # noqa: BLE001 - properties and texts of an application
        headers[messages.Headers.EXCEPTION_DATA_PREFIX + "unreadable"] = type(failure).__name__
    return headers


def customize_headers(headers: dict[str, str], customize: CustomizeHeaders | None) -> dict[str, str]:
    """Return headers after the application's ``customize``. If that fails, log it and return the headers unchanged."""
    if customize is None:
        return headers
    try:
        custom_headers = dict(customize(headers))
        messages.check_headers(custom_headers)
    except Exception:
        log.exception("customize_headers failed: the error copy has the headers it would have without it")
        return headers
    return {escape_unstorable(key): escape_unstorable(value) for key, value in custom_headers.items()}


@dataclass(frozen=True, slots=True)
class ErrorQueue:
    """An error queue.

    An operator returns its copies to ``failed_queue``. ``customize`` is applied to full copies, not to brief ones.
    """

    name: str
    failed_queue: str
    host: Host
    customize: CustomizeHeaders | None = None

    def copy(
        self, original: messages.Envelope, error: BaseException, now: datetime, *, brief: bool = False
    ) -> messages.Envelope:
        """Return an error copy. It never expires, so that an operator finds it. ``brief``: a full one was refused."""
        headers = error_headers(original.headers, error, self.failed_queue, now, self.host, brief=brief)
        if not brief:
            headers = customize_headers(headers, self.customize)
        return messages.Envelope(self.name, original.message_id, headers, original.body, due=original.due)


BYTES_IN_FLIGHT: Final = 64 * 1024 * 1024
"""The most bytes of the bodies of all messages in flight.

It may be exceeded a little if a batch has larger messages than the batch before.
"""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """The settings for messages that cannot be delivered.

    Args:
        timeouts_queue: the queue to return an error copy to, to dispatch the message again (row 40).
        number_of_retries: attempts after the first.
        errors_return_to_destination: error copies of due messages name their destination as the queue to return them
            to, instead of the timeouts queue.
        missing_queue_wait: how long due messages wait for a queue that does not exist, since this process first missed
            it. Then they fail. Zero: they fail at once (docs/specification-rows.md, row 38).
    """

    timeouts_queue: str
    error_queue: str
    number_of_retries: int
    host: Host
    errors_return_to_destination: bool = False
    bytes_in_flight: int = BYTES_IN_FLIGHT
    missing_queue_wait: timedelta = timedelta(0)

    @property
    def errors(self) -> ErrorQueue:
        return ErrorQueue(self.error_queue, self.timeouts_queue, self.host)

    def error_copy(
        self, message: messages.DelayedMessage, error: BaseException, now: datetime, *, brief: bool
    ) -> messages.Envelope:
        """Return a copy that can be returned to the timeouts queue (rows 39, 40) or to the destination (row 84)."""
        if self.errors_return_to_destination:
            error_queue = replace(self.errors, failed_queue=message.destination)
            return error_queue.copy(messages.to_envelope(message), error, now, brief=brief)
        clean = replace(message, headers=messages.strip_delay_headers(message.headers))  # as on every other way out
        return self.errors.copy(messages.Envelope.of(clean, messages.delay_headers(clean)), error, now, brief=brief)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, also if its ``__str__`` fails. Characters that cannot be stored are escaped."""
    try:
        return escape_unstorable(str(error))
    except Exception as failure:  # noqa: BLE001 - `__str__` of an application's exception may raise any error
        return f"(its text cannot be read: {type(failure).__name__})"


def reason_of(error: errors.PostdateError) -> str:
    return f"{error.code}: {text_of(error)}"


def _shorten_trace(trace: str) -> str:
    """Cut the middle out of a long stack trace: its begin has the first frames, its end the text of the exception."""
    if len(trace) <= STACK_TRACE_LIMIT:
        return trace
    gap = f"\n[… {len(trace) - STACK_TRACE_LIMIT} characters or more are left out …]\n"
    head_length = STACK_TRACE_LIMIT // 2
    return trace[:head_length] + gap + trace[len(trace) - STACK_TRACE_LIMIT + head_length + len(gap) :]


def _type_name(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"


def escape_unstorable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode, and NUL, which PostgreSQL cannot store in a text.

    An exception may quote both. If its report could not be stored, the message would be received again for ever.
    """
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
