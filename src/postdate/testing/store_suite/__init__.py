"""The checks that every store must pass; see :func:`store_checks`."""

from __future__ import annotations

from postdate.testing.conformance import Check
from postdate.testing.store_suite.administration import administration, recording
from postdate.testing.store_suite.capabilities import capabilities
from postdate.testing.store_suite.claims import claims
from postdate.testing.store_suite.contract import contract
from postdate.testing.store_suite.limiting import limiting
from postdate.testing.store_suite.scanning import scanning
from postdate.testing.store_suite.storing import storing
from postdate.testing.store_suite.subject import StoreSubject
from postdate.testing.store_suite.unreadable import unreadable

_TOPICS = (storing, contract, claims, administration, recording, limiting, scanning, unreadable, capabilities)


def store_checks() -> tuple[Check[StoreSubject], ...]:
    """Return every check of a store. A check passes when it does not raise; each needs a subject of its own.

    If a store does not declare a port or a capability, its checks prove the opposite: the store must refuse such calls
    clearly, and not offer a part of them.
    """
    return tuple(check for topic in _TOPICS for check in topic.checks)


def contract_checks() -> tuple[Check[StoreSubject], ...]:
    """Return the checks of the six methods, for a user's store that has no other methods."""
    return tuple(contract.checks)
