"""Several processes dispatch one timeout: who has claimed it sends it, and the others leave it alone (4.8)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from postdate import Envelope, MemoryTransport
from postdate.backends.memory.database import MemoryTimeouts
from postdate.backends.sqlite.processes import acquire_file_lock
from postdate.core.receive.outcomes import AttemptsRecovery, immediate_attempts
from postdate.core.recoverability import ErrorQueue, Host, RecoveryRules
from postdate.core.timeout_manager.steps import DispatchStep, announcement
from postdate.errors import StoreNotWritable, TransportUnavailable
from postdate.ports import Received
from postdate.ports.timeouts import Timeout
from postdate.runtime.reporting import NO_METRICS
from postdate.testing import VirtualClock

ID = "0ab14c4e-36c7-4b1e-9a10-aa7e00c5b001"
CONTROL = Received(announcement(ID, "dispatcher"), 0, None)


class SlowTransport(MemoryTransport):
    """Sends when it is told to; the first sends fail if it is told so."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock=clock)
        self.asked, self.go = anyio.Event(), anyio.Event()
        self.sent: list[str] = []
        self.fails = 0

    async def send(self, envelopes: Sequence[Envelope], now: datetime, **work: Any) -> Sequence[Any]:
        self.asked.set()
        await self.go.wait()
        if self.fails:
            self.fails -= 1
            raise TransportUnavailable("down")
        self.sent += [each.message_id for each in envelopes]
        return [None] * len(envelopes)


def recovery(clock: VirtualClock) -> AttemptsRecovery:
    errors = ErrorQueue("error", "dispatcher", Host("sales"))
    return AttemptsRecovery(
        rules=RecoveryRules(), errors=errors, clock=clock, policy=immediate_attempts(1), metrics=NO_METRICS
    )


async def handled(step: DispatchStep, received: Received) -> None:
    """Do what a pump does with a message: end it well, or fail with it."""
    outcome = await step.handle(received)
    if outcome.failure is not None:
        raise outcome.failure.error
    for each in outcome.on_completed:
        await each()


async def test_who_comes_while_it_is_being_sent_sends_nothing_and_will_look_again(clock: VirtualClock) -> None:
    timeouts, transport, heard = MemoryTimeouts(), SlowTransport(clock), list[str]()
    await timeouts.add(Timeout(ID, clock.now(), "billing"))
    step = DispatchStep(timeouts, None, transport, clock, heard.append, recovery(clock))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(step.handle, CONTROL)
        await transport.asked.wait()
        await handled(step, CONTROL)
        assert heard == [ID]  # so that it is announced again should it still be there
        assert await timeouts.peek(ID) is not None
        transport.go.set()
    assert transport.sent == [ID]
    assert await timeouts.peek(ID) is None


@pytest.mark.parametrize("end", ["fails", "is cancelled"])
async def test_a_send_that_does_not_end_well_lets_it_go(clock: VirtualClock, end: str) -> None:
    timeouts, transport = MemoryTimeouts(), SlowTransport(clock)
    await timeouts.add(Timeout(ID, clock.now(), "billing"))
    step = DispatchStep(timeouts, None, transport, clock, list[str]().append, recovery(clock))
    if end == "fails":
        transport.fails = 1
        transport.go.set()
        with pytest.raises(TransportUnavailable):
            await handled(step, CONTROL)
    else:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step.handle, CONTROL)
            await transport.asked.wait()
            tasks.cancel_scope.cancel()
        transport.go.set()
    await handled(step, CONTROL)
    assert transport.sent == [ID]


def test_what_is_held_in_a_folder_leaves_nothing_there(tmp_path: Path) -> None:
    held = acquire_file_lock(tmp_path / "held", "a")
    assert held is not None
    assert acquire_file_lock(tmp_path / "held", "a") is None
    other = acquire_file_lock(tmp_path / "held", "b")
    assert other is not None
    for each in (held, other):
        each.unlock()
    again = acquire_file_lock(tmp_path / "held", "a")
    assert again is not None
    again.unlock()
    assert list((tmp_path / "held").iterdir()) == []


def test_a_folder_that_cannot_be_is_told_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "held").write_text("a file")
    with pytest.raises(StoreNotWritable, match="cannot be locked"):
        acquire_file_lock(tmp_path / "held", "a")


async def test_a_control_message_of_others_may_spell_the_id_as_it_likes(clock: VirtualClock) -> None:
    timeouts, transport, heard = MemoryTimeouts(), SlowTransport(clock), list[str]()
    await timeouts.add(Timeout(ID, clock.now(), "billing"))
    transport.go.set()
    step = DispatchStep(timeouts, None, transport, clock, heard.append, recovery(clock))
    theirs = Received(announcement(f"{{{ID.upper()}}}", "dispatcher"), 0, None)
    for _ in range(2):  # sent, then gone already
        await handled(step, theirs)
    assert heard == [ID, ID]
