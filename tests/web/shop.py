"""A shop whose deployment has everything that the page shows: for tests in a browser, and for pictures of the page."""

import math
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import msgspec

from postdate import (
    DelayedMessage,
    Envelope,
    Headers,
    LocalTransport,
    SqliteSagaStore,
    SqliteStore,
    SystemClock,
    TransactionMode,
)
from postdate.core.limits import add_pause, change_limits
from postdate.endpoint.saga_instance import PendingTimeout, SagaDetails, encode_details
from postdate.ports import Correlation, SagaChange, SagaChangeKind, SagaRecord

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
MILLISECOND = timedelta(milliseconds=1)
QUEUES = ("orders", "invoices", "reminders", "shipping", "newsletter", "error", "shop", "shop.timeouts")
TRIED, FAILING, OVERDUE, HELD, NEXT = "order-10427", "refund-311", "invoice-2206", "parcel-88", "reminder-0-0"
FAILED, BROKEN = "payment-7740", "order-10399"
"""Ids of messages: one that was tried again and delivered, one that fails, and so on; ``BROKEN`` is unreadable."""

TOKEN = "whoever has this may act"

PAGES = {
    "/": 200,
    "/?due=day": 200,
    "/?due=month": 200,
    "/messages": 200,
    "/messages?queue=nowhere": 200,
    "/messages?due_from=tomorrow": 400,
    f"/messages/{TRIED}": 200,
    f"/messages/{FAILING}?body=shown": 200,
    f"/messages/{HELD}": 200,
    f"/messages/{BROKEN}": 200,
    "/messages/never-heard-of": 404,
    "/errors": 200,
    "/errors?exception=builtins.KeyError&queue=invoices": 200,
    f"/errors/{FAILED}": 200,
    "/queues": 200,
    "/sagas": 200,
    "/sagas/Shop.Order/order-10420?state=shown": 200,
    "/doctor": 200,
    "/sign-in": 200,
    f"/change?what=cancel&id={NEXT}": 403,
    "/nowhere": 404,
}
"""What it can be asked, and the status of the answer."""

OF_WHO_ACTS = {
    "/errors": 200,
    "/queues": 200,
    f"/messages/{NEXT}": 200,
    f"/change?what=reschedule&id={NEXT}": 200,
    f"/change?what=edit&id={FAILED}": 200,
    "/change?what=limit&queue=shipping": 200,
    "/change?what=discard-group&exception=builtins.TimeoutError&queue=orders": 200,
}
"""The same of somebody who has signed in."""

_TRACE = """\
Traceback (most recent call last):
  File "/srv/shop/endpoint.py", line 84, in handle
    await order.check(payments, within=LIMIT)
  File "/srv/shop/orders.py", line 31, in check
    raise {0}(problem)
{0}: {1}"""
_AWAY = "ConnectionRefusedError: [Errno 111] nobody answers at 10.1.4.20:5672"


