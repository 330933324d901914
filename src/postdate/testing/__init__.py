"""For tests of programs that use Postdate: a clock that is moved by hand, adapters that fail as planned, and the
conformance suites that every store and every transport must pass, those of users included.
"""  # noqa: D205

from postdate.testing.clock import VirtualClock
from postdate.testing.conformance import Check, ConformanceFailure, Damage
from postdate.testing.endpoints import EndpointTest, Sent, Waiting
from postdate.testing.faults import Call, Fault, Faults, FaultyMovingStore, FaultyStore, FaultyTransport, Plan
from postdate.testing.measurements import RecordedMetrics
from postdate.testing.saga_suite import SagaStoreSubject, saga_checks
from postdate.testing.store_suite import contract_checks, store_checks
from postdate.testing.store_suite.subject import StoreSubject
from postdate.testing.timeout_suite import TimeoutSubject, timeout_checks
from postdate.testing.transport_suite import transport_checks
from postdate.testing.transport_suite.subject import TransportSubject

__all__ = [
    "Call",
    "Check",
    "ConformanceFailure",
    "Damage",
    "EndpointTest",
    "Fault",
    "Faults",
    "FaultyMovingStore",
    "FaultyStore",
    "FaultyTransport",
    "Plan",
    "RecordedMetrics",
    "SagaStoreSubject",
    "Sent",
    "StoreSubject",
    "TimeoutSubject",
    "TransportSubject",
    "VirtualClock",
    "Waiting",
    "contract_checks",
    "saga_checks",
    "store_checks",
    "timeout_checks",
    "transport_checks",
]
