"""The queues of a machine as one object. Source: ADR 0021."""

from __future__ import annotations

from functools import cached_property

from postdate.backends.msmq.transport import MsmqTransport
from postdate.persistence.databases import DatabaseObject


class Msmq(DatabaseObject):
    """The message queues of a Windows machine. They keep no messages until these are due: give an endpoint a store.

    Args:
        address: ``msmq:`` for this machine, or ``msmq://machine``.
        transactional: whether queues and sends are.
    """

    def __init__(self, address: str = "msmq:", *, transactional: bool = True) -> None:
        super().__init__()
        self._address, self._transactional = address, transactional

    @cached_property
    def queues(self) -> MsmqTransport:
        """The transport."""
        return self.made(MsmqTransport(self._address, transactional=self._transactional))
