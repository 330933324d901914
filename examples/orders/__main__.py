"""``python -m examples.orders``: four orders on the store and the queues of the settings, an hour in seconds.

Without settings all is in the file ``postdate.db``; ``POSTDATE_STORE__ADDRESS``, ``POSTDATE_TRANSPORT__ADDRESS`` and
the rest of ``postdate config show`` say otherwise.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Final

import anyio
import typer
from rich.console import Console

from examples.orders.saga import CancelOrder, GrantMoreTime, PaymentReceived, PlaceOrder, SendMail, configure
from postdate import Endpoint, HandlerContext, ScaledClock, SystemClock
from postdate.config import Settings, load_settings, redact_secrets
from postdate.errors import PostdateError
from postdate.wiring import OpenDeployment, build_delayed_delivery, open_deployment, open_saga_store

_HABITS: Final = {
    "Ada": {"reminder 1": PaymentReceived},
    "Ben": {"reminder 2": CancelOrder},
    "Cleo": {},
    "Dan": {"reminder 1": GrantMoreTime, "reminder 3": PaymentReceived},
}
"""How each customer answers which mail. Cleo does nothing."""

_MORE_MINUTES: Final = 75
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass
class Customers:
    """Read their mails and answer by :data:`_HABITS`; ``orders`` is the endpoint of the orders."""

    orders: str
    clock: ScaledClock
    console: Console
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:6])
    ends: dict[str, str] = field(default_factory=dict[str, str])
    all_ended: anyio.Event = field(default_factory=anyio.Event)

    def order_of(self, customer: str) -> str:
        """Return the id of a customer's order, unique to this run."""
        return f"{customer}-{self.run}"

    async def read(self, mail: SendMail, context: HandlerContext) -> None:
        if mail.order_id != self.order_of(mail.to):  # of an earlier run, which was interrupted
            return
        if mail.order_id in self.ends:  # delivered twice, as it may be where not all is one transaction
            return
        minutes = (self.clock.now() - self.clock.starts_at).total_seconds() / 60
        self.console.print(f"{minutes:3.0f} min  {mail.to:<4}  {mail.text}", markup=False, highlight=False)
        for words, answer in _HABITS[mail.to].items():
            if mail.text.startswith(words):
                extra = {"minutes": _MORE_MINUTES} if answer is GrantMoreTime else {}
                await context.send(answer(mail.order_id, **extra), destination=self.orders)
        if mail.final:
            self.ends[mail.order_id] = mail.text
            if len(self.ends) == len(_HABITS):
                self.all_ended.set()


@app.command()
def main(
    speed: Annotated[float, typer.Option("--speed", min=1, help="Minutes of the story in a real minute.")] = 900.0,
) -> None:
    """Place four orders and follow them to their ends."""
    try:
        anyio.run(_play, load_settings(None, os.environ), speed)
    except PostdateError as error:  # a setting, or a server that is not there: the text says what to do
        typer.echo(f"error [{error.code}]: {redact_secrets(str(error))}", err=True)
        raise typer.Exit(1) from error


async def _play(settings: Settings, speed: float) -> None:
    async with open_deployment(settings, create=True, initialize=False) as deployment:
        sagas = open_saga_store(settings, deployment.databases)
        try:
            named = settings.origin("endpoint.name") != "default"
            name = settings.endpoint.name if named else "orders"
            clock = ScaledClock(SystemClock().now(), speed=speed)
            customers = Customers(name, clock, Console(soft_wrap=True))
            orders = Endpoint(
                name,
                transport=deployment.transport,
                delayed_delivery=build_delayed_delivery(settings, deployment.required_store),
                sagas=sagas,
                transaction_mode=settings.endpoint.transaction_mode,
                error_queue=settings.endpoint.error_queue,
                clock=clock,
            )
            configure(orders, mails=f"{name}.customers")
            async with orders, _reading(customers, deployment, settings):
                for number, customer in enumerate(_HABITS, 1):
                    await orders.send(PlaceOrder(customers.order_of(customer), customer, amount=10 * number))
                await customers.all_ended.wait()
        finally:
            await sagas.close()


def _reading(customers: Customers, deployment: OpenDeployment, settings: Settings) -> Endpoint:
    endpoint = Endpoint(
        f"{customers.orders}.customers",
        transport=deployment.transport,
        error_queue=settings.endpoint.error_queue,
        clock=customers.clock,
    )
    endpoint.handler(SendMail)(customers.read)
    return endpoint


if __name__ == "__main__":
    app()
