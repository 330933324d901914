"""Sends claimed messages. Where store and queues share a database, the same transaction removes them from the store.

Source: ADR 0002, 0010.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta

from postdate.clock import Clock, in_real_time
from postdate.core.due.finishing import Finisher, Journal
from postdate.core.due.in_flight import Batch, Group, InFlight
from postdate.core.health.deadlines import Deadlines, translate_store_errors
from postdate.core.recoverability import can_concern_one_message, check_answers, is_outage
from postdate.core.simple_store import enlisting_store
from postdate.errors import DestinationUnavailable, PostdateError, TransportUnavailable, TransportUnreachable
from postdate.messages import Envelope, to_envelope
from postdate.ports import OUTCOME_RECORDS, Claim, ClaimingStore, Outcome, Transport
from postdate.runtime import tracing
from postdate.runtime.reporting import Metrics

LONGEST_SEND = timedelta(seconds=30)
"""A destination that has not answered after this time counts as unavailable."""

log = logging.getLogger("postdate.dispatcher")


class Sender:
    """Sends groups of messages: one call for all destinations if the transport pipelines, else one call for each.

    The number of concurrent sends to one destination is limited, so a destination that hangs does not delay others. A
    batch cancels a group that is not answered after :data:`LONGEST_SEND`.
    """

    def __init__(  # noqa: PLR0913 - collaborators; put together in one place
        self,
        store: ClaimingStore,
        transport: Transport,
        clock: Clock,
        finisher: Finisher,
        in_flight: InFlight,
        metrics: Metrics,
        journal: Journal,
        call_deadline: timedelta,
    ) -> None:
        self._store = store
        self._transport = transport
        self._clock = clock
        self._finisher = finisher
        self._in_flight = in_flight
        self._metrics = metrics
        self._journal = journal
        self.enlisting_store = enlisting_store(store, transport)
        """The store, if it shares a database with the queues, else ``None``."""
        # Separate deadlines, which are not shortened when the dispatcher stops: it waits for sends in flight (row 55).
        self._deadlines = Deadlines.of_transport(transport, clock, call_deadline)
        self.longest_send = in_real_time(clock, LONGEST_SEND)

    def group_claims(self, claims: Sequence[Claim], claimed_at: float) -> list[Group]:
        """Return one group for each call of the transport: all messages, or the messages of one destination."""
        if self._transport.capabilities.pipelines and self.enlisting_store is None:
            return [Group("", claims, claimed_at)] if claims else []
        by_destination: defaultdict[str, list[Claim]] = defaultdict(list)
        for claim in claims:
            by_destination[claim.message.destination].append(claim)
        return [Group(destination, group, claimed_at) for destination, group in by_destination.items()]

    async def send_group(self, batch: Batch, group: Group) -> Sequence[PostdateError | None]:
        """Send a group when it has a slot at its destination; return an error or ``None`` for each message."""
        if self.enlisting_store is not None:
            group.start_deadline(self._clock.monotonic())
            return await self._send_enlisted_group(group.claims)
        with group.scope:
            if not group.destination:
                return await self._send_now(batch, group)
            if not self._in_flight.is_full(group.destination, self._clock.monotonic()):
                async with self._in_flight.acquire_slot(group.destination, self._clock):
                    return await self._send_now(batch, group)
        return [self.no_answer_error(group.destination)] * len(group.claims)

    async def _send_now(self, batch: Batch, group: Group) -> Sequence[PostdateError | None]:
        group.start_deadline(self._clock.monotonic())
        self._forget_lost_claims(batch, group)
        if not group.claims:
            return []

        async def remember_late_sends(errors: Sequence[PostdateError | None]) -> None:
            """Remember messages that were sent after all: if they are claimed again, they are only removed."""
            sent = [claim for claim, error in zip(group.claims, errors, strict=False) if error is None]
            self._finisher.remember_sent(sent)

        return await self.send([to_envelope(claim.message) for claim in group.claims], remember_late_sends)

    def _forget_lost_claims(self, batch: Batch, group: Group) -> None:
        """Remove lost claims from a group: the process may have been suspended since it made the claims."""
        claims_in_force = [claim for claim in group.claims if batch.is_in_force(claim, self._store)]
        if len(claims_in_force) < len(group.claims):
            log.warning(
                "%d claims were lost before their messages could be sent", len(group.claims) - len(claims_in_force)
            )
            batch.forget_claims([claim for claim in group.claims if claim.message.message_id in batch.lost_ids])
            group.claims = claims_in_force

    async def send(
        self,
        envelopes: Sequence[Envelope],
        on_late_answer: Callable[[Sequence[PostdateError | None]], Awaitable[None]] | None = None,
    ) -> Sequence[PostdateError | None]:
        """Send messages without a transaction; return an error or ``None`` for each message.

        ``on_late_answer`` is called with the answer if that comes after the deadline.
        """
        started_at = self._clock.monotonic()
        try:
            with tracing.current.dispatch_span([each.headers for each in envelopes]):
                errors = await self._deadlines.call_in_task(
                    lambda: self._transport.send(envelopes, self._clock.now()), on_late_answer
                )
        except PostdateError as error:
            return [error] * len(envelopes)
        finally:
            self._metrics.report_send(len(envelopes), timedelta(seconds=self._clock.monotonic() - started_at))
        try:
            return check_answers(self._transport, len(envelopes), errors)
        except TransportUnavailable as error:
            return [error] * len(envelopes)

    async def _send_enlisted_group(self, claims: Sequence[Claim]) -> Sequence[PostdateError | None]:
        """Send and remove all messages in one transaction.

        If one message fails, each message gets a separate transaction, so that the failure does not undo the others.
        """
        error = await self.send_enlisted(claims, [to_envelope(claim.message) for claim in claims])
        if error is None or (is_outage(error) and not can_concern_one_message(error)) or len(claims) == 1:
            return [error] * len(claims)
        return [await self.send_enlisted([claim], [to_envelope(claim.message)]) for claim in claims]

    async def send_enlisted(
        self,
        claims: Sequence[Claim],
        envelopes: Sequence[Envelope],
        outcome: Outcome = Outcome.DELIVERED,
        detail: str = "",
    ) -> PostdateError | None:
        """Send and remove messages in one transaction; return the error, or ``None`` if it was committed."""
        assert self.enlisting_store is not None
        now = self._clock.now()
        try:
            with translate_store_errors(self._store):
                work = self.enlisting_store.finishing_work(claims, outcome, now, detail)
            errors = await self._deadlines.call_in_task(lambda: self._transport.send(envelopes, now, work=[work]))
            error = next(filter(None, errors), None)
        except PostdateError as failure:
            error = failure
        if error is None:
            self._journal.record_events(OUTCOME_RECORDS[outcome], [claim.message for claim in claims], now, detail)
        return error

    def no_answer_error(self, destination: str) -> PostdateError:
        """Return the error of a send that timed out. It is an outage, and no failure of the messages."""
        text = f"did not answer within {LONGEST_SEND.total_seconds():g} s"
        if destination:
            return DestinationUnavailable(f"{destination} {text}")
        return TransportUnreachable(f"{type(self._transport).__name__} {text}")
