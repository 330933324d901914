"""What every storage of timeouts must do, in one call; see :func:`timeout_checks`."""

from __future__ import annotations

from postdate.testing.conformance import Check
from postdate.testing.timeout_suite.claiming import claiming
from postdate.testing.timeout_suite.enlisting import enlisting
from postdate.testing.timeout_suite.keeping import keeping
from postdate.testing.timeout_suite.looking import looking
from postdate.testing.timeout_suite.subject import TimeoutSubject

__all__ = ["TimeoutSubject", "timeout_checks"]

_TOPICS = (keeping, looking, claiming, enlisting)


def timeout_checks() -> tuple[Check[TimeoutSubject], ...]:
    """Return every check of a storage of timeouts. A check passes when it does not raise; each needs a new subject."""
    return tuple(check for topic in _TOPICS for check in topic.checks)
