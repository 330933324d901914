"""Destinations of MSMQ: ``queue`` or ``queue@machine``, always a private queue.

``orders`` is a queue of the transport's machine, ``orders@SALES1`` one of another machine, whose name may also be an
IPv4 address. Source: docs/msmq.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address
from typing import Final

from postdate.errors import ConfigurationError, QueueNotFound

SCHEME: Final = "msmq:"
LOCAL: Final = "."
LONGEST_NAME: Final = 124
LONGEST_RECEIVING_FORMAT_NAME: Final = 150
_LOCAL_NAMES: Final = frozenset({"", LOCAL, "localhost", "127.0.0.1"})
_NOT_IN_NAMES: Final = re.compile(r'[\\;+,"\x00-\x1f\x7f]')
_MACHINE: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class QueueAddress:
    """A private queue: its name without ``private$``, in any case, and a NetBIOS name, DNS name or IPv4 address."""

    name: str
    machine: str = LOCAL

    @property
    def path_name(self) -> str:
        """The name with which the queue is created."""
        return f"{self.machine}\\private$\\{self.name}"

    @property
    def format_name(self) -> str:
        """The name with which the queue is opened, without a search in a directory."""
        return f"DIRECT={'TCP' if _is_ip(self.machine) else 'OS'}:{self.machine}\\private$\\{self.name}"

    def text(self, this_machine: str) -> str:
        """Return the address as people write it: ``queue@machine``."""
        return f"{self.name}@{this_machine if self.machine == LOCAL else self.machine}"


def parse_machine(address: str) -> str:
    """Return the machine in ``msmq:`` (this machine) or ``msmq://machine``."""
    scheme, colon, location = address.partition(":")
    slashes, machine = location[:2], location[2:].rstrip("/")
    if f"{scheme.lower()}{colon}" == SCHEME:
        if location in {"", "//"}:
            return LOCAL
        if slashes == "//" and _MACHINE.fullmatch(machine):
            return LOCAL if machine.lower() in _LOCAL_NAMES else machine
    raise ConfigurationError(f"{address!r} is not an address of MSMQ; write msmq: for this machine, or msmq://machine")


def parse_address(destination: str, default_machine: str = LOCAL) -> QueueAddress:
    """Return the queue that a destination means; raise `QueueNotFound` when MSMQ can have no such queue."""
    name, separator, machine = destination.partition("@")
    if "@" in machine or not name.strip() or (separator and not machine.strip()):
        raise QueueNotFound(f"{destination!r} is not an address of MSMQ: write queue or queue@machine")
    if separator and machine != LOCAL and not _MACHINE.fullmatch(machine):
        raise QueueNotFound(
            f"{destination!r} is not an address of MSMQ: {machine!r} is neither the name of a machine nor an IPv4 "
            f"address"
        )
    if (forbidden := _NOT_IN_NAMES.search(name)) is not None:
        raise QueueNotFound(
            f"{destination!r} cannot exist: the name of a queue of MSMQ must not contain {forbidden[0]!r}, nor any of "
            f'\\ ; + , " or a control character'
        )
    if (length := len(name.encode("utf-16-le")) // 2) > LONGEST_NAME:
        raise QueueNotFound(
            f"{destination!r} cannot exist: the name has {length} characters; MSMQ allows {LONGEST_NAME}"
        )
    if not separator:
        machine = default_machine
    return QueueAddress(name, LOCAL if machine.lower() in _LOCAL_NAMES else machine)


def receiving_address(queue: str, default_machine: str, this_machine: str) -> QueueAddress:
    """Return the address of a queue to create or receive from, whose format name must be shorter."""
    address = parse_address(queue, default_machine)
    machine = this_machine if address.machine == LOCAL else address.machine
    length = len(QueueAddress(address.name, machine).format_name.encode("utf-16-le")) // 2
    if length > LONGEST_RECEIVING_FORMAT_NAME:
        raise QueueNotFound(
            f"{queue!r} cannot be received from: its format name would have {length} characters, and MSMQ receives "
            f"from at most {LONGEST_RECEIVING_FORMAT_NAME}; choose a shorter name"
        )
    return address


def _is_ip(machine: str) -> bool:
    try:
        IPv4Address(machine)
    except AddressValueError:
        return False
    return True
