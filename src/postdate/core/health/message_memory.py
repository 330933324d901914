"""The memory of a process about single messages, for facts that their store or queue does not have. Source: ADR 45.

A store knows of a failure only when it is written, and many queues do not count how often a message was received. This
memory closes the gap: a message that was sent is removed and not sent a second time, and a message that fails while
others succeed is distinguished from an outage.

The memory is bounded and ends with the process. If an entry is missing, the worst effect is a duplicate or a delay;
nothing else may depend on it. Times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from postdate.core.recoverability import can_concern_one_message
from postdate.errors import PostdateError
from postdate.messages import DelayedMessage
from postdate.ports import Claim, Outcome

MOST_MESSAGES: Final = 10_000
"""The largest number of remembered messages, not counting messages whose claims are in force."""

FORGOTTEN_AFTER_SUCCESSES: Final = 100_000
"""A failure is forgotten after this many successes: the message did not return, so another process has handled it."""

_DOOMED_FOR_SECONDS: Final = 120.0
"""How long a message stays doomed. The pause before its next claim is at most a minute."""


@dataclass(slots=True)
class Release:
    """A claim to be released.

    Args:
        claim: the claim, which is in force.
        attempt_at: instant before which the message is not attempted again; ``None``: it may be attempted at once.
        reason: the reason of a failure, which the store counts and records; ``None``: the message has not failed.
    """

    claim: Claim
    attempt_at: datetime | None
    reason: str | None = None


@dataclass(slots=True)
class UnwrittenOutcome:
    """An outcome that the store has not recorded yet.

    Args:
        message_id: the id of the message.
        fingerprint: the fingerprint of the message, as its id may be used again for another message.
        claim: the claim under which the outcome is written; it may have ended with a write that failed. ``None``: the
            claim is lost, and any process may claim the message next, also this one.
        outcome: how the message ended; ``None``: its claim is to be released with ``release``.
        detail: a text for the record of the outcome.
        release: the release to write if there is no outcome.
        retry_at: monotonic seconds of the next write.
        failed_writes: how often writing the outcome has failed.
        lost_at: monotonic seconds at which the claim was lost.
        may_be_written: whether the store may have written the outcome already, because an answer was lost.
    """

    message_id: str
    fingerprint: int
    claim: Claim | None
    outcome: Outcome | None
    detail: str = ""
    release: Release | None = None
    retry_at: float = 0.0
    failed_writes: int = 1
    lost_at: float = 0.0
    may_be_written: bool = False


@dataclass(slots=True, frozen=True)
class Doom:
    """The reason why a message goes to the error queue at its next claim, if it is unchanged then.

    The error copy may be sent only under a young claim. See ``FRESH_CLAIM_AGE`` in
    :mod:`postdate.core.due.recovery`.
    """

    error: PostdateError
    fingerprint: int
    failures: int
    until: float


@dataclass(slots=True)
class MessageFacts:
    """The known facts about one message id.

    Args:
        failures: how often it failed. Failures without a success of another message between them count once.
        successes_before: :attr:`MessageMemory.successes` at its last failure.
        lost_claims: how often its claim was lost after it was handled and before it was acknowledged.
        doom: the reason to move it to the error queue when it is claimed again.
        unwritten: its outcome, if that is not written yet.
        may_be_stored: whether a store may have stored it, and it may still be in the queue it came from.
    """

    failures: int = 0
    successes_before: int = -1
    lost_claims: int = 0
    doom: Doom | None = None
    unwritten: UnwrittenOutcome | None = None
    may_be_stored: bool = False

    @property
    def is_empty(self) -> bool:
        is_counted = self.failures or self.lost_claims or self.may_be_stored
        return not is_counted and self.doom is None and self.unwritten is None


class MessageMemory:
    """The entries of the messages of one kind of calls, by message id. The oldest entry is dropped first.

    There is one object for each kind of calls, such as sending due messages or storing received ones: only messages of
    the same kind can be compared.
    """

    def __init__(self, most: int = MOST_MESSAGES) -> None:
        self.successes = 0
        """Grows with each success of any message."""
        self._most = most
        self._entries: dict[str, MessageFacts] = {}
        self._claimed_outcomes: dict[str, UnwrittenOutcome] = {}
        """Outcomes of :attr:`_entries` that are written under a claim.

        A separate dictionary, as callers iterate over it at each poll, and must not iterate over all entries.
        """
        self._next_trim = most
        """The number of entries at which the oldest are dropped next."""

    def __bool__(self) -> bool:
        """Return whether there is any entry. Mostly there is none, so callers check this first."""
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, message_id: str) -> MessageFacts | None:
        return self._entries.get(message_id)

    def has_any(self, message_ids: Collection[str]) -> bool:
        return not self._entries.keys().isdisjoint(message_ids)

    def get_or_create(self, message_id: str) -> MessageFacts:
        """Return the entry of a message, or a new one. It becomes the youngest entry, which is dropped last."""
        facts = self._entries.pop(message_id, None) or MessageFacts()
        self._entries[message_id] = facts
        if len(self._entries) > self._next_trim:
            self._trim()
        return facts

    def _trim(self) -> None:
        """Drop the oldest entries, except those whose claim is in force.

        It reads all entries, so it is called only when a tenth more than the limit has been added.
        """
        surplus = len(self._entries) - self._most
        free = (message_id for message_id in self._entries if message_id not in self._claimed_outcomes)
        for message_id in [message_id for message_id, _ in zip(free, range(surplus), strict=False)]:
            del self._entries[message_id]
        self._next_trim = max(len(self._entries), self._most) + self._most // 10

    def forget(self, *message_ids: str) -> None:
        """Forget messages completely."""
        if self._entries:
            for message_id in message_ids:
                self._entries.pop(message_id, None)
                self._claimed_outcomes.pop(message_id, None)

    def _drop_if_empty(self, message_id: str, facts: MessageFacts) -> None:
        if facts.is_empty:
            self._entries.pop(message_id, None)

    # --- failures with successes of other messages in between --------------------------------------------------------

    def has_success_since_failure(self, message_id: str) -> bool:
        """Return whether any message has succeeded since this one failed last; also ``True`` if it never failed."""
        facts = self._entries.get(message_id)
        return facts is None or facts.successes_before != self.successes

    def report_failure(self, message_id: str) -> int:
        """Count a failure; return how often this message failed. Failures without a success between them count once."""
        facts = self.get_or_create(message_id)
        facts.failures += facts.successes_before != self.successes
        facts.successes_before = self.successes
        return facts.failures

    def report_own_failure(self, message_id: str, error: BaseException) -> int:
        """Count a failure that this message may have caused; return how often it has failed.

        Return 0, and count nothing, for an outage of a whole store or of queues, and for a lasting error, which is
        handled at its first occurrence.
        """
        is_passing = isinstance(error, PostdateError) and error.transient and not error.outage
        return self.report_failure(message_id) if is_passing or can_concern_one_message(error) else 0

    def report_success(self, *message_ids: str) -> None:
        """Report that these messages have succeeded; without arguments, that another message has."""
        self.successes += 1
        if not self._entries:
            return
        for message_id in message_ids:
            if (facts := self._entries.get(message_id)) is not None:
                facts.failures, facts.successes_before, facts.may_be_stored = 0, -1, False
                self._drop_if_empty(message_id, facts)
        oldest = next(iter(self._entries.items()), None)
        if oldest is None:
            return
        message_id, facts = oldest
        if facts.failures and self.successes - facts.successes_before > FORGOTTEN_AFTER_SUCCESSES:
            facts.failures, facts.successes_before = 0, -1
            self._drop_if_empty(message_id, facts)

    # --- messages for the error queue -------------------------------------------------------------------------------

    def doom(self, message: DelayedMessage, error: PostdateError, failures: int, seconds: float) -> None:
        """Remember that a message goes to the error queue when it is claimed again, unchanged and with ``failures``."""
        doom = Doom(error, fingerprint(message), failures, seconds + _DOOMED_FOR_SECONDS)
        self.get_or_create(message.message_id).doom = doom

    def pop_doom(self, message: DelayedMessage, seconds: float) -> PostdateError | None:
        """Return the reason to move a message to the error queue now, and forget it; ``None``: the message is sent.

        A message that was returned from the error queue meanwhile has no failures any more, so it is sent.
        """
        facts = self._entries.get(message.message_id)
        if facts is None or facts.doom is None:
            return None
        doom, facts.doom = facts.doom, None
        self._drop_if_empty(message.message_id, facts)
        is_same = doom.fingerprint == fingerprint(message) and doom.failures == message.number_of_failures
        return doom.error if is_same and doom.until >= seconds else None

    # --- outcomes that are still to be written ----------------------------------------------------------------------

    @property
    def outcomes_with_claim(self) -> Mapping[str, UnwrittenOutcome]:
        """Outcomes that are written under a claim, by message id. The claim may have ended since the last write."""
        return self._claimed_outcomes

    @property
    def has_unwritten(self) -> bool:
        """Whether there is any unwritten outcome, also of a lost claim."""
        return bool(self._claimed_outcomes) or any(facts.unwritten is not None for facts in self._entries.values())

    def unwritten_of(self, message_id: str) -> UnwrittenOutcome | None:
        facts = self._entries.get(message_id)
        return None if facts is None else facts.unwritten

    def remember_unwritten(self, unwritten: UnwrittenOutcome) -> None:
        """Remember an outcome; it replaces an earlier one of the message and becomes the youngest entry."""
        message_id = unwritten.message_id
        self._claimed_outcomes.pop(message_id, None)
        if unwritten.claim is not None:
            self._claimed_outcomes[message_id] = unwritten
        self.get_or_create(message_id).unwritten = unwritten

    def forget_unwritten_outcome(self, message_id: str) -> None:
        """Forget the outcome of a message, as it is written or does not matter any more."""
        self._claimed_outcomes.pop(message_id, None)
        facts = self._entries.get(message_id)
        if facts is not None:
            facts.unwritten = None
            self._drop_if_empty(message_id, facts)

    def forget_claims_lost_before(self, seconds: float) -> None:
        """Forget the outcomes of claims that were lost before ``seconds``. It stops early, as the oldest are first."""
        expired = list[str]()
        for message_id, facts in self._entries.items():
            if facts.unwritten is None or facts.unwritten.claim is not None:
                continue
            if facts.unwritten.lost_at > seconds:
                break
            expired.append(message_id)
        for message_id in expired:
            self.forget_unwritten_outcome(message_id)


def fingerprint(message: DelayedMessage) -> int:
    """Return a hash of the content of a message. It differs if the id is used again for another message."""
    return hash((message.due, message.destination, message.body, frozenset(message.headers.items())))
