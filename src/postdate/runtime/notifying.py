"""Tells the service manager of the machine how this process is: systemd's protocol, on the socket that it names.

Source: sd_notify(3).
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Final

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"

log = logging.getLogger("postdate.service")


def notify(state: str) -> None:
    """Tell a state to the manager that started this process with ``NOTIFY_SOCKET``; others have none.

    What goes wrong is logged: the service delivers, whoever hears of it.
    """
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
