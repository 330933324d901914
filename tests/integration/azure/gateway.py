"""A way to Azurite that answers in its place when told to: an account that is throttled, or whose answers get lost."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import ClientSession, web
from yarl import URL

_PASSED_ON = {"content-type", "date", "etag", "server"}


@dataclass
class Rule:
    """What becomes of requests.

    Args:
        method: of the requests meant.
        status: answered.
        times: how often; then requests pass again.
        headers: of the answer.
        after: the request takes effect, and only its answer is replaced.
    """

    method: str
    status: int
    times: int
    headers: Mapping[str, str] = field(default_factory=dict)
    after: bool = False


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
        rule = next((rule for rule in self.rules if rule.method == request.method and rule.times > 0), None)
        if rule is not None:
            rule.times -= 1
            if not rule.after:
                return _refusal(rule)
        answer = await self._forward(request)
        return answer if rule is None else _refusal(rule)

    async def _forward(self, request: web.Request) -> web.Response:
        url = URL(str(self._target.origin()) + request.raw_path, encoded=True)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with self._session.request(
            request.method, url, data=await request.read(), headers=headers, skip_auto_headers=("content-type",)
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() in _PASSED_ON or k.lower().startswith("x-ms")}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())


def _refusal(rule: Rule) -> web.Response:
    code = rule.headers.get("x-ms-error-code", "")
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>As a test wants it.</Message></Error>"
    return web.Response(status=rule.status, headers=rule.headers, text=body, content_type="application/xml")
