"""MsmqTransport keeps every promise of a transport: on a strict fake of COM objects, and on Windows on the real ones.

On Windows with the feature MSMQ-Server, ``POSTDATE_MSMQ=1`` adds the real ones: .github/workflows/msmq.yml does that.
The file needs no other fixture than its own, so that it runs there with ``--noconftest``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from tests.msmq_fake import QueueManager

from postdate.backends.msmq import queues
from postdate.backends.msmq.com import QUEUE_INFO, PyWin32
from postdate.backends.msmq.transport import MsmqTransport
from postdate.ports import Transport
from postdate.testing import Check, TransportSubject, transport_checks

VARIABLE = "POSTDATE_MSMQ"
_QUEUES = ("conformance.in", "conformance.out", "another")


class FakeSubject(TransportSubject):
    """MSMQ that is none, with a clock that is set; other processes have a COM of their own."""

    def __init__(self, transactional: bool) -> None:
        self.manager, self.transactional = QueueManager(), transactional
        self._passed_seconds = 0.0
        self.manager.now = lambda: self._passed_seconds

    async def pass_time(self, span: timedelta) -> None:
        self._passed_seconds += span.total_seconds()

    def open(self, **settings: Any) -> Transport:
        return MsmqTransport(transactional=self.transactional, com=self.manager.process(), **settings)

    def open_elsewhere(self) -> Transport:
        return self.open()


class RealSubject(TransportSubject):
    """MSMQ of this machine; the queues of the suite are deleted first."""

    def __init__(self, transactional: bool) -> None:
        self.transactional, com = transactional, PyWin32()
        com.initialize()
        try:
            for name in _QUEUES:
                self._delete(com, name)
        finally:
            com.uninitialize()

    def _delete(self, com: PyWin32, name: str) -> None:
        info = com.create(QUEUE_INFO)
        info.PathName = f".\\private$\\{name}"
        try:
            info.Refresh()
        except com.errors:
            return  # it is not there
        info.Delete()

    def open(self, **settings: Any) -> Transport:
        return MsmqTransport(transactional=self.transactional, **settings)

    def open_elsewhere(self) -> Transport:
        return self.open()


def _subjects() -> dict[str, Callable[[], FakeSubject | RealSubject]]:
    subjects: dict[str, Callable[[], FakeSubject | RealSubject]] = {
        "fake": lambda: FakeSubject(True),
        "fake-not-transactional": lambda: FakeSubject(False),
    }
    if os.environ.get(VARIABLE):
        subjects["real"] = lambda: RealSubject(True)
        subjects["real-not-transactional"] = lambda: RealSubject(False)
    return subjects


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=_subjects())
def subject(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransportSubject]:
    made = _subjects()[request.param]()
    monkeypatch.setattr(queues, "WAIT_MILLISECONDS", 5)
    yield made
    if isinstance(made, FakeSubject):
        assert not made.manager.active, "a transaction was left open"
        gc.collect()  # whatever an error still holds is released now, in this thread
        assert made.manager.faults == []


@pytest.mark.anyio
@pytest.mark.parametrize("check", transport_checks(), ids=str)
async def test_transport(check: Check[TransportSubject], subject: TransportSubject) -> None:
    await check(subject)
