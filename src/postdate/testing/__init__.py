"""Tools for tests of programs that use Postdate: a clock that tests move, adapters that fail as planned, and the
conformance suites that every store and every transport must pass, including those of users.
"""  # noqa: D205

from postdate.testing.clock import VirtualClock as VirtualClock
from postdate.testing.conformance import Check as Check, ConformanceFailure as ConformanceFailure, Damage as Damage
from postdate.testing.endpoints import (
    EndpointTest as EndpointTest,
    SentMessage as SentMessage,
    WaitingMessage as WaitingMessage,
)
from postdate.testing.faults import (
    Call as Call,
    Fault as Fault,
    Faults as Faults,
    FaultyMovingStore as FaultyMovingStore,
    FaultyStore as FaultyStore,
    FaultyTransport as FaultyTransport,
    Plan as Plan,
)
from postdate.testing.measurements import RecordedMetrics as RecordedMetrics
from postdate.testing.saga_suite import SagaStoreSubject as SagaStoreSubject, saga_checks as saga_checks
from postdate.testing.store_suite import contract_checks as contract_checks, store_checks as store_checks
from postdate.testing.store_suite.subject import StoreSubject as StoreSubject
from postdate.testing.timeout_suite import TimeoutSubject as TimeoutSubject, timeout_checks as timeout_checks
from postdate.testing.transport_suite import transport_checks as transport_checks
from postdate.testing.transport_suite.subject import TransportSubject as TransportSubject
