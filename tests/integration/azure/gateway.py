"""A way to Azurite that answers in its place, ends connections, or is slow when told to: an account under stress."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
from aiohttp import ClientSession, web
from tests.azure_store_subjects import TablePlace
from yarl import URL

from postdate.backends.azure.store import AzureTableStore
from postdate.ports import TransactionMode

LOST = 0
"""In place of a status: the connection ends without an answer."""

Selection = Callable[[str, bytes], bool]
"""Tells from the path with its query, and from the body, whether a request is meant."""

_PASSED_ON = {"content-type", "date", "etag", "server"}


class Stop:
    """A place where requests wait.

    Args:
        reached: set once the first one is there.
        opened: lets all go on.
    """

    def __init__(self) -> None:
        self.reached, self.opened = anyio.Event(), anyio.Event()

    async def wait(self) -> None:
        self.reached.set()
        await self.opened.wait()


@dataclass
class Rule:
    """What becomes of requests.

    Args:
        method: of the requests meant; empty: any.
        status: answered; ``None``: the server's own answer.
        times: how often; then requests pass again.
        headers: of the answer.
        after: the request takes effect, and only its answer is replaced.
        is_meant: which of these requests.
        stop: keeps the request, or its answer if it is to take effect first.
    """

    method: str
    status: int | None
    times: int
    headers: Mapping[str, str] = field(default_factory=dict)
    after: bool = False
    is_meant: Selection = lambda _path, _body: True
    stop: "Stop | None" = None

    def concerns(self, request: web.Request, body: bytes) -> bool:
        is_method = self.method in {"", request.method}
        return self.times > 0 and is_method and self.is_meant(request.path_qs, body)


class Gateway:
    """Forwards requests to one service.

    Args:
        target: URL of it, with the name of the account.
    """

    def __init__(self, target: str) -> None:
        self._target = URL(target)
        self.url = ""
        self.rules: list[Rule] = []
        self.requests: list[str] = []

    def answer(self, method: str, status: int, times: int = 1, *, after: bool = False, **headers: str) -> None:
        """Answer requests in place of the server; names of headers with _ for -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.rules.append(Rule(method, status, times, named, after))

    def lose(self, is_meant: Selection, times: int = 1) -> None:
        """End the connection of a request once it has taken effect."""
        self.rules.append(Rule("", LOST, times, after=True, is_meant=is_meant))

    def refuse(self, is_meant: Selection, times: int = 1) -> None:
        self.rules.append(Rule("", 503, times, is_meant=is_meant))

    def stop(self, is_meant: Selection, *, after: bool = False) -> Stop:
        """Keep requests, or their answers, until the result is opened."""
        stop = Stop()
        self.rules.append(Rule("", None, 1_000_000, after=after, is_meant=is_meant, stop=stop))
        return stop

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator["Gateway"]:
        """Listen on loopback for the length of the block."""
        async with ClientSession(auto_decompress=False) as self._session:
            application = web.Application(client_max_size=1024 * 1024)
            application.router.add_route("*", "/{tail:.*}", self._handle)
            runner = web.AppRunner(application)
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                port = runner.addresses[0][1]
                self.url = f"http://127.0.0.1:{port}{self._target.path}"
                yield self
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        self.requests.append(request.method)
        body = await request.read()
        rule = next((rule for rule in self.rules if rule.concerns(request, body)), None)
        if rule is None:
            return await self._forward(request)
        rule.times -= 1
        if rule.stop is not None and not rule.after:
            await rule.stop.wait()
        answer = await self._forward(request) if rule.after or rule.status is None else _refusal(rule)
        if rule.stop is not None and rule.after:
            await rule.stop.wait()
        if rule.status == LOST and request.transport is not None:
            request.transport.abort()
            return answer
        return answer if rule.status is None else _refusal(rule)

    async def _forward(self, request: web.Request) -> web.Response:
        url = URL(str(self._target.origin()) + request.raw_path, encoded=True)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with self._session.request(
            request.method, url, data=await request.read(), headers=headers, skip_auto_headers=("content-type",)
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() in _PASSED_ON or k.lower().startswith("x-ms")}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())


@asynccontextmanager
async def slow_way(
    place: TablePlace, mode: TransactionMode = TransactionMode.RECEIVE_ONLY
) -> AsyncGenerator[tuple[Gateway, AzureTableStore]]:
    """Yield a gateway to the table, and a store that goes through it."""
    settings = dict(part.split("=", 1) for part in place.connection.strip(";").split(";"))
    endpoint = settings["TableEndpoint"]
    async with Gateway(endpoint).listening() as gateway:
        store = await place.open(mode, place.connection.replace(endpoint, gateway.url))
        await store.setup()
        yield gateway, store
        await store.close()


def _refusal(rule: Rule) -> web.Response:
    assert rule.status
    code = rule.headers.get("x-ms-error-code", "")
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>As a test wants it.</Message></Error>"
    return web.Response(status=rule.status, headers=rule.headers, text=body, content_type="application/xml")
