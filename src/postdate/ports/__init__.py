"""What the core needs from the outside: stores, transports, and what each of them can do.

Ports are small. A store of one's own is the class :class:`DelayedMessageStore`; everything else is a capability that
an adapter declares as a value and that is checked at start-up, never silently assumed.

Source: specification 1.1 and 6; design.md sections 3 and 4; ADR 0002 (claims), ADR 0003 (one file).
"""

from postdate.ports.archives import ARCHIVED, ArchivableStore, StoredRecord
from postdate.ports.common import (
    OUTCOME_RECORDS,
    BatchedWork,
    NativeTransaction,
    Outcome,
    Record,
    Recording,
    RecordKind,
    TransactionMode,
    Wake,
    Work,
    do_works,
)
from postdate.ports.expiry import ExpiryRules, NativeExpiry
from postdate.ports.intake import DUE_EXCHANGE_TYPES, DelayExchange, ForeignIntake, IntakeQueue, Read
from postdate.ports.observation import (
    FileFacts,
    FileScripts,
    Observer,
    OldSnapshot,
    Process,
    Queued,
    Scripted,
    ServerFacts,
    Standing,
)
from postdate.ports.outbox import Operation, OutboxRecord, OutboxStore, OutboxTransaction
from postdate.ports.publishing import PublishingTransport
from postdate.ports.quarantine import DelegatedQuarantine, Mending, Quarantine, Quarantined
from postdate.ports.record_streams import RecordStreamStore
from postdate.ports.sagas import Correlation, SagaChange, SagaFate, SagaRecord, SagaStore, SagaStoreCapabilities
from postdate.ports.scanning import ArrowBatch, Scan, ScanFilter, ScannableStore, ScanPart
from postdate.ports.stores import (
    NOTHING_MOVED,
    SIMPLE_STORE,
    AdministrableStore,
    Claim,
    ClaimingStore,
    DelayedMessageStore,
    MessageFilter,
    Moved,
    MoveReport,
    MovingStore,
    StoreCapabilities,
    StoreReport,
    StoreStatistics,
    capabilities_of,
)
from postdate.ports.transports import (
    HANDLED,
    End,
    Ending,
    Received,
    Receiver,
    Transport,
    TransportCapabilities,
    refuse_work,
)

__all__ = [
    "ARCHIVED",
    "DUE_EXCHANGE_TYPES",
    "HANDLED",
    "NOTHING_MOVED",
    "OUTCOME_RECORDS",
    "SIMPLE_STORE",
    "AdministrableStore",
    "ArchivableStore",
    "ArrowBatch",
    "BatchedWork",
    "Claim",
    "ClaimingStore",
    "Correlation",
    "DelayExchange",
    "DelayedMessageStore",
    "DelegatedQuarantine",
    "End",
    "Ending",
    "ExpiryRules",
    "FileFacts",
    "FileScripts",
    "ForeignIntake",
    "IntakeQueue",
    "Mending",
    "MessageFilter",
    "MoveReport",
    "Moved",
    "MovingStore",
    "NativeExpiry",
    "NativeTransaction",
    "Observer",
    "OldSnapshot",
    "Operation",
    "OutboxRecord",
    "OutboxStore",
    "OutboxTransaction",
    "Outcome",
    "Process",
    "PublishingTransport",
    "Quarantine",
    "Quarantined",
    "Queued",
    "Read",
    "Received",
    "Receiver",
    "Record",
    "RecordKind",
    "RecordStreamStore",
    "Recording",
    "SagaChange",
    "SagaFate",
    "SagaRecord",
    "SagaStore",
    "SagaStoreCapabilities",
    "Scan",
    "ScanFilter",
    "ScanPart",
    "ScannableStore",
    "Scripted",
    "ServerFacts",
    "Standing",
    "StoreCapabilities",
    "StoreReport",
    "StoreStatistics",
    "StoredRecord",
    "TransactionMode",
    "Transport",
    "TransportCapabilities",
    "Wake",
    "Work",
    "capabilities_of",
    "do_works",
    "refuse_work",
]
