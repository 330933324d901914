"""The right to dispatch: leases on blob containers, held by one process at a time and renewed while it lives.

A lease lasts fifteen seconds from its last renewal. Whoever is not sure any more that it has its lease renews it first;
when another has it by then, everything that was claimed under it is void. So it is when fifteen seconds have passed by
our own clock without a renewal, as in a process that was frozen: another may have it.

Source: specification 3.4; ADR 0013, 0019.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

import anyio
from azure.core.exceptions import AzureError, HttpResponseError
from azure.storage.blob.aio import BlobLeaseClient

from postdate.backends.azure.errors import TABLES, code_of, translate, translated
from postdate.errors import StoreUnavailable

if TYPE_CHECKING:
    from azure.storage.blob.aio import ContainerClient

LASTS_SECONDS: Final = 15
"""As long as upstream's: the shortest that Azure has."""

RENEWED_AFTER_SECONDS: Final = 5.0
SURE_FOR_SECONDS: Final = 10.0
"""After a renewal was asked for; then it is renewed before anything is done under it."""

_ANSWERED_WITHIN_SECONDS: Final = 4
"""Two renewals may fail to be answered, and the third still comes in time."""

TRIED_AGAIN_AFTER_SECONDS: Final = 0.4
"""After another was found to have it."""

_COUNT: Final = "postdate_leases"
_TAKEN: Final = frozenset({"LeaseAlreadyPresent", "LeaseIsBreakingAndCannotBeAcquired"})

log = logging.getLogger("postdate.azure.lease")


class ContainerLease:
    """One lease.

    Args:
        container: that is leased; created when it is missing.
        place: of the account, for errors.
    """

    def __init__(self, container: ContainerClient, place: str) -> None:
        self._container, self.what = container, f"container {container.container_name!r} of {place}"
        self._lease: BlobLeaseClient | None = None
        self._id = str(uuid.uuid4())
        """The same every time: who forgot a lease that it still has can have it at once."""
        self._renewed_at = self._refused_at = -LASTS_SECONDS * 2.0
        self._turn = anyio.Lock()

    @property
    def is_held(self) -> bool:
        """Whether it was ours when we last heard of it."""
        return self._lease is not None

    @property
    def seconds_left(self) -> float:
        """How long it lasts without another renewal; negative once it is over."""
        return self._renewed_at + LASTS_SECONDS - _now()

    @property
    def is_over(self) -> bool:
        """Whether it has ended by our own clock, so that another may have it."""
        return self.seconds_left <= 0

    def forget(self) -> None:
        """Count it as lost, without asking anybody."""
        self._lease = None

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
        """Whether another had it a moment ago."""
        return not self.is_held and _now() - self._refused_at < TRIED_AGAIN_AFTER_SECONDS

    async def try_lock_or_renew(self) -> bool:
        """Renew the lease, or acquire it when it is not held; return whether it is ours now.

        Raises:
            StoreUnavailable: no answer; a lease that was held may still be.
        """
        async with self._turn:
            asked_at = _now()
            with translated(TABLES, f"the lease on {self.what}"):
                held = await (self._acquire() if self._lease is None else self._renew(self._lease))
            if held:
                self._renewed_at = asked_at
            else:
                self._lease, self._refused_at = None, asked_at
            return held

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
        """Create the container if it is missing."""
        with translated(TABLES, self.what):
            try:
                await self._container.create_container()
            except HttpResponseError as error:
                if code_of(error) != "ContainerAlreadyExists":
                    raise

    async def release(self) -> None:
        """Give the lease up, so that another may have it at once; one that cannot be given up ends by itself."""
        async with self._turn:
            lease, self._lease = self._lease, None
            if lease is None:
                return
            try:
                await lease.release(read_timeout=_ANSWERED_WITHIN_SECONDS)
            except (AzureError, OSError) as error:
                log.info(
                    "the lease on %s could not be given up and ends within %d s: %s", self.what, LASTS_SECONDS, error
                )

    async def note(self) -> Mapping[str, str]:
        """Return what is written down with the container."""
        with translated(TABLES, self.what):
            properties = await self._container.get_container_properties()
        return cast("Mapping[str, str]", properties.metadata or {})

    async def write_note(self, note: Mapping[str, str]) -> None:
        """Write something down with the container."""
        with translated(TABLES, self.what):
            await self._container.set_container_metadata(dict(note))


