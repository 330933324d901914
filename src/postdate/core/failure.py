"""What becomes of failed messages; error copies. Pure. Source: specification 1.6, 4.9, 5; ADR 0019, 0026."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from postdate.core.outages import BORNE
from postdate.core.recoverability import CustomizeHeaders, Host, customized, error_headers, is_outage
from postdate.errors import ClaimLost, MessageError, PostdateError, TransportUnreachable
from postdate.messages import Envelope
from postdate.ports import Received

ASKED_ANEW: Final = 1_000
"""Times that a step is asked again at once. Each conflict of a saga means that another message got on: after so many in
a row it is no coincidence, its store reports one whatever happens."""


class Way(enum.Enum):
    """What becomes of a message whose step failed, or whose end was refused."""

    ANEW = "its step is asked again at once"
    STAYS = "it stays in hand until its store takes something again"
    ALONE = "it stays in hand, and its store takes others meanwhile"
    BACK = "it goes back to its queue after a pause"
    DECIDED = "its policy decides"
    FULL = "an error copy with everything"
    BRIEF = "an error copy in brief"
    KEPT = "nothing takes it: it waits longer each time"


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may be done about failures of one kind of outcome.

    Args:
        anew: after these errors its step is asked again at once: others were faster, or it knows another way.
        stays: while its store takes nothing a message stays in hand; otherwise it goes back to its queue.
        is_one: store and queues are one database: when the queues cannot be reached, that is the store's outage.
        counts: transient failures count against the message, after a pause; otherwise it goes back.
        is_taken: the message is off its queue already, so it cannot go back (transaction mode ``none``).
    """

    anew: tuple[type[PostdateError], ...] = ()
    stays: bool = False
    is_one: bool = False
    counts: bool = False
    is_taken: bool = False


def is_lasting(error: PostdateError) -> bool:
    """Return whether the same call would fail again, however long one waits, and the claim is still held."""
    return not (error.transient or error.outage or isinstance(error, ClaimLost))


def way_after(
    gone: Way | None,
    error: PostdateError,
    received: Received,
    met: int,
    allowed: Allowed,
    *,
    others_are_well: bool = False,
) -> Way:
    """Decide about a received message whose step failed, or whose end was refused.

    ``gone`` is the way that was decided last, and refused. ``met`` counts the outages that this message met while
    others went well; ``others_are_well`` says that something has gone well since the last of them.
    """
    if gone is not None:
        return after_copy(gone, error) if allowed.is_taken or is_lasting(error) else Way.BACK
    if isinstance(error, allowed.anew) and received.tries + 1 < ASKED_ANEW:
        return Way.ANEW
    if is_outage(error) and met <= BORNE and not (allowed.is_taken or (received.is_last and allowed.stays)):
        if not allowed.stays or (isinstance(error, TransportUnreachable) and not allowed.is_one):
            return Way.BACK
        return Way.ALONE if met > 1 and others_are_well else Way.STAYS
    counts = allowed.is_taken or met > BORNE or is_lasting(error) or isinstance(error, allowed.anew)
    return Way.DECIDED if counts or (allowed.counts and not isinstance(error, ClaimLost)) else Way.BACK


def after_copy(gone: Way, error: PostdateError) -> Way:
    """Return the way after ``gone`` was refused, an error copy perhaps: a copy in full, then in brief."""
    if gone is Way.BRIEF:
        return Way.KEPT if isinstance(error, MessageError) else Way.BACK
    return Way.BRIEF if gone is Way.FULL else Way.FULL


@dataclass(frozen=True, slots=True)
class ErrorQueue:
    """An error queue. Its copies are to be returned to ``failed_queue``; ``customize`` is for full ones only."""

    name: str
    failed_queue: str
    host: Host
    customize: CustomizeHeaders | None = None

    def copy(self, original: Envelope, error: BaseException, now: datetime, *, brief: bool = False) -> Envelope:
        """Return an error copy, which never expires: an operator must find it. ``brief`` after a full one."""
        headers = error_headers(original.headers, error, self.failed_queue, now, self.host, brief=brief)
        if not brief:
            headers = customized(headers, self.customize)
        return Envelope(self.name, original.message_id, headers, original.body, due=original.due)
