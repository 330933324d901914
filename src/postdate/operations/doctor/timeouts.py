"""Checks of timeout managers: whether their storage answers, and whether due timeouts are dispatched."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from postdate.config import Settings
from postdate.errors import PostdateError
from postdate.operations.doctor.checks import Probe, Verdict
from postdate.operations.plain import shown_time
from postdate.ports.timeouts import TimeoutPersister
from postdate.wiring import advice_for, file_of, open_timeouts

_OLDEST: Final = timedelta(days=3652)
_LATE: Final = timedelta(minutes=1)


async def timeouts(settings: Settings, now: datetime) -> list[Probe]:
    """Return a check for each endpoint with a timeout manager here."""
    address = settings.timeout_manager.address
    path = None if address is None else file_of(address)
    if path is not None and not path.expanduser().exists():  # which looking would create
        return [Probe("timeouts", Verdict.FAIL, f"there is no file {path}", "run `postdate setup`")]
    try:
        opened = open_timeouts(settings)
    except PostdateError as error:
        return [Probe("timeouts", Verdict.FAIL, str(error), "see `postdate config show`")]
    try:
        return [await _of(endpoint, persister, now) for endpoint, persister in opened.items()]
    finally:
        for persister in opened.values():
            await persister.close()


async def _of(endpoint: str, persister: TimeoutPersister, now: datetime) -> Probe:
    try:
        await persister.initialize(endpoint)
        due = (await persister.next_chunk(now - _OLDEST, now, 1)).due
    except PostdateError as error:
        mend = "see `postdate config show`; a table that is missing is created by `postdate setup`"
        return Probe("timeouts", Verdict.FAIL, f"of {endpoint!r}: {error}", advice_for(error, mend))
    if due and due[0].due < now - _LATE:
        found = f"of {endpoint!r}: the earliest has been due since {shown_time(due[0].due)}"
        mend = "start the service: postdate run; or return its control messages from the error queue"
        return Probe("timeouts", Verdict.WARN, found, mend)
    return Probe("timeouts", Verdict.OK, f"of {endpoint!r}: the storage answers, and nothing is overdue")
