"""What is done about a failure: the policy decides, and what cannot be done goes to the error queue (row 111)."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

import anyio

from postdate.core.recoverability import (
    Decision,
    DelayedRetry,
    Discard,
    ImmediateRetry,
    MoveToError,
    Recoverability,
    after_handling_failed,
    check_retries,
    text_of,
    why_unavailable,
)
from postdate.endpoint.cancelling import cancelled_task
from postdate.errors import ClaimLost, ConfigurationError, InvalidMessage, PostdateError
from postdate.messages import DESTINATION_LIMIT, check_text
from postdate.ports import Received, TransactionMode

log = logging.getLogger("postdate.endpoint")

POLICY_FAILURES: Final = 10
"""A message is handled again when the policy itself fails; from the eleventh time on it goes to the error queue."""


class PolicyFailed(Exception):
    """The recoverability policy of the application raised something, or decided nothing that there is.

    Args:
        text: which message it was about.
        reason: what it raised.
    """

    def __init__(self, text: str, reason: Exception) -> None:
        super().__init__(text)
        self.reason = reason


def is_lasting(error: PostdateError) -> bool:
    """Return whether the same call would fail again, however long one waits, and the message is still ours."""
    return not (error.transient or error.outage or isinstance(error, ClaimLost))


def cancels_itself(received: Received) -> bool:
    """Return whether a handler cancels the task it runs in however often its message comes, which is a failure.

    Only from the eleventh time on: before, it may be the program that cancels all its tasks, by asyncio's own means.
    """
    if received.failures < POLICY_FAILURES or anyio.current_effective_deadline() == -math.inf:
        return False
    while (task := cancelled_task()) is not None:  # it has other messages to handle
        task.uncancel()
    return True


def _why_impossible(decision: Decision, now: datetime) -> str | None:
    """Return why there is no such time to retry at, or no such queue; ``None``: there may be."""
    try:
        match decision:
            case DelayedRetry(delay):
                _ = now + delay
            case MoveToError(str() as queue):
                check_text(queue, "its error queue", DESTINATION_LIMIT)
            case MoveToError(queue) if queue is not None:
                return f"{queue!r} is no name of a queue"
            case _:
                pass
    except (OverflowError, TypeError, InvalidMessage) as error:
        return f"{decision!r} cannot be: {error}"
    return None


@dataclass(frozen=True, slots=True)
class Retries:
    """Which retries an endpoint has.

    Args:
        immediate: a message can be given back to its queue.
        delayed: a message can come back later.
    """

    immediate: bool
    delayed: bool

    @classmethod
    def of(cls, mode: TransactionMode, *, delays: bool) -> Self:
        """Return the retries of a transaction mode, with or without a store for delayed messages."""
        given_back = mode is not TransactionMode.NONE
        return cls(given_back, given_back and delays)

    def check(self, settings: Recoverability) -> None:
        """Refuse settings that cannot be; see :func:`~postdate.core.recoverability.check_retries`."""
        check_retries(settings, immediate=self.immediate, delayed=self.delayed)

    def decide(self, error: Exception, received: Received, settings: Recoverability, now: datetime) -> Decision:
        """Return what the policy decides, if it can be done, else that the message goes to the error queue.

        Raises:
            PolicyFailed: a policy of the application did not decide.
        """
        headers, failures = dict(received.envelope.headers), received.failures + 1  # what it writes there is its own
        policy = settings.policy or after_handling_failed
        try:
            decision = policy(error, failures, headers, settings, now)
            if not isinstance(decision, ImmediateRetry | DelayedRetry | MoveToError | Discard):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigurationError(f"{decision!r} is no decision of a recoverability policy")  # noqa: TRY301
        except Exception as failure:
            raise PolicyFailed(
                f"Failed to execute the recoverability policy for message {received.envelope.message_id}, which failed "
                f"with {type(error).__name__}: {text_of(error)}",
                failure,
            ) from failure
        reason = why_unavailable(decision, immediate=self.immediate, delayed=self.delayed)
        reason = reason or _why_impossible(decision, now)
        if reason is None:
            return decision
        log.warning("message %s goes to the error queue: %s", received.envelope.message_id, reason)
        return MoveToError()
