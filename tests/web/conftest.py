"""The page as a browser has it, without a server between: requests go to the application in this process."""

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from postdate import DelayedMessage, Envelope, Headers, LocalTransport, SqliteStore, SystemClock, TransactionMode
from postdate.config import Settings, load_settings
from postdate.web import dashboard
from postdate.web.views import SECURITY_HEADERS

MINUTE = timedelta(minutes=1)


@dataclass
class Page(HTMLParser):
    """What a page says: its words, and each element with its attributes."""

    answer: httpx.Response
    words: str = ""
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        HTMLParser.__init__(self)
        self.feed(self.answer.text)
        self.words = re.sub(r"\s+", " ", self.words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in {"a", "code", "span", "strong"}:  # which are within a line
            self.words += " "

    handle_startendtag = handle_starttag

    def handle_data(self, data: str) -> None:
        self.words += data

    @property
    def status(self) -> int:
        return self.answer.status_code

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements of a kind."""
        return [given for name, given in self.elements if name == tag]

    def links(self, prefix: str) -> list[str]:
        return [href for each in self.all("a") if (href := each.get("href") or "").startswith(prefix)]


class Browser:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def __call__(self, path: str, **headers: str) -> Page:
        page = Page(await self.client.get(path, headers=headers))
        assert {name: page.answer.headers.get(name) for name in SECURITY_HEADERS} == SECURITY_HEADERS
        return page


@asynccontextmanager
async def browsing(app: Starlette, base: str = "http://localhost") -> AsyncGenerator[Browser]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("192.0.2.7", 1234))
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url=base) as client:
        yield Browser(client)


async def news_of(app: Starlette, count: int) -> list[bytes]:
    """Return the first news of a stream, which has no end."""
    told = list[bytes]()
    scope = {"type": "http", "method": "GET", "path": "/events", "headers": [(b"host", b"localhost")]}
    scope |= {"query_string": b"", "http_version": "1.1", "asgi": {"spec_version": "2.4"}, "client": ("::1", 1)}

    class Enough(Exception):
        pass

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            assert headers[b"content-type"].startswith(b"text/event-stream")
            assert headers[b"cache-control"] == b"no-store"
        elif told.append(message["body"]) or len(told) == count:
            raise Enough

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async with app.router.lifespan_context(app):
        with pytest.raises(Enough):
            await app(scope, receive, send)
    return told


def settings_of(address: str, **options: str) -> Settings:
    return load_settings(None, {}, {"store.address": address, **options})


def app_of(address: str, **options: str) -> Starlette:
    return dashboard(settings_of(address, **options))


class Deployment:
    """Store and queues in one file, and what a test puts there."""

    def __init__(self, path: Path) -> None:
        self.path, self.address = path, f"sqlite:///{path}"
        self.now = SystemClock().now()

    async def create(self) -> None:
        store, transport = SqliteStore(self.path), LocalTransport(self.path)
        await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
        await store.setup()
        await transport.create_queues(["orders", "bills", "error", "postdate.timeouts"])
        await store.close()
        await transport.close()

    async def store(self, *messages: DelayedMessage) -> None:
        store = SqliteStore(self.path)
        await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
        await store.store_many(messages, self.now)
        await store.close()

    async def send(self, *envelopes: Envelope) -> None:
        transport = LocalTransport(self.path)
        assert await transport.send(envelopes, self.now) == [None] * len(envelopes)
        await transport.close()

    def waiting(self, id_: str, minutes: float, destination: str = "orders", body: bytes = b"secret") -> DelayedMessage:
        return DelayedMessage(id_, self.now + minutes * MINUTE, destination, {"own": "header"}, body)

    def failed(self, id_: str, exception: str, reason: str, queue: str = "orders") -> Envelope:
        headers = {
            Headers.MESSAGE_ID: id_,
            Headers.FAILED_QUEUE: queue,
            Headers.EXCEPTION_TYPE: exception,
            Headers.EXCEPTION_MESSAGE: reason,
            Headers.EXCEPTION_STACK_TRACE: f"Traceback of {id_}",
        }
        return Envelope("error", id_, headers, b"secret")


@pytest.fixture
async def deployment(tmp_path: Path) -> Deployment:
    found = Deployment(tmp_path / "postdate.db")
    await found.create()
    return found


Visit = Callable[[], AbstractAsyncContextManager[Browser]]


@pytest.fixture
def visit(deployment: Deployment) -> Visit:
    """Open the page of the deployment for the length of a block."""
    return lambda: browsing(app_of(deployment.address))
