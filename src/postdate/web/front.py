"""The page above those of several deployments: a row each, which leads to its pages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from datetime import timedelta
from typing import Final

import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from typing_extensions import override

from postdate.config import without_secrets
from postdate.errors import ConfigurationError, PostdateError
from postdate.operations import Overview
from postdate.operations.looking import Look
from postdate.web.views import Views, headline_of
from postdate.web.watching import Watcher

_NAME: Final = re.compile(r"(?!(static|events)$)[A-Za-z0-9][A-Za-z0-9_.-]*")
_WAITED_SECONDS: Final = 1.0
"""So long a row waits for a first look: a deployment that is away must not keep others from being shown."""

_EVERY: Final = timedelta(seconds=3)
"""Some deployment always has news, and one that was away is opened by a request."""


class Front(Views):
    """Shows what the watchers of deployments have seen, by their names."""

    def __init__(self, watchers: Mapping[str, Watcher]) -> None:
        for name in watchers:
            if not _NAME.fullmatch(name):
                can = "letters, digits, '.', '_' and '-', a letter or a digit first, but not 'static' or 'events'"
                raise ConfigurationError(f"{name!r} cannot name a deployment: give it {can}")
        if not watchers:
            raise ConfigurationError("there is no deployment to show: give one name and its settings at least")
        super().__init__(next(iter(watchers.values())), name=None)
        self._watchers = watchers

    @override
    async def overview(self, request: Request) -> Response:
        seen = await asyncio.gather(*map(_seen, self._watchers.values()))
        return self._page(request, "front", rows=zip(self._watchers, seen, strict=True))

    @override
    async def events(self, request: Request) -> Response:
        async def news() -> AsyncGenerator[str]:
            while True:
                yield "event: newer\ndata: any\n\n"
                await self._watcher.clock.sleep(_EVERY)

        return StreamingResponse(news(), media_type="text/event-stream")


async def _seen(watcher: Watcher) -> tuple[Look[Overview] | None, str]:
    """Return the last look, and what it says in words; no look: why there is none."""
    try:
        with anyio.move_on_after(_WAITED_SECONDS):
            await watcher.deployment()
            look = await watcher.overview.last()
            return look, headline_of(look.found)
    except PostdateError as error:
        return None, without_secrets(str(error))
    return None, "It has not answered yet."
