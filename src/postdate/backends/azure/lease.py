"""The lease on a blob container, which is the right to dispatch, and the claims of the process that has it.

One process at a time has the lease and renews it. The lease lasts fifteen seconds from its last renewal. A process that
is unsure renews first. Its claims are void when another process has the lease, and also after fifteen seconds of its
own clock without a renewal (a frozen process). Claims are in memory only, because no other process dispatches under the
lease.

Source: ADR 0013, 0053.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

import anyio
from azure.core.exceptions import AzureError, HttpResponseError
from azure.storage.blob.aio import BlobLeaseClient

from postdate.backends.azure.errors import TABLES, code_of, suppress_error_code, translate, translate_errors
from postdate.backends.azure.groups import Operation
from postdate.backends.azure.layout import DelayedEntity
from postdate.backends.azure.pages import BackOff
from postdate.errors import PostdateError
from postdate.ports import Claim
from postdate.runtime.resource import CallHealth, Resource

if TYPE_CHECKING:
    from azure.storage.blob.aio import ContainerClient

LASTS_SECONDS: Final = 15
"""The duration of the lease. It is upstream's, and the shortest that Azure has."""

RENEWED_AFTER_SECONDS: Final = 5.0  # early enough that a use rarely has to wait for a renewal
SURE_FOR_SECONDS: Final = 10.0
"""For so long after a renewal was requested, no other process can have the lease. Later it is renewed before use."""

_ANSWERED_WITHIN_SECONDS: Final = 4
"""Short enough that after two unanswered renewals a third one is still in time."""

TRIED_AGAIN_AFTER_SECONDS: Final = 0.4
"""The pause after an attempt that found another holder of the lease."""

_HAS_OTHER_HOLDER: Final = frozenset({"LeaseAlreadyPresent", "LeaseIsBreakingAndCannotBeAcquired"})

log = logging.getLogger("postdate.azure.lease")


