"""What becomes of a message that failed, received or due; and how error copies are made. Pure.

Source: specification 1.6, 4.9, 5; ADR 0019, 0026.
"""

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
"""Times that a step is asked again at once. For a saga, each says that another message got on: so many in a row are no
coincidence, its store says so whatever happens."""


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
        anew: after these its step is asked again at once: others were faster, or it knows another way.
        stays: while its store takes nothing a message stays in hand; otherwise it goes back.
        is_one: that store and the queues are one database: when these cannot be reached, that is the store's outage.
        counts: what may pass by itself counts against the message, too, after a pause; otherwise it goes back.
        is_taken: the message is off its queue already, so it cannot go back (transaction mode ``none``).
    """

    anew: tuple[type[PostdateError], ...] = ()
    stays: bool = False
    is_one: bool = False
    counts: bool = False
    is_taken: bool = False


def is_lasting(error: PostdateError) -> bool:
    """Return whether the same call would fail again, however long one waits, and the message is still ours."""
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

    Args:
        gone: what was decided last, and refused; ``None``: nothing yet.
        error: why.
        received: the message.
        met: how often it has met this trouble of its store while others went well.
        allowed: see :class:`Allowed`.
        others_are_well: something has gone well since it failed before.
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
    """Decide about a message, received or due, for which what was decided was refused, or its error copy."""
    if gone is Way.BRIEF:
        return Way.KEPT if isinstance(error, MessageError) else Way.BACK
    return Way.BRIEF if gone is Way.FULL else Way.FULL


@dataclass(frozen=True, slots=True)
class ErrorQueue:
    """Where messages go that failed for good.

    Args:
        name: of it.
        failed_queue: which its copies name, to be returned to.
        host: named in the copies.
        customize: has the last word about their headers, but not about those in brief.
    """

    name: str
    failed_queue: str
    host: Host
    customize: CustomizeHeaders | None = None

    def copy(self, original: Envelope, error: BaseException, now: datetime, *, brief: bool = False) -> Envelope:
        """Return the copy of a message for the error queue; it does not expire: an operator must find it.

        In brief it has as little about the failure as is needed, as the full one was refused.
        """
        headers = error_headers(original.headers, error, self.failed_queue, now, self.host, brief=brief)
        if not brief:
            headers = customized(headers, self.customize)
        return Envelope(self.name, original.message_id, headers, original.body, due=original.due)
