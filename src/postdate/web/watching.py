"""Data for the page, read in advance, rarely, and only while a user watches. Source: ADR 35."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime
from typing import Final

import anyio

from postdate import operations
from postdate.clock import Clock
from postdate.config import Settings
from postdate.core.changes import EVERYTHING
from postdate.operations.looking import Refresher
from postdate.runtime.resource import Resource, resource_of
from postdate.runtime.threads import run_in_thread
from postdate.wiring import OpenDeployment, open_deployment

log = logging.getLogger("postdate.dashboard")

LISTED: Final = 50
"""Number of messages on a page."""

_GROUPED: Final = 10_000
"""Number of failed messages, the oldest ones, that are grouped by cause. They are read with their bodies."""


class Watcher:
    """Keeps the deployment of the settings open from the first request on, and reads data of the pages in advance."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings, self.clock, errors = settings, clock, settings.endpoint.error_queue
        self.overview = Refresher(operations.overview, clock)
        self.first_messages = Refresher(lambda d, now: operations.list_messages(d, EVERYTHING, LISTED, now), clock)
        self.records = Refresher(lambda d, _: operations.record_counts(d), clock)
        self.errors = Refresher(lambda d, _: operations.group_errors(d, errors, _GROUPED), clock, asks_queues=True)
        self.diagnosis = Refresher(self._diagnose, clock)
        # Result of the opening, for all requests. It is replaced when the task has ended.
        self._deployment_future: asyncio.Future[OpenDeployment] | None = None
        self.resources: Collection[Resource] = ()
        """What the open deployment needs; empty before it was opened."""
        # The task that keeps the deployment open and runs the looks.
        self._task: asyncio.Task[None] | None = None

    async def get_deployment(self) -> OpenDeployment:
        """Return the deployment. The first call opens it. If that fails, the next call tries again."""
        if self._deployment_future is None or self._task is None or self._task.done():
            self._deployment_future = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(self._deployment_future))
        # Several requests wait for one opening: a request that is cancelled must not cancel it for the others.
        return await asyncio.shield(self._deployment_future)

    async def _run(self, future: asyncio.Future[OpenDeployment]) -> None:
        try:
            async with open_deployment(self.settings) as deployment, anyio.create_task_group() as tasks:
                for each in (self.overview, self.first_messages, self.records, self.errors, self.diagnosis):
                    tasks.start_soon(each.run, deployment)
                self.resources = {resource_of(deployment.store), resource_of(deployment.transport)}
                future.set_result(deployment)
        except Exception as error:  # Of opening or closing: each look keeps its own error.
            if future.done():
                log.exception("what the page looks at was not closed well; it is opened again")
            else:
                future.set_exception(error)

    async def close(self) -> None:
        """Stop looking, and close the deployment."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _diagnose(self, deployment: OpenDeployment, _: datetime) -> operations.Diagnosis:
        """Run the doctor in a thread with its own event loop, because reading files blocks."""
        return await run_in_thread(anyio.run, operations.diagnose, deployment.settings, os.environ, self.clock)