class ContainerLease:
    """The lease on a container; ``on_lost`` is called when this process had it and lost it."""

    def __init__(self, container: ContainerClient, account_description: str, on_lost: Callable[[], None]) -> None:
        self._container, self.description = (
            container,
            f"container {container.container_name!r} of {account_description}",
        )
        self._on_lost = on_lost
        self._lease: BlobLeaseClient | None = None
        self._id = str(uuid.uuid4())
        """The same id at every acquisition: a process that has forgotten its lease can acquire it again at once."""
        self._renewed_at = self._refused_at = -LASTS_SECONDS * 2.0
        self.term = 0
        """A number that changes each time the lease is acquired."""
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._lock = anyio.Lock()

    @property
    def is_in_force(self) -> bool:
        """Return whether the lease was ours at the last answer."""
        return self._lease is not None

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the lease ends without another renewal; negative after its end."""
        return self._renewed_at + LASTS_SECONDS - _now()

    @property
    def is_over(self) -> bool:
        """Return whether the lease has ended by our own clock, so that another process may have it."""
        return self.remaining_seconds <= 0

    def was_renewed_within(self, seconds: float) -> bool:
        """Return whether the lease is ours and was renewed in the last ``seconds``."""
        return self.is_in_force and _now() - self._renewed_at < seconds

    @property
    def was_just_refused(self) -> bool:
        return not self.is_in_force and _now() - self._refused_at < TRIED_AGAIN_AFTER_SECONDS

    def is_in_force_since(self, term: int) -> bool:
        """Return whether the lease was never lost since ``term`` began, and has not ended by our own clock."""
        return self.is_in_force and self.term == term and not self.is_over

    async def acquire_or_renew(self) -> bool:
        """Renew the lease when due, or acquire it when it may be free; return whether it is ours.

        After an error it may be ours.
        """
        async with self._lock:
            if not (self.was_renewed_within(RENEWED_AFTER_SECONDS) or self.was_just_refused):
                await self._request_lease()
            return self.is_in_force

    async def renew(self, after_seconds: float = RENEWED_AFTER_SECONDS) -> None:
        """Renew the lease when its last renewal is ``after_seconds`` ago; never acquire it."""
        async with self._lock:
            if self.is_in_force and not self.was_renewed_within(after_seconds):
                await self._request_lease()

    async def renew_if_uncertain(self) -> None:
        """Renew the lease unless it is certainly ours; ``on_lost`` is called if it is not. Raise `StoreUnavailable`."""
        if self.is_in_force and not self.was_renewed_within(SURE_FOR_SECONDS):
            await self.renew(SURE_FOR_SECONDS)

    async def _request_lease(self) -> None:
        requested_at, lease = _now(), self._lease
        with translate_errors(TABLES, f"the lease on {self.description}"):
            is_renewed = await (self._acquire() if lease is None else self._renew(lease))
        if not is_renewed:
            self._refused_at = requested_at
            self._void_lease("was lost to another process")
            return
        self._renewed_at = requested_at
        if lease is None:
            self.term += 1
            self._start_expiry_timer()
            log.info("dispatches under the lease on %s", self.description)

    def expire_if_over(self) -> None:
        """Void the claims as soon as the lease may have ended.

        A timer calls this method: in a process that was frozen, timers run before any awaited answer. Timers stop while
        the machine sleeps, but the lease goes on. Therefore call it after a sleep, too.
        """
        if self.is_over:
            self._void_lease(f"has ended: it was not renewed for {LASTS_SECONDS} s")
        elif self.is_in_force:
            self._start_expiry_timer()

    def _start_expiry_timer(self) -> None:
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        self._expiry_timer = asyncio.get_running_loop().call_later(
            max(self.remaining_seconds, 0.0), self.expire_if_over
        )

    def _void_lease(self, reason: str) -> None:
        if self.is_in_force:
            self._lease = None
            log.warning("the lease on %s %s", self.description, reason)
            self._on_lost()

    async def _renew(self, lease: BlobLeaseClient) -> bool:
        try:
            await lease.renew(read_timeout=_ANSWERED_WITHIN_SECONDS)
        except HttpResponseError as error:
            if error.status_code not in {404, 409, 412}:
                raise
            return False
        return True

    async def _acquire(self) -> bool:
        lease = BlobLeaseClient(self._container, self._id)
        try:
            await self._acquire_or_create(lease)
        except HttpResponseError as error:
            if code_of(error) == "ContainerBeingDeleted":
                raise translate(error, TABLES, self.description) from error
            if error.status_code != 409 or code_of(error) not in _HAS_OTHER_HOLDER:
                raise
            return False
        self._lease = lease
        return True

    async def _acquire_or_create(self, lease: BlobLeaseClient) -> None:
        try:
            await lease.acquire(LASTS_SECONDS, read_timeout=_ANSWERED_WITHIN_SECONDS)
        except HttpResponseError as error:
            if error.status_code != 404:
                raise
            await self.create()
            await lease.acquire(LASTS_SECONDS, read_timeout=_ANSWERED_WITHIN_SECONDS)

    async def create(self) -> None:
        with translate_errors(TABLES, self.description), suppress_error_code("ContainerAlreadyExists"):
            await self._container.create_container()

    async def release(self) -> None:
        """Release the lease; without an answer it expires."""
        try:
            async with self._lock:
                lease, self._lease = self._lease, None
                if lease is not None:
                    await lease.release(read_timeout=_ANSWERED_WITHIN_SECONDS)
        except (AzureError, OSError) as error:
            log.info(
                "the lease on %s could not be given up and ends within %d s: %s", self.description, LASTS_SECONDS, error
            )
        finally:
            if self._expiry_timer is not None:
                self._expiry_timer.cancel()


def _now() -> float:
    """Return monotonic seconds; where the platform can, with the machine's sleep, during which a lease ends."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


# --- the task of the store: it keeps the lease and polls for messages of other processes ------------------------------


ROUND_SECONDS: Final = 0.5
"""The interval at which a free lease is tried. With its 15 s, the first poll and a send, a takeover takes 16 s."""

log_of_keeper = logging.getLogger("postdate.azure.keeper")


