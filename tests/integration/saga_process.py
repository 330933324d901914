"""A process that runs a saga on the store and queues of its settings until it is killed: ``python saga_process.py``."""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import anyio

from postdate import Endpoint, HandlerContext, Saga, handles_timeout, started_by
from postdate.config import load_settings
from postdate.wiring import build_delayed_delivery, open_deployment, open_saga_store

STEPS = 3
APART = timedelta(milliseconds=10)


@dataclass
class Begin:
    number: int


@dataclass
class Step:
    number: int


@dataclass
class Done:
    number: int


@dataclass
class RelayState:
    number: int
    steps: int = 0


class Relay(Saga[RelayState], correlated_by="number", name="Relay"):
    """One timeout after the other; the last one sends a message and completes."""

    @started_by(Begin)
    async def begin(self, message: Begin, context: HandlerContext) -> None:
        await self.request_timeout(Step(1), within=APART)

    @handles_timeout(Step)
    async def step(self, timeout: Step, context: HandlerContext) -> None:
        self.state.steps += 1
        if timeout.number < STEPS:
            await self.request_timeout(Step(timeout.number + 1), within=APART)
        else:
            await context.send(Done(self.state.number), destination=os.environ["RELAY_DONE"])
            self.complete()


async def main() -> None:
    settings = load_settings(None, os.environ)
    async with open_deployment(settings, create=True, initialize=False) as deployment:
        sagas = open_saga_store(settings)
        endpoint = Endpoint(
            settings.endpoint.name,
            transport=deployment.transport,
            delayed_delivery=build_delayed_delivery(settings, deployment.required_store),
            sagas=sagas,
            error_queue=settings.endpoint.error_queue,
        )
        endpoint.route(Begin, endpoint.name, name="Begin")
        endpoint.saga(Relay)
        async with endpoint:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
