"""Checks that a store does what it declares, and refuses clearly what it does not declare."""

from __future__ import annotations

from datetime import timedelta

from postdate import ports
from postdate.backends.memory.transport import MemoryTransport
from postdate.core.simple_store import enlisting_store as can_share
from postdate.endpoint.delayed_delivery import check_mode
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import (
    ClaimLost,
    ConfigurationError,
    DuplicateMessage,
    NotSupported,
    QueueNotFound,
    UnsupportedTransactionMode,
)
from postdate.messages import DelayedMessage, Envelope
from postdate.ports.limits import LimitingStore
from postdate.testing.conformance import Topic, expect, expect_equal, expect_error
from postdate.testing.store_suite.subject import (
    MICROSECOND,
    NOW,
    QUEUE,
    SECOND,
    StoreSubject,
    claim_one,
    close_adapter,
    ids,
    message,
    moving_store_of,
    open_beside_queues,
    open_claiming,
    open_prepared,
    store_and_claim_one,
)

capabilities: Topic[StoreSubject] = Topic("capabilities")

_ROLES: tuple[type, ...] = (
    *(ports.ClaimingStore, ports.MovingStore, LimitingStore, ports.AdministrableStore),
    *(ports.ScannableStore, ports.PrunableStore, ports.StreamableStore, ports.UnreadableRows),
)


@capabilities
async def no_role_is_half_there(subject: StoreSubject) -> None:
    """A store with a method of a role declares the role by inheriting it, and so has all its methods."""
    async with open_prepared(subject) as store:
        for role in _ROLES:
            methods = (name for name, value in vars(role).items() if getattr(value, "__isabstractmethod__", False))
            present = [name for name in methods if hasattr(store, name)]
            expect(isinstance(store, role) or not present, f"{role.__name__} is inherited, as there are {present}")


@capabilities.with_fixture(open_claiming)
async def a_clock_and_columns_are_there_as_it_says(store: ports.ClaimingStore) -> None:
    """A store that says it has a clock tells the time by it, and one that does not refuses; columns likewise."""
    if store.capabilities.has_clock:
        expect((await store.server_now()).utcoffset() == timedelta(0), "the time of the server is UTC")
    else:
        with expect_error(NotSupported, "the clock of a store without one"):
            await store.server_now()
    if isinstance(store, ports.ScannableStore) and not store.has_columns:
        with expect_error(NotSupported, "columns of a store without them"):
            list(store.scan_columns(ports.Scan("pending", ()), ports.ScanPart(0, 1)))


@capabilities
async def declared_modes_are_accepted_and_others_refused(subject: StoreSubject) -> None:
    """A declared transaction mode initializes; any other is refused at start-up, by name (row 29)."""
    for mode in ports.TransactionMode:
        store = subject.open()
        try:
            if mode in ports.capabilities_of(store).transaction_modes:
                await store.initialize("conformance", mode)
            elif isinstance(store, ports.ClaimingStore):
                with expect_error(UnsupportedTransactionMode, f"mode {mode.value}"):
                    check_mode(DelayedDelivery(store), MemoryTransport(), mode)
        finally:
            await close_adapter(store)


@capabilities
async def an_endpoint_takes_it_or_says_why_not(subject: StoreSubject) -> None:
    """A store with claims can be used by an endpoint; one without is refused when the settings are made."""
    async with open_prepared(subject) as store:
        if isinstance(store, ports.ClaimingStore):
            DelayedDelivery(store)
        else:
            with expect_error(ConfigurationError, "a store without claims"):
                DelayedDelivery(store)


@capabilities
async def a_shared_transaction_needs_one_database(subject: StoreSubject) -> None:
    """Only a store that names the database of the transport, and can enlist, is used in one transaction with it."""
    async with open_claiming(subject) as store:
        expect(can_share(store, MemoryTransport()) is None, "no transaction is shared with queues in memory")
        with expect_error(UnsupportedTransactionMode, "transaction scope with queues in memory"):
            check_mode(DelayedDelivery(store), MemoryTransport(), ports.TransactionMode.TRANSACTION_SCOPE)
        if moving_store_of(store) is None:
            declared = ports.TransactionMode.TRANSACTION_SCOPE in store.capabilities.transaction_modes
            expect(not declared, "a store that cannot enlist does not declare transaction scope")
            return
        transport = subject.transport()
        try:
            expect(can_share(store, transport) is not None, "the store shares transactions with its own queues")
        finally:
            await close_adapter(transport)


@capabilities.with_fixtures(open_beside_queues)
async def storing_is_part_of_the_transaction(store: ports.MovingStore, transport: ports.Transport) -> None:
    """Enlisting: a message stored in a transaction of the queues is there after its commit, not after a rollback."""
    work = store.storing_work([message("rolled-back")], NOW)
    with expect_error(QueueNotFound, "a send to a missing queue in one transaction with a store"):
        await transport.send([Envelope("missing", "e-1")], NOW, work=[work])
    expect_equal(await store.next_due(), None, "next due after the rollback")
    stored = message("committed")
    await transport.send([Envelope(QUEUE, "e-2")], NOW, work=[store.storing_work([stored], NOW)])
    expect_equal((await claim_one(store)).message, stored, "the message after the commit")


