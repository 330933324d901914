"""The lease on a blob container, which one process at a time holds and renews: the right to dispatch.

It lasts fifteen seconds from its last renewal. A process that is unsure renews first. Its claims are void once another
has the lease, and also after fifteen seconds of its own clock without a renewal (a frozen process).

Source: specification 3.4; ADR 0013, 0019.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import anyio
from azure.core.exceptions import AzureError, HttpResponseError
from azure.storage.blob.aio import BlobLeaseClient

from postdate.backends.azure.errors import TABLES, code_of, translate, translated

if TYPE_CHECKING:
    from azure.storage.blob.aio import ContainerClient

LASTS_SECONDS: Final = 15
"""As long as upstream's: the shortest that Azure has."""

RENEWED_AFTER_SECONDS: Final = 5.0
SURE_FOR_SECONDS: Final = 10.0
"""After a renewal was requested; then it is renewed before any use."""

_ANSWERED_WITHIN_SECONDS: Final = 4
"""After two unanswered renewals the third still comes in time."""

TRIED_AGAIN_AFTER_SECONDS: Final = 0.4
"""After another was found to have it."""

_TAKEN: Final = frozenset({"LeaseAlreadyPresent", "LeaseIsBreakingAndCannotBeAcquired"})

log = logging.getLogger("postdate.azure.lease")


class ContainerLease:
    """The lease on a container; ``lost`` is called when it was held and is lost."""

    def __init__(self, container: ContainerClient, place: str, lost: Callable[[], None]) -> None:
        self._container, self.what = container, f"container {container.container_name!r} of {place}"
        self._lost = lost
        self._lease: BlobLeaseClient | None = None
        self._id = str(uuid.uuid4())
        """The same every time: a process that has forgotten its lease can take it again at once."""
        self._renewed_at = self._refused_at = -LASTS_SECONDS * 2.0
        self.term = 0
        """Changes each time the lease is taken."""
        self._alarm: asyncio.TimerHandle | None = None
        self._turn = anyio.Lock()

    @property
    def is_held(self) -> bool:
        """Whether the last answer said that it is ours."""
        return self._lease is not None

    @property
    def seconds_left(self) -> float:
        """Seconds until it ends without another renewal; negative once it is over."""
        return self._renewed_at + LASTS_SECONDS - _now()

    @property
    def is_over(self) -> bool:
        """Whether it has ended by our own clock, so that another may have it."""
        return self.seconds_left <= 0

    @property
    def is_sure(self) -> bool:
        """Whether nobody else can have it yet."""
        return self.is_held and _now() - self._renewed_at < SURE_FOR_SECONDS

    @property
    def is_fresh(self) -> bool:
        """Whether it needs no renewal yet."""
        return self.is_held and _now() - self._renewed_at < RENEWED_AFTER_SECONDS

    @property
    def was_just_refused(self) -> bool:
        return not self.is_held and _now() - self._refused_at < TRIED_AGAIN_AFTER_SECONDS

    def is_held_since(self, term: int) -> bool:
        """Return whether it was never lost since ``term`` began, and has not ended by our own clock."""
        return self.is_held and self.term == term and not self.is_over

    async def hold(self) -> bool:
        """Renew it when due, or take it when it may be free; return whether it is ours. Without an answer it may be."""
        async with self._turn:
            if not (self.is_fresh or self.was_just_refused):
                await self._ask()
            return self.is_held

    async def renew(self) -> None:
        """Renew it when due; never take it."""
        async with self._turn:
            if self.is_held and not self.is_fresh:
                await self._ask()

    async def sure(self) -> None:
        """Renew it unless it is certainly ours; call ``lost`` if it is not. Raises `StoreUnavailable`."""
        if self.is_held and not self.is_sure:
            async with self._turn:
                if self.is_held and not self.is_sure:
                    await self._ask()

    async def _ask(self) -> None:
        asked_at, lease = _now(), self._lease
        with translated(TABLES, f"the lease on {self.what}"):
            is_ours = await (self._acquire() if lease is None else self._renew(lease))
        if not is_ours:
            self._refused_at = asked_at
            self._end("was lost to another process")
            return
        self._renewed_at = asked_at
        if lease is None:
            self.term += 1
            self._watch()
            log.info("dispatches under the lease on %s", self.what)

    def look(self) -> None:
        """Void the claims as soon as the lease may have ended.

        A timer calls it: in a process that was frozen, timers run before any awaited answer. Timers stand still while
        the machine sleeps, the lease does not: so call it after a sleep, too.
        """
        if self.is_over:
            self._end(f"has ended: it was not renewed for {LASTS_SECONDS} s")
        elif self.is_held:
            self._watch()

    def _watch(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_later(max(self.seconds_left, 0.0), self.look)

    def _end(self, why: str) -> None:
        if self.is_held:
            self._lease = None
            log.warning("the lease on %s %s", self.what, why)
            self._lost()

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
                raise translate(error, TABLES, self.what) from error
            if error.status_code != 409 or code_of(error) not in _TAKEN:
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
        with translated(TABLES, self.what):
            try:
                await self._container.create_container()
            except HttpResponseError as error:
                if code_of(error) != "ContainerAlreadyExists":
                    raise

    async def give_up(self) -> None:
        """Release it; without an answer it expires."""
        try:
            async with self._turn:
                lease, self._lease = self._lease, None
                if lease is not None:
                    await lease.release(read_timeout=_ANSWERED_WITHIN_SECONDS)
        except (AzureError, OSError) as error:
            log.info("the lease on %s could not be given up and ends within %d s: %s", self.what, LASTS_SECONDS, error)
        finally:
            if self._alarm is not None:
                self._alarm.cancel()


def _now() -> float:
    """Return monotonic seconds that include the machine's sleep where the platform has them: leases end meanwhile."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
