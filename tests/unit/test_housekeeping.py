"""Who closes a file while another thread opens it waits for what that one starts."""

import threading
from typing import Any

import pytest

from postdate.runtime.housekeeping import Housekeeping
from postdate.runtime.resource import Resource


def test_a_chore_that_is_just_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failed = threading.Thread.start, list[Exception]()
    housekeeping = Housekeeping(Resource("a file"), 60.0, [])

    def join() -> None:
        try:
            housekeeping.join()
        except RuntimeError as error:
            failed.append(error)

    joining = threading.Thread(target=join)

    def start_late(thread: Any) -> None:
        start(joining)
        joining.join(0.2)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    housekeeping.stop()
    housekeeping.start()
    joining.join()
    assert failed == []