@capabilities.with_fixtures(open_beside_queues)
async def storing_refuses_an_id_that_was_used(store: ports.MovingStore, transport: ports.Transport) -> None:
    """Enlisting: an id that waits, was delivered or stands there twice undoes all; what had failed comes back."""

    async def send(*messages: DelayedMessage) -> None:
        await transport.send([Envelope(QUEUE, "e-1")], NOW, work=[store.storing_work(messages, NOW)])

    for outcome in (ports.Outcome.FAILED, ports.Outcome.DELIVERED):
        await send(message())
        with expect_error(DuplicateMessage, "storing an id that waits in a transaction"):
            await send(message("other"), message(body=b"second"))
        await store.finish([await claim_one(store)], outcome, NOW)
    with expect_error(DuplicateMessage, "storing the id of a delivered message in a transaction"):
        await send(message("other"), message())
    with expect_error(DuplicateMessage, "storing an id twice in a transaction"):
        await send(message("twice"), message("twice", body=b"second"))
    expect_equal(await store.next_due(), None, "next due after what was undone")
    expect_equal(len(await transport.receiver(QUEUE).receive(10)), 2, "messages sent with what was stored")


@capabilities.with_fixtures(open_beside_queues)
async def finishing_is_part_of_the_transaction(store: ports.MovingStore, transport: ports.Transport) -> None:
    """Enlisting: a claim is finished with the send or not at all; a lost claim raises ClaimLost and nothing is sent."""
    finishing = store.finishing_work([await store_and_claim_one(store)], ports.Outcome.DELIVERED, NOW)
    with expect_error(QueueNotFound, "a send to a missing queue in one transaction with finishing"):
        await transport.send([Envelope("missing", "e-1")], NOW, work=[finishing])
    expect_equal(await store.next_due(), NOW, "next due after the rollback")
    await transport.send([Envelope(QUEUE, "e-2")], NOW, work=[finishing])
    expect_equal(await store.next_due(), None, "next due after the commit")
    with expect_error(ClaimLost, "finishing a claim twice"):
        await transport.send([Envelope(QUEUE, "e-3")], NOW, work=[finishing])
    received = await transport.receiver(QUEUE).receive(10)
    expect_equal([each.envelope.message_id for each in received], ["e-2"], "sent messages")


@capabilities.with_fixtures(open_beside_queues)
async def due_messages_move_to_their_queues(store: ports.MovingStore, transport: ports.Transport) -> None:
    """Moving: due messages go to their queues, oldest first; expired ones are recorded; others are left behind."""
    expired = message("expired", NOW - 3 * SECOND, expires_at=NOW - SECOND)
    last = message("last", NOW - SECOND, headers={"é": "🕰"}, body=b"\0last", expires_at=NOW + 3600 * SECOND)
    batch = [
        last,
        message("first", NOW - 2 * SECOND),
        expired,
        message("now"),
        message("x", NOW - 4 * SECOND, destination="nowhere"),
    ]
    await store.store_many(batch, NOW)
    report = await store.move_due(NOW, 100)
    counts = (report.delivered, report.expired, int(report.needs_claim))
    expect_equal(counts, (2, 1, 1), "delivered, expired, left behind")
    expect_equal(
        (dict(report.by_destination), report.first_due), ({QUEUE: 2}, NOW - 2 * SECOND), "where to, and the first"
    )
    received = [each.envelope for each in await transport.receiver(QUEUE).receive(10)]
    expect_equal([each.message_id for each in received], ["first", "last"], "moved messages")
    moved = received[1]
    content = (moved.destination, dict(moved.headers), moved.body, moved.due, moved.expires_at)
    expect_equal(content, (QUEUE, {"é": "🕰"}, b"\0last", last.due, last.expires_at), "a moved message")
    expect_equal(ids(await store.claim_due(NOW, 10)), ["x"], "claims of what was left behind")
    if isinstance(store, ports.AdministrableStore):
        ends = {name: (await store.history(name))[-1].kind for name in ("first", "expired")}
        expect_equal(ends, {"first": ports.RecordKind.DELIVERED, "expired": ports.RecordKind.EXPIRED}, "records")


@capabilities.with_fixtures(open_beside_queues)
async def a_move_takes_no_more_than_its_limit(store: ports.MovingStore, transport: ports.Transport) -> None:
    """Moving: a batch is as large as asked for, and messages that others hold are not moved."""
    await store.store_many([message(f"{n}", NOW + n * MICROSECOND) for n in range(5)], NOW)
    expect_equal(ids(await store.claim_due(NOW + MICROSECOND, 10)), ["0"], "claims")
    first = await store.move_due(NOW + SECOND, 3)
    second = await store.move_due(NOW + SECOND, 3)
    expect_equal((first.delivered, second.delivered), (3, 1), "moved")
    expect_equal((first.next_attempt, second.next_attempt), (NOW + 4 * MICROSECOND, None), "next attempts")


@capabilities.with_fixtures(open_beside_queues)
async def a_move_lists_what_it_took(store: ports.MovingStore, transport: ports.Transport) -> None:
    """Moving: asked to, it says which messages it took, with due times in UTC, and which of them had expired."""
    first, second = NOW - 3 * SECOND, NOW - 2 * SECOND
    await store.store_many([message("gone", first, expires_at=second), message("sent", second)], NOW)
    moved = (await store.move_due(NOW, 100, listing=True)).messages
    if moved is None:
        expect(False, "a move that was to be listed was not")
        return
    listed = zip(moved.message_ids, moved.dues, moved.destinations, moved.expired, strict=True)
    expect_equal(sorted(listed), [("gone", first, QUEUE, True), ("sent", second, QUEUE, False)], "listed")
    expect(all(due.utcoffset() == timedelta(0) for due in moved.dues), "due times are in UTC")
    empty = await store.move_due(NOW, 100, listing=True)
    nothing = empty.messages
    expect(not empty.by_destination and empty.first_due is None, "an empty move went nowhere")
    expect(nothing is not None and not nothing.message_ids, "an empty move lists nothing")
    expect((await store.move_due(NOW, 100)).messages is None, "a move that was not to be listed is not")
