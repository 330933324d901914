"""The order: its messages, its state, and its timeouts. Knows no database and no broker."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from postdate import Endpoint, HandlerContext, Saga, handles, handles_timeout, started_by

REMINDERS = 3
BETWEEN_REMINDERS = timedelta(minutes=15)
TIME_TO_PAY = timedelta(hours=1)

# --- messages -----------------------------------------------------------------------------------------------------


@dataclass
class PlaceOrder:
    """A customer orders."""

    order_id: str
    customer: str
    amount: int


@dataclass
class PaymentReceived:
    """The bank says that an order is paid."""

    order_id: str


@dataclass
class CancelOrder:
    """The customer withdraws the order."""

    order_id: str


@dataclass
class GrantMoreTime:
    """The customer may pay later: this many minutes from now."""

    order_id: str
    minutes: int


@dataclass
class SendMail:
    """To a customer; handled by the endpoint that sends mails."""

    to: str
    order_id: str
    text: str
    final: bool = False


# --- timeouts -----------------------------------------------------------------------------------------------------


@dataclass
class ReminderDue:
    """Time for the reminder of this number."""

    number: int


@dataclass
class PaymentDue:
    """The time to pay is over."""


# --- the saga -----------------------------------------------------------------------------------------------------


@dataclass
class OrderState:
    """The saga's state."""

    order_id: str
    customer: str = ""
    amount: int = 0
    payment_due: str = ""
    """Id of the timeout, needed to move it."""


class OrderSaga(Saga[OrderState], correlated_by="order_id"):
    """An order from its placing to its payment, or to its end without one."""

    @started_by(PlaceOrder)
    async def place(self, message: PlaceOrder, context: HandlerContext) -> None:
        """Take the order, schedule the first reminder, and wait an hour for the payment."""
        self.state.customer, self.state.amount = message.customer, message.amount
        self.state.payment_due = await self.request_timeout(PaymentDue, within=TIME_TO_PAY)
        await self.request_timeout(ReminderDue(1), within=BETWEEN_REMINDERS)
        await self.mail(context, f"we have your order; please pay {message.amount} euros within an hour")

    @handles_timeout(ReminderDue)
    async def remind(self, timeout: ReminderDue, context: HandlerContext) -> None:
        """Send a reminder, and schedule the next one up to ``REMINDERS``."""
        await self.mail(context, f"reminder {timeout.number}: please pay {self.state.amount} euros")
        if timeout.number < REMINDERS:
            await self.request_timeout(ReminderDue(timeout.number + 1), within=BETWEEN_REMINDERS)

    @handles(GrantMoreTime)
    async def wait_longer(self, message: GrantMoreTime, context: HandlerContext) -> None:
        """Move the payment's timeout."""
        await self.move_timeout(self.state.payment_due, within=timedelta(minutes=message.minutes))
        await self.mail(context, f"you have {message.minutes} minutes more")

    @handles(PaymentReceived)
    async def paid(self, message: PaymentReceived, context: HandlerContext) -> None:
        """End the saga, which cancels its pending timeouts."""
        await self.mail(context, "thank you for your payment", final=True)
        self.complete()

    @handles(CancelOrder)
    async def cancelled(self, message: CancelOrder, context: HandlerContext) -> None:
        await self.mail(context, "your order is cancelled, as you wished", final=True)
        self.complete()

    @handles_timeout(PaymentDue)
    async def not_paid(self, timeout: PaymentDue, context: HandlerContext) -> None:
        await self.mail(context, "your order is cancelled: it was not paid", final=True)
        self.complete()

    async def mail(self, context: HandlerContext, text: str, *, final: bool = False) -> None:
        """Send a mail to the customer: it leaves when the handled message commits."""
        await context.send(SendMail(self.state.customer, self.state.order_id, text, final))


def configure(endpoint: Endpoint, mails: str) -> None:
    endpoint.saga(OrderSaga)
    endpoint.route(SendMail, mails)
