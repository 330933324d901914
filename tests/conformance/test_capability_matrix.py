"""What each adapter can do is generated from the adapters and reviewed as a diff of docs/capabilities.md."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from postdate import LocalTransport, MemoryStore, MemoryTransport, SqliteStore
from postdate.testing import capability_matrix

DOCUMENT = Path(__file__).parents[2] / "docs" / "capabilities.md"


async def test_the_documented_matrix_is_what_the_adapters_say(tmp_path: Path) -> None:
    """To bring the document up to date, put the table that this test prints into it."""
    async with AsyncExitStack() as adapters:
        stores = {"`MemoryStore`": MemoryStore(), "`SqliteStore`": SqliteStore(tmp_path / "a.db")}
        transports = {"`MemoryTransport`": MemoryTransport(), "`LocalTransport`": LocalTransport(tmp_path / "a.db")}
        for adapter in (*stores.values(), *transports.values()):
            adapters.push_async_callback(adapter.close)
        matrix = capability_matrix(stores, transports)
    if matrix not in DOCUMENT.read_text(encoding="utf-8"):
        pytest.fail(f"{DOCUMENT.name} must contain\n\n{matrix}", pytrace=False)
