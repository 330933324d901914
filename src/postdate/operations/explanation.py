"""Explain why a message has not arrived: gather everything that is known of the message, and describe it in words."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from postdate import ports
from postdate.clock import EARLIEST
from postdate.core.expiry import discard_reason
from postdate.core.limits import load_limits_in_force
from postdate.core.upkeep.wall_times import WallTime
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.errors import InvalidTimestamp
from postdate.messages import DelayedMessage, Headers, headers_with_expiry
from postdate.operations import needs, plain
from postdate.operations.plain import Event, events_of, format_count, format_lateness, format_span, format_time
from postdate.operations.unreadable import UnreadableLine, find_unreadable
from postdate.ports.limits import LimitingStore, is_in_lane
from postdate.ports.migrating import MOVED_AWAY
from postdate.ports.scanning import PRUNED_ID, PrunedCounts, pruned_details
from postdate.wiring import OpenDeployment

_EXPIRED_IN_QUEUE = "expired in its queue"
"""Start of the detail of messages that a queue discards by its own clock, before any receiver sees them."""

_AGAINST_DISCARDING = (
    (
        "compare the clocks of sender and receiver: the sender's clock gives the time sent, and the receiver's clock "
        "decides whether the message has expired"
    ),
    "if the clocks differ, set time_to_be_received_allowance of the receiver to twice the largest difference",
    "to handle such messages anyway, set ignore_incoming_time_to_be_received_headers",
)


class MessageState(enum.Enum):
    WAITING = "waiting"
    OVERDUE = "overdue"
    HELD = "held"
    BEING_DELIVERED = "being_delivered"
    RETRYING = "retrying"
    IN_INTAKE = "in_intake"
    IN_QUEUE = "in_queue"
    BEING_HANDLED = "being_handled"
    IN_ERROR_QUEUE = "in_error_queue"
    DELIVERED = "delivered"
    HANDLED = "handled"
    HANDLING_RETRIED = "handling_retried"
    FAILED = "failed"
    UNREADABLE = "unreadable"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    MOVED_AWAY = "moved_away"
    DISCARDED = "discarded"
    ARCHIVED = "archived"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer: state, headline, reasons, actions (empty: nothing has to be done), and history."""

    message_id: str
    state: MessageState
    headline: str
    facts: Sequence[str] = ()
    advice: Sequence[str] = ()
    history: Sequence[Event] = ()


async def explain(deployment: OpenDeployment, message_id: str, now: datetime) -> Explanation:
    """Explain where a message is, why, and what to do; an unknown message is an answer, not an error.

    Raises NotSupported if the store answers no questions at all.
    """
    store = needs.require_administrable(deployment, "explain a message")
    history = await store.history(message_id)
    return replace(
        await _Explainer(deployment, store, message_id, now, history).explain_message(), history=events_of(history)
    )


