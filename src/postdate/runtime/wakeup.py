"""A wake-up that any thread may ring and one task waits for."""

from __future__ import annotations

from contextlib import suppress

import anyio
from anyio.lowlevel import current_token


class Alarm:
    """Create it in the event loop whose task will wait; ring it from any thread."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._loop = current_token().native_token

    @property
    def event(self) -> anyio.Event:
        """The event that the next ring sets."""
        return self._event

    def ring(self) -> None:
        """Wake the waiting task; without effect once its event loop has ended."""
        soon = getattr(self._loop, "call_soon_threadsafe", None) or self._loop.run_sync_soon  # type: ignore[attr-defined]
        with suppress(RuntimeError):  # asyncio and trio: the loop has ended, nobody waits any more
            soon(self._set)

    def _set(self) -> None:
        self._event.set()

    def reset(self) -> None:
        """Forget earlier rings. Call it before looking for work, so that a ring during the look is kept."""
        if self._event.is_set():
            self._event = anyio.Event()

    async def wait(self) -> None:
        await self._event.wait()
