"""The checks that every transport must pass; see :func:`transport_checks`."""

from __future__ import annotations

from postdate.testing.conformance import Check
from postdate.testing.transport_suite.receiving import receiving
from postdate.testing.transport_suite.sending import expiry, sending
from postdate.testing.transport_suite.subject import TransportSubject
from postdate.testing.transport_suite.transactions import capabilities, transactions
from postdate.testing.transport_suite.unreadable import unreadable

_TOPICS = (sending, receiving, transactions, expiry, unreadable, capabilities)


def transport_checks() -> tuple[Check[TransportSubject], ...]:
    """Return every check of a transport; see :func:`postdate.testing.store_checks`."""
    return tuple(check for topic in _TOPICS for check in topic.checks)