@dataclass(frozen=True, slots=True)
class _Explainer:
    deployment: OpenDeployment
    store: ports.AdministrableStore
    message_id: str
    now: datetime
    history: Sequence[ports.Record]

    async def explain_message(self) -> Explanation:
        """Follow the way of a message backwards: where the message is now counts more than its records."""
        pending_state = await needs.find_pending_state(self.deployment, self.message_id)
        if pending_state is not None:
            return await self._explain_pending(pending_state)
        queued = await needs.find_in_queues(self.deployment, self.message_id)
        own = [each for each in queued if each.envelope.message_id == self.message_id]
        if own:
            return await self._explain_queued(own[0])
        retries = await needs.retries_of(self.deployment, self.message_id)
        if retries:
            return await self._explain_retry(retries[-1].message.message_id)
        if queued:
            return await self._explain_retry(queued[-1].envelope.message_id)
        if unreadable := await find_unreadable(self.deployment, self.message_id):
            return self._explain_unreadable(unreadable[-1].message)
        return self._explain_outcome() if self.history else await self._explain_unknown()

    def _build_explanation(
        self, state: MessageState, headline: str, facts: Sequence[str] = (), advice: Sequence[str] = ()
    ) -> Explanation:
        return Explanation(self.message_id, state, headline, tuple(facts), tuple(advice))

    def _explain_unreadable(self, row: UnreadableLine) -> Explanation:
        location = "in the store" if row.queue is None else f"in queue {row.queue!r}"
        return self._build_explanation(
            MessageState.UNREADABLE,
            f"it cannot be read: {row.reason}",
            [
                (
                    f"its row stays {location}, marked since {format_time(row.at)}: no process claims it, and no other "
                    f"message waits for it"
                )
            ],
            [
                f"see its content: postdate messages show --unreadable {row.name}",
                "repair it in the database; docs/guides/operate.md has the statements",
                f"or discard it permanently: postdate messages discard {row.name}",
            ],
        )

    # --- waiting in the store -----------------------------------------------------------------------------------

    async def _explain_pending(self, pending_state: ports.PendingState) -> Explanation:
        message, now = pending_state.message, self.now
        processes = await needs.list_store_processes(self.deployment)
        facts = await self._service_facts(processes)
        facts += await self._destination_facts(message.destination)
        if (wall := WallTime.of(message.headers)) is not None:
            facts.append(_wall_time_fact(wall))
        if message.expires_at is not None:
            facts.append(f"it expires at {format_time(message.expires_at)}")
        advice = [] if processes is None or plain.running_services(processes) else ["start the service: postdate run"]
        if not self._shows_claims and (message.number_of_failures or message.due < now):
            facts.append("this store does not show whether a process has claimed it, nor when its next attempt is")
        if pending_state.attempt_at is None:
            return self._build_explanation(
                MessageState.BEING_DELIVERED, *_describe_claimed(pending_state, processes or ())
            )
        limits = await self._limit_facts(message)
        if limits and (
            is_in_lane(pending_state.attempt_at, message.due) or max(pending_state.attempt_at, message.due) < now
        ):
            late = f"it was due at {format_time(message.due)}, {format_span(now - message.due)} ago, and is held"
            change = f"to change that: postdate destinations limit {message.destination}, or resume"
            return self._build_explanation(
                MessageState.HELD, f"{late}: {limits[0]}", [*facts, *limits[1:]], [*advice, change]
            )
        if message.number_of_failures:
            return self._build_explanation(MessageState.RETRYING, self._retry_headline(pending_state), facts, advice)
        if message.due >= now:
            headline = f"it waits until it is due at {format_time(message.due)}, in {format_span(message.due - now)}"
            return self._build_explanation(MessageState.WAITING, headline, [*facts, *limits], advice)
        return await self._explain_overdue(pending_state, facts[1:], processes)

    async def _limit_facts(self, message: DelayedMessage) -> list[str]:
        """Return the reasons why limits hold a message from its due time on, and for how long.

        Empty: no limits hold it.
        """
        store = self.deployment.store
        limits = (
            (await load_limits_in_force(store)).get(message.destination) if isinstance(store, LimitingStore) else None
        )
        if limits is None:
            return []
        queue, start = repr(message.destination), max(self.now, message.due)
        if limits.paused:
            return [
                f"the limits of its queue {queue} {limits}" if limits.is_unreadable else f"its queue {queue} is paused"
            ]
        facts = [f"the limits of its queue {queue} are: {limits}"]
        try:
            opens_at = limits.next_opening(start)
        except InvalidTimestamp as error:
            return [*facts, f"a service with the zone files of this machine sends no message to it: {error}"]
        if opens_at > start:
            facts.append(f"no message is sent to it before {format_time(opens_at)}")
        return facts

    async def _explain_overdue(
        self, pending_state: ports.PendingState, facts: list[str], processes: Sequence[ports.Process] | None
    ) -> Explanation:
        message = pending_state.message
        late = f"it was due at {format_time(message.due)}, {format_span(self.now - message.due)} ago"
        if processes is not None and not plain.running_services(processes):
            facts = [await self._last_delivery_fact(processes), *facts]
            advice = ["start the service: postdate run"]
            return self._build_explanation(
                MessageState.OVERDUE, f"{late}, and no service is running to deliver it", facts, advice
            )
        if await needs.has_queue(self.deployment, message.destination) is False:
            advice = [f"create it: postdate setup --queue {message.destination}"]
            headline = f"{late}, and waits for its queue {message.destination!r}, which does not exist"
            return self._build_explanation(MessageState.OVERDUE, headline, facts, advice)
        # This counts by index. To count all pending messages would take longer.
        (due,) = await self.store.due_counts([EARLIEST, self.now])
        ahead = due - 1
        facts = [*await self._service_facts(processes), *facts]
        facts.append(
            f"{format_count(max(ahead, 0), 'other message')} overdue in the store; the oldest are delivered first"
        )
        advice = ["wait a moment and run the command again; if the number does not fall, read the log of the service"]
        why = "its turn has not come yet" if self._shows_claims else "waits for its turn or is being delivered"
        return self._build_explanation(MessageState.OVERDUE, f"{late}, and {why}", facts, advice)

    async def _service_facts(self, processes: Sequence[ports.Process] | None) -> list[str]:
        if processes is None:
            return ["this store does not show whether a service is running: it does not record its processes"]
        services = plain.running_services(processes)
        if services:
            return [_process_fact("delivers due messages", services)]
        return [f"no service is running; {await self._last_delivery_fact(processes)}"]

    async def _last_delivery_fact(self, processes: Sequence[ports.Process]) -> str:
        dead = [each for each in processes if not each.alive and each.delivers]
        died = f"process {dead[-1].pid} died without stopping; " if dead else ""
        last = () if self.deployment.store_view is None else await self.deployment.store_view.latest_deliveries(1)
        if not last:
            return f"{died}no recent delivery from this store is recorded"
        return f"{died}the last delivery from this store was at {format_time(last[0].at)}"

    def _retry_headline(self, pending_state: ports.PendingState) -> str:
        message, attempt_at = pending_state.message, pending_state.attempt_at
        reasons = [
            record.detail for record in self.history if record.kind is ports.RecordKind.RETRIED and record.detail
        ]
        times = format_count(message.number_of_failures, "time")
        headline = f"delivering it to {message.destination!r} failed {times}"
        if reasons:
            headline += f", the last time because of {reasons[-1]}"
        if not self._shows_claims:
            return headline
        if attempt_at is None or attempt_at < self.now or is_in_lane(attempt_at, message.due):
            return f"{headline}; the next attempt can be made now"
        return f"{headline}; the next attempt is at {format_time(attempt_at)}, in {format_span(attempt_at - self.now)}"

    async def _destination_facts(self, destination: str) -> list[str]:
        """Warn of a missing queue now. A delivery would find out only when the message is due."""
        queue_exists = await needs.has_queue(self.deployment, destination)
        if queue_exists is None:
            return [f"Postdate cannot see from here whether its queue {destination!r} exists"]
        if queue_exists:
            return []
        error_queue = self._error_queue_of_deliveries
        wait = self.deployment.settings.delayed_delivery.missing_queue_wait
        when = f"the message waits {format_span(wait)} for it, then it goes" if wait else "the message goes"
        fact = f"its queue {destination!r} does not exist: when due, {when} to {error_queue!r}"
        return [f"{fact}, unless you create it first: postdate setup --queue {destination}"]

    # --- in a queue ---------------------------------------------------------------------------------------------

    async def _explain_queued(self, queued: ports.QueuedMessage) -> Explanation:
        error_queue = self.deployment.settings.endpoint.error_queue
        if Headers.FAILED_QUEUE in queued.envelope.headers or queued.queue == error_queue:
            return self._explain_error_copy(queued)
        intake = timeouts_queue(self.deployment.settings.endpoint.name)
        users = () if self.deployment.queue_view is None else await self.deployment.queue_view.processes()
        consumers = [each for each in users if each.alive and queued.queue in each.receives]
        return (
            self._explain_in_intake(intake, consumers)
            if queued.queue == intake
            else self._explain_at_consumer(queued, consumers)
        )

    def _explain_in_intake(self, intake: str, consumers: Sequence[ports.Process]) -> Explanation:
        if consumers:
            headline = f"it is in the intake queue {intake!r}, about to be stored"
            return self._build_explanation(
                MessageState.IN_INTAKE, headline, [_process_fact("receives from it", consumers)]
            )
        headline = f"it is in the intake queue {intake!r}, and no service is running to store it"
        return self._build_explanation(MessageState.IN_INTAKE, headline, advice=["start the service: postdate run"])

    def _explain_at_consumer(self, queued: ports.QueuedMessage, consumers: Sequence[ports.Process]) -> Explanation:
        facts = [_process_fact("receives from it", consumers) if consumers else "no process receives from it"]
        if queued.failures:
            facts.append(f"handling it failed {format_count(queued.failures, 'time')} so far")
        facts += self._delivery_facts()
        expiry_fact = self._expiry_fact(queued)
        if expiry_fact:
            facts.append(expiry_fact)
        if queued.received_by is not None and any(each.pid == queued.received_by for each in consumers):
            headline = f"process {queued.received_by} received it from queue {queued.queue!r} and is handling it"
            return self._build_explanation(MessageState.BEING_HANDLED, headline, facts)
        headline = f"it is in queue {queued.queue!r}, waiting for a consumer"
        advice = [] if consumers else [f"start the endpoint that receives from {queued.queue!r}"]
        return self._build_explanation(MessageState.IN_QUEUE, headline, facts, advice)

    def _expiry_fact(self, queued: ports.QueuedMessage) -> str:
        try:
            reason = discard_reason(headers_with_expiry(queued.envelope), self.now)
        except InvalidTimestamp as error:
            return f"its expiry cannot be read: {error}"
        return f"it {reason} and will be discarded when it is received" if reason else ""

    def _delivery_facts(self) -> list[str]:
        delivered = next((each for each in reversed(self.history) if each.kind is ports.RecordKind.DELIVERED), None)
        if delivered is None or delivered.due is None:
            return []
        lateness = format_lateness(delivered.at - delivered.due)
        return [f"it was delivered there at {format_time(delivered.at)}, {lateness}"]

    def _explain_error_copy(self, queued: ports.QueuedMessage) -> Explanation:
        headers = queued.envelope.headers
        reason = headers.get(Headers.EXCEPTION_MESSAGE) or headers.get(Headers.EXCEPTION_TYPE, "an unknown error")
        headline = f"it is in the error queue {queued.queue!r} because of: {reason}"
        failed_at = headers.get(Headers.TIME_OF_FAILURE)
        failed_queue = headers.get(Headers.FAILED_QUEUE)
        where = "it does not say where it failed" if not failed_queue else f"it failed in queue {failed_queue!r}"
        facts = [where + (f" at {failed_at}" if failed_at else "")]
        is_default = queued.queue == self.deployment.settings.endpoint.error_queue
        id_argument = self.message_id if is_default else f"{self.message_id} --queue {queued.queue}"
        advice = [
            f"see the stack trace: postdate errors show {id_argument}",
            f"fix the cause, then run: postdate errors return {id_argument}{' --to QUEUE' if not failed_queue else ''}",
        ]
        if (edited_as := headers.get(Headers.EDITED_AS)) is not None:
            facts.append(f"it was edited and sent as {edited_as}")
            advice = [f"see the state of that message: postdate messages explain {edited_as}"]
            advice.append(f"if this message is not needed any more: postdate errors discard {id_argument}")
        return self._build_explanation(MessageState.IN_ERROR_QUEUE, headline, facts, advice)

    async def _explain_retry(self, message_id: str) -> Explanation:
        """Explain a delayed retry in place of the message: the retry was sent as a new message with its own id."""
        history = await self.store.history(message_id)
        explanation = await replace(self, message_id=message_id, history=history).explain_message()
        facts = [f"handling it failed; it is being retried as message {message_id}", *explanation.facts]
        return replace(explanation, message_id=self.message_id, facts=tuple(facts))

    # --- nowhere any more ---------------------------------------------------------------------------------------

    def _explain_outcome(self) -> Explanation:
        last = self.history[-1]
        at, was_due = format_time(last.at), f"; it was due at {format_time(last.due)}" if last.due else ""
        match last.kind:
            case ports.RecordKind.DELIVERED:
                explanation = self._explain_delivered(last)
            case ports.RecordKind.HANDLED:
                headline = f"it arrived: handled from queue {last.destination!r} at {at}"
                explanation = self._build_explanation(MessageState.HANDLED, headline, self._delivery_facts())
            case ports.RecordKind.RETRIED:
                explanation = self._explain_handling_retried(last)
            case ports.RecordKind.EXPIRED:
                headline = f"it expired before it could be delivered; this was noticed at {at}{was_due}"
                explanation = self._build_explanation(MessageState.EXPIRED, headline, self._delivery_facts())
            case ports.RecordKind.CANCELLED:
                explanation = self._explain_cancelled(last, f"{at}{was_due}")
            case ports.RecordKind.DISCARDED:
                explanation = self._explain_discarded(last, at)
            case ports.RecordKind.FAILED:
                explanation = self._explain_failed(last, at)
            case ports.RecordKind.RETURNED:
                departure = ", and is not in that queue any more" if self._can_browse_queues else ""
                headline = f"it was returned from the error queue at {at}, {last.detail}{departure}"
                facts = [
                    "if handling it fails again, the receiver sends it to the error queue",
                    *self._hidden_queue_facts(),
                ]
                explanation = self._build_explanation(MessageState.FAILED, headline, facts)
            case ports.RecordKind.SCHEDULED | ports.RecordKind.RESCHEDULED | ports.RecordKind.PRUNED:
                explanation = (
                    self._explain_archived(last, at) if last.detail == ports.ARCHIVED else self._explain_lost(last, at)
                )
        return explanation

    def _explain_cancelled(self, last: ports.Record, at: str) -> Explanation:
        """Explain a cancellation.

        This store also records as cancelled the messages that were moved to another store.
        """
        if not last.detail.startswith(MOVED_AWAY):
            return self._build_explanation(MessageState.CANCELLED, f"it was cancelled at {at}", self._delivery_facts())
        advice = [f"ask the other store: postdate messages explain {self.message_id} --store ADDRESS"]
        return self._build_explanation(MessageState.MOVED_AWAY, f"it was {last.detail} at {at}", advice=advice)

    @property
    def _shows_claims(self) -> bool:
        return self.deployment.store_view is not None

    @property
    def _error_queue_of_deliveries(self) -> str:
        """The queue of delayed messages that cannot be delivered."""
        settings = self.deployment.settings
        return settings.delayed_delivery.poison_queue or settings.endpoint.error_queue

    @property
    def _can_browse_queues(self) -> bool:
        return self.deployment.queue_view is not None

    def _hidden_queue_facts(self) -> list[str]:
        """Return a fact if the message may be in a queue that cannot be browsed; empty if queues can be browsed."""
        if self._can_browse_queues:
            return []
        address = self.deployment.settings.transport.address.redacted_text
        return [f"Postdate cannot see whether it is in a queue: the queues at {address} cannot be browsed"]

    def _explain_failed(self, failed: ports.Record, at: str) -> Explanation:
        headline = f"it failed at {at} because of {failed.detail}, and its copy "
        if not self._can_browse_queues:
            default = self.deployment.settings.endpoint.error_queue
            was_delivered = any(each.kind is ports.RecordKind.DELIVERED for each in self.history)
            error_queue = default if was_delivered else self._error_queue_of_deliveries
            headline += f"went to the error queue {error_queue!r}"
            id_argument = self.message_id if error_queue == default else f"{self.message_id} --queue {error_queue}"
            advice = [f"fix the cause, then run: postdate errors return {id_argument}"]
            return self._build_explanation(MessageState.FAILED, headline, self._hidden_queue_facts(), advice)
        fact = "it was returned with `postdate errors return`, or another program receives from the error queue"
        return self._build_explanation(MessageState.FAILED, f"{headline}has left the error queue", [fact])

    def _explain_discarded(self, discarded: ports.Record, at: str) -> Explanation:
        in_queue, facts = discarded.detail.startswith(_EXPIRED_IN_QUEUE), self._delivery_facts()
        who = f"{'queue' if in_queue else 'the consumer of'} {discarded.destination!r}"
        if discarded.due is None:
            facts.append("it was sent without a delay: the store has no other records of it")
        advice = [
            (
                "if the message was still useful, send such messages with a longer time to be received, or "
                "receive them sooner"
            )
        ]
        advice = advice if in_queue else [*_AGAINST_DISCARDING, *advice]
        return self._build_explanation(
            MessageState.DISCARDED, f"{who} discarded it at {at}: {discarded.detail}", facts, advice
        )

    def _explain_lost(self, last: ports.Record, at: str) -> Explanation:
        headline = f"it was last {last.kind.name.lower()} at {at}, and is not in the store any more"
        advice = ["run `postdate doctor`: a store should never lose a message without a record"]
        return self._build_explanation(MessageState.UNKNOWN, headline, advice=advice)

    def _explain_archived(self, scheduled: ports.Record, at: str) -> Explanation:
        was_due = f" and due at {format_time(scheduled.due)}" if scheduled.due else ""
        headline = f"it ended, and its records were archived; it was scheduled at {at}{was_due}"
        facts = [
            (
                "only messages that have ended are archived: the archive has the outcome of this message, the "
                "store does not"
            )
        ]
        advice = [
            f"read its records in the Parquet files of the archive, where message_id is {self.message_id!r}",
            "`postdate pipeline audit --records DIR` reads all of them; DIR is the folder of the archive",
        ]
        return self._build_explanation(MessageState.ARCHIVED, headline, facts, advice)

    def _explain_handling_retried(self, retried: ports.Record) -> Explanation:
        at = format_time(retried.at)
        headline = f"handling it failed at {at} because of {retried.detail}; it was sent again as a delayed retry"
        facts = [f"the retry has its own id{', and is not in its queue any more' if self._can_browse_queues else ''}"]
        facts += self._hidden_queue_facts()
        error_queue = self.deployment.settings.endpoint.error_queue
        advice = [f"look for failures: postdate errors list --queue {error_queue}"]
        return self._build_explanation(MessageState.HANDLING_RETRIED, headline, facts, advice)

    def _explain_delivered(self, delivered: ports.Record) -> Explanation:
        headline = f"it was delivered to queue {delivered.destination!r} at {format_time(delivered.at)}"
        if not self._can_browse_queues:
            return self._build_explanation(
                MessageState.DELIVERED, headline, [*self._delivery_facts(), *self._hidden_queue_facts()]
            )
        headline += " and has left it"
        facts = [*self._delivery_facts(), "its receiver recorded nothing about handling it"]
        if self.deployment.settings.store.recording is ports.Recording.OUTCOMES:
            facts.append("store.recording is 'outcomes' here; only 'all' records the handling of messages")
        return self._build_explanation(MessageState.DELIVERED, headline, facts)

    async def _explain_unknown(self) -> Explanation:
        address = self.deployment.settings.store.address.redacted_text
        facts = ["a message that is sent without a delay has no record after it is handled"]
        advice = [
            "check the id, and that this is the right store: postdate config show",
            "list the pending messages: postdate messages list",
        ]
        pruned_before = PrunedCounts.of(pruned_details(await self.store.history(PRUNED_ID))).before
        if pruned_before is not None:
            facts.append(f"records of messages that ended before {format_time(pruned_before)} have been removed")
        was_never_stored = self._can_browse_queues and pruned_before is None
        headline = (
            f"it was never scheduled in {address}" if was_never_stored else f"the store {address} has no record of it"
        )
        if not self._can_browse_queues:
            intake_facts, intake_advice = await self._hidden_intake_facts()
            facts, advice = [*facts, *intake_facts, *self._hidden_queue_facts()], [*intake_advice, *advice]
        if self.deployment.timeouts:
            facts.append(
                "Postdate cannot see the messages of a timeout manager from here: look into its table, "
                "which has headers and due times"
            )
        return self._build_explanation(MessageState.UNKNOWN, headline, facts, advice)

    async def _hidden_intake_facts(self) -> tuple[list[str], list[str]]:
        """Return facts and advice about a message that may never have reached the store."""
        queues = needs.all_intake_queues(self.deployment.settings, self.deployment.transport)
        counts = await needs.read_queue_lengths(self.deployment, queues)
        names = " and ".join(repr(queue) for queue in queues)
        facts = [
            (
                f"messages that a service has not received from {names} are not in the store yet: "
                f"{_queue_length_text(queues, counts)}"
            ),
            (
                "a delayed message that was due already when a service received it was sent to its destination at "
                "once, without a record"
            ),
        ]
        processes = await needs.list_store_processes(self.deployment)
        idle = processes is not None and not plain.running_services(processes)
        return facts, ["start the service: postdate run"] if idle and counts and any(counts.values()) else []