class LeaseTask:
    """Keeps the lease and polls, in the event loop of its first caller, until it is stopped.

    ``on_acquired`` is called after the lease was acquired; ``poll`` queries messages that other processes stored.
    """

    def __init__(
        self,
        lease: ContainerLease,
        on_acquired: Callable[[], None],
        poll: Callable[[], Awaitable[None]],
        back_off: BackOff,
        resource: Resource,
    ) -> None:
        self._lease, self._on_acquired, self._poll, self._back_off = lease, on_acquired, poll, back_off
        self._task: asyncio.Task[None] | None = None
        self._lease_health = resource.calls("the lease cannot be renewed", log_of_keeper, logging.WARNING)
        self._poll_health = resource.calls("new messages cannot be queried", log_of_keeper, logging.WARNING)
        self.is_needed = False
        """Whether a poller waits. Only then a free lease is acquired, and the table is polled."""

    def start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="postdate-azure-keeper")

    async def acquire_and_start(self) -> None:
        """Try to acquire the lease, then start the task. Thus the acquisition needs no wake-up."""
        if self._task is None or self._task.done():
            await self._run_safely(self._renew_or_acquire, self._lease_health)
        self.start()

    async def stop(self, deadline: float) -> None:
        """End the task and release the lease; after ``deadline`` (loop's clock) the lease is left to expire."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        with anyio.CancelScope(deadline=deadline) as release_scope:
            await self._lease.release()
        if release_scope.cancelled_caught:
            log_of_keeper.info("the lease of this process could not be given up and ends within %d s", LASTS_SECONDS)

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._poll_repeatedly)
            while True:
                await self._run_safely(self._renew_or_acquire, self._lease_health)
                await asyncio.sleep(ROUND_SECONDS)

    async def _poll_repeatedly(self) -> None:
        """Poll beside the renewals, because the lease would end during a query of a slow table."""
        while True:
            if self.is_needed and self._lease.is_in_force:
                await self._run_safely(self._poll, self._poll_health)
            await asyncio.sleep(self._back_off.lengthen_pause().total_seconds())

    async def _run_safely(self, step: Callable[[], Awaitable[None]], health: CallHealth) -> None:
        """Run a step and log any error: if the task ended, the lease would be lost."""
        now = asyncio.get_running_loop().time()
        try:
            await step()
        except PostdateError as error:
            health.report_failure(error, now)
        except Exception:
            log_of_keeper.exception("the keeper of the lease failed for a reason that nobody thought of")
        else:
            health.report_success(now)

    async def _renew_or_acquire(self) -> None:
        self._lease.expire_if_over()
        had_lease = self._lease.is_in_force
        if not self.is_needed:
            await self._lease.renew()
        elif await self._lease.acquire_or_renew() and not had_lease:
            self._back_off.reset()
            self._on_acquired()


# --- claims of this process -------------------------------------------------------------------------------------------


_SLOW_SECONDS: Final = 0.8  # below the second after which a destination counts as hanging
_SHORTEST: Final = 16  # the lowest limit
_PIECES_IN_HAND: Final = 4
_MEASURED_FOR_SECONDS: Final = 2.0  # after so long without a completed batch the limit is not valid any more


class ClaimLimit:
    """The number of messages that `claim_due` may return at once; it is lower while completing them takes long.

    A destination that takes more than a second counts as hanging. Its other messages are released, which costs four
    writes each. Against an account that is merely slow, large claims would be released again and again.
    """

    def __init__(self, longest: int) -> None:
        self._longest = self._length = longest
        self._measured_until = 0.0

    def free_capacity(self, in_progress: int, now: float) -> int:
        """Return how many more messages to claim while ``in_progress`` messages are claimed.

        ``now`` is by the loop's clock.

        After some seconds without a completed batch, the full limit applies again: one hanging destination must not
        stop the others.
        """
        if now >= self._measured_until:
            self._length = self._longest
        if self._length == self._longest:
            return self._longest
        return max(min(self._length, _PIECES_IN_HAND * self._length - in_progress), 0)

    def adjust_limit(self, now: float, seconds: float) -> None:
        """Adjust the limit to a batch that took ``seconds`` from claim to completion."""
        self._measured_until = now + _MEASURED_FOR_SECONDS
        if seconds > _SLOW_SECONDS:
            self._length = min(max(self._length // 2, _SHORTEST), self._longest)
        elif seconds < _SLOW_SECONDS / 2:
            self._length = min(self._length + max(self._length // 4, 1), self._longest)


@dataclass(eq=False, slots=True)
class ClaimedEntity:
    """A claimed message; the token of its `Claim`.

    ``claimed_at`` is by the clock of the event loop. A message that ``is_removed`` from the table (mode ``none``) stays
    ours when the lease is lost. Any other message is ours only during the ``term`` of the lease.
    """

    delayed_entity: DelayedEntity
    term: int
    is_removed: bool = False
    claimed_at: float = 0.0
    was_requested: bool = False
    """Whether its deletion was requested before. A caller that repeats a call got no answer to the previous one."""

    def build_deletion(self) -> Operation:
        is_repeated, self.was_requested = self.was_requested, True
        return deletion_of(self.delayed_entity, is_repeated=is_repeated)


def deletion_of(entity: DelayedEntity, *, is_repeated: bool = False) -> Operation:
    return Operation("delete", entity.keys, entity.etag, is_repeated)


class AzureClaims:
    """All claims of this process in one store, and the messages that it does not claim until a given time."""

    def __init__(self) -> None:
        self._claims: dict[str, ClaimedEntity] = {}
        self.deferred: dict[str, datetime] = {}
        """The time until which each message is not claimed.

        It is not in the table, because only this process claims.
        """
        self.doubtful: dict[str, DelayedEntity] = {}
        """Messages in mode ``none`` whose deletion was not answered, or was answered to a cancelled claim.

        The next claim finds out whether they were deleted. They are ours only while the lease is.
        """
        self._loss_listeners: list[Callable[[Collection[str]], None]] = []

    def __contains__(self, message_id: object) -> bool:
        return message_id in self._claims or message_id in self.doubtful

    def find(self, message_id: str) -> ClaimedEntity | None:
        return self._claims.get(message_id)

    def remember(self, claim: ClaimedEntity) -> Claim:
        self._claims[claim.delayed_entity.message.message_id] = claim
        return Claim(claim.delayed_entity.message, claim)

    def forget_claims(self, claims: Iterable[ClaimedEntity]) -> None:
        """Forget these claims; a newer claim of the same message stays."""
        for each in claims:
            if self._claims.get(each.delayed_entity.message.message_id) is each:
                del self._claims[each.delayed_entity.message.message_id]

    def resume_deferred(self, now: datetime) -> bool:
        """Stop deferring messages whose time has come; return whether there were any."""
        due_ids = [id_ for id_, attempt_at in self.deferred.items() if attempt_at < now]
        for id_ in due_ids:
            del self.deferred[id_]
        return bool(due_ids)

    def forget_all(self) -> None:
        self._claims.clear()
        self.deferred.clear()
        self.doubtful.clear()

    def __len__(self) -> int:
        return len(self._claims)

    def forget_lost_claims(self) -> None:
        """Forget the claims that a new holder of the lease may make, and notify the listeners for lost claims."""
        if self.doubtful:
            log.warning("may have left the table without being sent (mode none): %s", ", ".join(self.doubtful))
            self.doubtful.clear()
        ids = [id_ for id_, claim in self._claims.items() if not claim.is_removed]
        for id_ in ids:
            del self._claims[id_]
        for listener in list(self._loss_listeners) if ids else ():
            listener(ids)

    def is_in_force(self, claim: Claim, lease: ContainerLease) -> bool:
        return bool(self._claims_in_force([claim], lease))

    def listen_for_lost_claims(self, on_lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        self._loss_listeners.append(on_lost)
        return lambda: self._loss_listeners.remove(on_lost)

    async def select_claims_in_force(self, claims: Sequence[Claim], lease: ContainerLease) -> list[ClaimedEntity]:
        """Return the claims that are certainly ours; renew a lease first if it may have ended."""
        if any(not claim.is_removed for claim in self._claims_in_force(claims, lease)):
            await lease.renew_if_uncertain()
        return self._claims_in_force(claims, lease)

    def _claims_in_force(self, claims: Sequence[Claim], lease: ContainerLease) -> list[ClaimedEntity]:
        pairs = [(self._claims.get(claim.message.message_id), claim.token) for claim in claims]
        own_claims = [entity for entity, token in pairs if entity is not None and entity is token]
        return [entity for entity in own_claims if entity.is_removed or lease.is_in_force_since(entity.term)]