class Shop:
    """Store and queues in one file of a folder, with the settings of ``postdate dashboard``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "shop.db"
        self.now = SystemClock().now().replace(microsecond=0)
        settings = '[endpoint]\nname = "shop"\n[store]\naddress = "sqlite:///shop.db"\n'
        (folder / "postdate.toml").write_text(settings, "utf-8")
        (folder / "token").write_text(TOKEN, "utf-8")

    async def create(self) -> SqliteStore:
        store, transport = SqliteStore(self.path), LocalTransport(self.path)
        await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
        await store.setup()
        await transport.create_queues(QUEUES)
        await transport.close()
        return store

    async def fill(self) -> None:
        """Put there what a shop has on an ordinary day, and what may go wrong."""
        store = await self.create()
        for batch in range(60):
            due = batch / 2 * MINUTE - 50 * MINUTE
            done = [self.message(f"done-{batch}-{n}", QUEUES[n % 4], due + n * MILLISECOND) for n in range(5)]
            await store.store_many(done, self.now - DAY)
            await store.move_due(self.now + due + (6 + batch**2 / 40) * MILLISECOND, len(done))
        await self._deliver_at_the_third_attempt(store)
        await self._damage_one(store)
        await store.store_many([self.message(FAILING, "orders", -10 * MINUTE)], self.now - DAY)
        (claim,) = await store.claim_due(self.now, 10)
        await store.retry_later(claim, self.now + 4 * MINUTE, self.now - 9 * MINUTE, _AWAY)
        await store.store_many([self.message(OVERDUE, "invoices", -7 * MINUTE)], self.now - DAY)
        await store.store_many([self.message(HELD, "shipping", -2 * HOUR)], self.now - DAY)
        await change_limits(store, "shipping", add_pause, self.now)
        await store.store_many(self._ahead(), self.now - HOUR)
        await store.close()
        await self.send(*self._failed())
        await self._begin_sagas()

    def message(self, id_: str, destination: str, after: timedelta, body: bytes = b"") -> DelayedMessage:
        headers = {
            Headers.ENCLOSED_MESSAGE_TYPES: f"Shop.{destination.title()}.{id_.partition('-')[0].title()}Due",
            Headers.CONTENT_TYPE: "application/json",
            Headers.CORRELATION_ID: f"customer-{len(id_) * 7919}",
            Headers.ORIGINATING_ENDPOINT: "shop",
            Headers.TIME_SENT: f"{self.now - DAY:%Y-%m-%d %H:%M:%S:%f} Z",
        }
        return DelayedMessage(id_, self.now + after, destination, headers, body or b'{"customer": 4711, "total": 59.9}')

    def _ahead(self) -> list[DelayedMessage]:
        """Return an hour with a herd in it, a day with busy hours, and a month."""
        minutes = [(n, round(14 + 9 * math.sin(n / 4) + 5 * math.sin(n * 1.7))) for n in range(1, 60)]
        hours = [(n, round(60 + 45 * math.sin(n / 3))) for n in range(1, 24)]
        days = [(n, round(260 + 160 * math.sin(n * 0.9))) for n in range(2, 30)]
        found = [self.message("reminder-0-0", "reminders", MINUTE / 2)]
        for unit, counts, queues in (
            (MINUTE, minutes, ("reminders", "orders", "reminders", "invoices", "newsletter")),
            (HOUR, hours, ("orders", "invoices", "reminders")),
            (DAY, days, ("invoices", "newsletter")),
        ):
            for place, count in counts:
                for n in range(count):
                    queue = queues[n % len(queues)]
                    id_ = f"{queue.rstrip('s')}-{unit // MINUTE}-{place}-{n}"
                    found.append(self.message(id_, queue, (place + n / count) * unit))
        herd = [self.message(f"campaign-{n}", "newsletter", 37 * MINUTE) for n in range(1_800)]
        return [*found, *herd]

    async def _deliver_at_the_third_attempt(self, store: SqliteStore) -> None:
        due = self.now - 40 * MINUTE
        await store.store_many([self.message(TRIED, "orders", -40 * MINUTE)], due - 2 * DAY)
        for attempt in range(1, 3):
            at = due + attempt * MINUTE
            (claim,) = await store.claim_due(at, 10)
            await store.retry_later(claim, at + MINUTE / 2, at + 3 * timedelta(milliseconds=1), _AWAY)
        await store.move_due(due + 3 * MINUTE, 10)

    async def _damage_one(self, store: SqliteStore) -> None:
        await store.store_many([self.message(BROKEN, "orders", -HOUR)], self.now - DAY)
        with closing(sqlite3.connect(self.path)) as file, file:
            row = "(SELECT content FROM delayed_message WHERE message_id = ?)"
            file.execute(f"UPDATE content SET headers = '{{no json' WHERE seq = {row}", (BROKEN,))
        assert not await store.claim_due(self.now, 10)

    async def _begin_sagas(self) -> None:
        """Have orders wait for their payment, and for their parcel."""
        sagas, changes, messages = SqliteSagaStore(self.path), list[SagaChange](), list[DelayedMessage]()
        for number in range(10_400, 10_440):
            timeouts = dict[str, PendingTimeout]()
            for name, minutes in (("PaymentIsLate", number - 10_390), ("ParcelIsLate", number % 7 * 600)):
                if minutes:
                    messages.append(self.message(f"{name}-{number}", "shop", minutes * MINUTE))
                    due, said = messages[-1].due, msgspec.Raw(b"{}")
                    timeouts[name] = PendingTimeout(f"{name}-{number}", due, f"Shop.{name}", said)
            place, state = Correlation("order", str(number)), '{"total": 59.9, "paid": false}'
            record = SagaRecord(f"order-{number}", "Shop.Order", place, state, encode_details(SagaDetails(timeouts)))
            changes.append(SagaChange(SagaChangeKind.CREATED, record))
        await sagas.setup()
        await sagas.apply(changes)
        await sagas.close()
        await self.store(*messages)

    def _failed(self) -> list[Envelope]:
        causes = (
            (12, "payment", "orders", TimeoutError("the payment service did not answer within 30 s")),
            (3, "invoice", "invoices", KeyError("vat_id")),
            (1, "parcel", "shipping", ValueError("weight must be above 0 kg, not -2.5")),
        )
        return [
            self.failed(f"{what}-{7740 + n}", queue, error, (3 * (count - n) + len(what)) * MINUTE)
            for count, what, queue, error in causes
            for n in range(count)
        ]

    def failed(self, id_: str, queue: str, error: Exception, ago: timedelta) -> Envelope:
        """Return a message as an endpoint would put it into the error queue."""
        headers = {
            **self.message(id_, queue, timedelta()).headers,
            Headers.MESSAGE_ID: id_,
            Headers.FAILED_QUEUE: queue,
            Headers.TIME_OF_FAILURE: f"{self.now - ago:%Y-%m-%d %H:%M:%S:%f} Z",
            Headers.EXCEPTION_TYPE: f"{type(error).__module__}.{type(error).__qualname__}",
            Headers.EXCEPTION_MESSAGE: str(error),
            Headers.EXCEPTION_STACK_TRACE: _TRACE.format(type(error).__qualname__, error),
            Headers.DELAYED_RETRIES: "3",
        }
        return Envelope("error", id_, headers, b'{"order": 10399, "total": 120.5}')

    async def send(self, *envelopes: Envelope) -> None:
        transport = LocalTransport(self.path)
        assert await transport.send(envelopes, self.now) == [None] * len(envelopes)
        await transport.close()

    @property
    def waiting(self) -> int:
        with closing(sqlite3.connect(self.path)) as file:
            readable = "SELECT count(*) FROM delayed_message WHERE attempt_at IS NOT NULL"
            (count,) = file.execute(readable).fetchone()
        return count

    async def store(self, *messages: DelayedMessage) -> None:
        store = SqliteStore(self.path)
        await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
        await store.store_many(messages, self.now)
        await store.close()