def _wall_time_fact(wall: WallTime) -> str:
    try:
        return f"it was sent for {wall}, which is {format_time(wall.instant())} by the zone files of this machine"
    except InvalidTimestamp as error:
        return f"it was sent for {wall}, and {error}"


def _queue_length_text(queues: Sequence[str], counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return "their number is unknown"
    parts = [
        f"{format_count(counts[queue], 'message')} in {queue!r}" if queue in counts else f"there is no queue {queue!r}"
        for queue in queues
    ]
    return ", ".join(parts)


def _describe_claimed(
    pending_state: ports.PendingState, processes: Sequence[ports.Process]
) -> tuple[str, list[str], list[str]]:
    """Return headline, facts and advice for a message that a process has claimed."""
    holder = next((each for each in processes if each.alive and each.pid == pending_state.claimed_by), None)
    destination = pending_state.message.destination
    if holder is not None:
        return f"process {holder.pid} is delivering it to {destination!r} at this moment", [], []
    holder_text = "a process" if pending_state.claimed_by is None else f"process {pending_state.claimed_by}"
    facts = [f"{holder_text} ended before it released its claim; the next poll of a service releases the claim"]
    return f"the process that was delivering it to {destination!r} has died", facts, ["start the service: postdate run"]


def _process_fact(action: str, processes: Sequence[ports.Process]) -> str:
    names = ", ".join(f"process {each.pid} (since {format_time(each.started_at)})" for each in processes)
    return f"{action}: {names}"