class Leases:
    """All leases of a store, each for an equal share of the messages, and those of them that this process holds.

    How many there are is written down with the first container. Who is set to another number uses its own only after
    it has had all the others in hand at once: so two numbers are never in force at the same time.

    Args:
        open_lease: returns the lease of a number; not connected yet.
        count: how many.
        lost: called with the number of a lease that was held and is no more.
    """

    def __init__(self, open_lease: Callable[[int], ContainerLease], count: int, lost: Callable[[int], None]) -> None:
        self._open, self.count, self._lost = open_lease, count, lost
        self.all: Sequence[ContainerLease] = [open_lease(number) for number in range(count)]
        self.at_most = count
        """How many to hold: fewer than there are once other processes were seen that work on the same store."""
        self._terms = [0] * count
        self._alarms: dict[int, asyncio.TimerHandle] = {}
        self._turn = anyio.Lock()

    def held(self) -> set[int]:
        """Return the numbers of those that were ours when we last heard of them."""
        return {number for number, lease in enumerate(self.all) if lease.is_held}

    def term(self, number: int) -> int:
        """Return a number that is another one every time a lease is ours anew."""
        return self._terms[number]

    def is_held_since(self, number: int, term: int) -> bool:
        """Return whether a lease was never lost since the term began, and has not ended by our own clock."""
        lease = self.all[number]
        return lease.is_held and self._terms[number] == term and not lease.is_over

    @property
    def others_have_all(self) -> bool:
        """Whether there was none to be had a moment ago."""
        return all(lease.was_just_refused for lease in self.all)

    async def hold(self) -> set[int]:
        """Renew what is due to be renewed, take what is free and ours to take; return the numbers of those held.

        Raises:
            StoreUnavailable: no answer, or another number of leases is in force.
        """
        async with self._turn:
            for number in sorted(self.held()):
                await self._keep(number, is_good=self.all[number].is_fresh)
            for number, lease in enumerate(self.all):
                if len(self.held()) >= self.at_most:
                    break
                if not lease.is_held and not lease.was_just_refused:
                    await self._take(number)
            return self.held()

    async def renew(self) -> None:
        """Renew what is due to be renewed, and take no more."""
        async with self._turn:
            for number in sorted(self.held()):
                await self._keep(number, is_good=self.all[number].is_fresh)

    def surplus(self) -> list[int]:
        """Return which of those held are more than we are to hold."""
        return sorted(self.held())[self.at_most :]

    async def sure(self, numbers: set[int]) -> None:
        """Make sure of leases that something is about to be done under; those that are lost are told to be.

        Raises:
            StoreUnavailable: whether they are still ours cannot be found out now.
        """
        for number in numbers:
            await self._keep(number, is_good=self.all[number].is_sure)

    async def _keep(self, number: int, *, is_good: bool) -> None:
        if is_good or not self.all[number].is_held:
            return
        if not await self.all[number].try_lock_or_renew():
            log.warning("the lease on %s was lost to another process", self.all[number].what)
            self._lost(number)

    def _watch(self, number: int) -> None:
        """End what is claimed under a lease as soon as it may have ended.

        By a timer: in a process that was frozen those run before whatever waited for an answer goes on.
        """
        seconds = max(self.all[number].seconds_left, 0.0)
        self._alarms[number] = asyncio.get_running_loop().call_later(seconds, self._look_at, number)

    def _look_at(self, number: int) -> None:
        del self._alarms[number]
        lease = self.all[number]
        if lease.is_held and not lease.is_over:
            self._watch(number)
        elif lease.is_held:
            log.warning("the lease on %s has ended: it was not renewed for %d s", lease.what, LASTS_SECONDS)
            lease.forget()
            self._lost(number)

    def end_what_is_over(self) -> None:
        """Look at every lease now: timers stand still while the machine sleeps, and leases do not."""
        for number, alarm in list(self._alarms.items()):
            if self.all[number].is_over:
                alarm.cancel()
                self._look_at(number)

    async def _take(self, number: int) -> bool:
        if not await self.all[number].try_lock_or_renew():
            return False
        try:
            in_force = await self._count_in_force()
            if in_force != self.count:
                await self.all[number].release()
                await self._change_count(in_force)
                return await self._take(number)
        except BaseException:
            await self.all[number].release()
            raise
        self._terms[number] += 1
        if number not in self._alarms:
            self._watch(number)
        log.info("dispatches under the lease on %s", self.all[number].what)
        return True

    async def _count_in_force(self) -> int:
        if self.count == 1 and not self.all[0].is_held:
            return 1
        text = (await self.all[0].note()).get(_COUNT, "1")
        return int(text) if text.isdigit() and int(text) else 1

    async def _change_count(self, in_force: int) -> None:
        """Have all leases of the other number at once, and then write ours down."""
        theirs = [self._open(number) for number in range(in_force)]
        try:
            for lease in theirs:
                if not await lease.try_lock_or_renew():
                    raise StoreUnavailable(
                        f"{self.all[0].what} is divided into {in_force} leases by others that run, and this process is "
                        f"set to {self.count}: set all to the same number of leases, or stop the others"
                    )
            await self.all[0].write_note({**await self.all[0].note(), _COUNT: str(self.count)})
            log.info("%s is divided into %d leases from now on; it was %d", self.all[0].what, self.count, in_force)
        finally:
            for lease in theirs:
                await lease.release()

    async def give_up(self, number: int) -> None:
        """Give one up that nothing is held under."""
        await self.all[number].release()
        self._lost(number)

    async def give_up_all(self) -> None:
        """Give up everything that is held."""
        try:
            async with self._turn:
                for number in self.held():
                    await self.all[number].release()
        finally:
            for alarm in self._alarms.values():
                alarm.cancel()
            self._alarms.clear()


def _now() -> float:
    """Return seconds that go on while the machine sleeps, where there are such: a lease ends meanwhile."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
