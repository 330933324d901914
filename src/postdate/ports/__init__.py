"""Interfaces between the core and the outside: stores, transports, and their capabilities.

Ports are small. A user's own store is a :class:`DelayedMessageStore`. Everything else is a capability: an adapter
declares it as a value, and it is checked at start-up, never silently assumed.

Source: docs/guides/own-store.md; ADR 0002 (claims), ADR 0003 (one file).
"""

from postdate.ports.administration import (
    AdministrableStore as AdministrableStore,
    MessageFilter as MessageFilter,
    PendingPage as PendingPage,
    StoreStatistics as StoreStatistics,
    counts_between as counts_between,
)
from postdate.ports.changing import (
    Answer as Answer,
    JoiningStore as JoiningStore,
    ReplacingStore as ReplacingStore,
    Steps as Steps,
    answer_of as answer_of,
)
from postdate.ports.common import (
    OUTCOME_RECORDS as OUTCOME_RECORDS,
    BatchedWork as BatchedWork,
    NativeTransaction as NativeTransaction,
    Outcome as Outcome,
    Record as Record,
    Recording as Recording,
    RecordKind as RecordKind,
    TransactionMode as TransactionMode,
    Wake as Wake,
    Work as Work,
    run_works as run_works,
)
from postdate.ports.endpoint import (
    Correlation as Correlation,
    Operation as Operation,
    OutboxRecord as OutboxRecord,
    OutboxStore as OutboxStore,
    OutboxTransaction as OutboxTransaction,
    SagaChange as SagaChange,
    SagaChangeKind as SagaChangeKind,
    SagaRecord as SagaRecord,
    SagaStore as SagaStore,
    SagaStoreCapabilities as SagaStoreCapabilities,
)
from postdate.ports.observation import (
    DeliveredMessage as DeliveredMessage,
    FileFacts as FileFacts,
    FileScripts as FileScripts,
    Observer as Observer,
    OldSnapshot as OldSnapshot,
    Process as Process,
    QueuedMessage as QueuedMessage,
    Scripted as Scripted,
    ServerFacts as ServerFacts,
    PendingState as PendingState,
    StoreTraffic as StoreTraffic,
    UnreadableRow as UnreadableRow,
    UnreadableRows as UnreadableRows,
)
from postdate.ports.scanning import (
    ARCHIVED as ARCHIVED,
    ArrowBatch as ArrowBatch,
    PrunableStore as PrunableStore,
    RecordStreamStore as RecordStreamStore,
    Scan as Scan,
    ScanFilter as ScanFilter,
    ScannableStore as ScannableStore,
    ScanPart as ScanPart,
    StreamableStore as StreamableStore,
    StreamPosition as StreamPosition,
)
from postdate.ports.stores import (
    NOTHING_MOVED as NOTHING_MOVED,
    SIMPLE_STORE as SIMPLE_STORE,
    Claim as Claim,
    ClaimingStore as ClaimingStore,
    DelayedMessageStore as DelayedMessageStore,
    MovedMessages as MovedMessages,
    MoveReport as MoveReport,
    MovingStore as MovingStore,
    StoreCapabilities as StoreCapabilities,
    StoreReport as StoreReport,
    capabilities_of as capabilities_of,
)
from postdate.ports.transports import (
    DUE_EXCHANGE_TYPES as DUE_EXCHANGE_TYPES,
    HANDLED as HANDLED,
    SUSPECT_AFTER as SUSPECT_AFTER,
    DelayExchange as DelayExchange,
    Completion as Completion,
    Settlement as Settlement,
    ExpiryRules as ExpiryRules,
    ForeignIntake as ForeignIntake,
    IntakeQueue as IntakeQueue,
    NativeExpiry as NativeExpiry,
    PublishingTransport as PublishingTransport,
    Read as Read,
    Received as Received,
    Receiver as Receiver,
    Transport as Transport,
    TransportCapabilities as TransportCapabilities,
    count_received_together as count_received_together,
    check_no_work as check_no_work,
)
