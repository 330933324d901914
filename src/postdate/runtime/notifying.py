"""Tells the machine's service manager about this process, by systemd's protocol. Source: sd_notify(3)."""

from __future__ import annotations

import logging
import os
import socket
from typing import Final

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"

log = logging.getLogger("postdate.service")


def notify(state: str) -> None:
    """Tell a state to the service manager that started this process, if one did; a failure is only logged."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # a name that is in no folder
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.setblocking(False)
            manager.sendto(state.encode(), address)
    except OSError as error:
        log.warning("the service manager could not be told %s: %s", state, error)
