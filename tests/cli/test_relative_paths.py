"""A relative path counts from the directory in which it was given, whatever directory is current at its first use."""

import os
from datetime import timedelta
from pathlib import Path

import pytest

import postdate
from postdate import (
    Endpoint,
    LocalTransport,
    Sqlite,
    SqliteOutbox,
    SqliteSagaStore,
    SqliteStore,
    SqliteTimeouts,
)
from postdate.config import load_settings
from postdate.wiring import absolute_address_of, with_absolute_files

HOUR = timedelta(hours=1)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the directory of the beginning, which is the working directory, and another one."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    return here, there


def files(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir() if each.is_file() and each.suffix == ".db"}


@pytest.mark.parametrize(
    "kind", [SqliteStore, LocalTransport, SqliteSagaStore, SqliteOutbox, SqliteTimeouts], ids=lambda kind: kind.__name__
)
async def test_an_adapter_opens_the_file_of_its_creation(kind, folders: tuple[Path, Path]) -> None:
    here, there = folders
    adapter = kind("x.db")
    os.chdir(there)
    if isinstance(adapter, SqliteTimeouts):
        await adapter.initialize("e")
    await (adapter.create_queues(["q"]) if isinstance(adapter, LocalTransport) else adapter.setup())
    await adapter.close()
    assert (files(here), files(there)) == ({"x.db"}, set())


async def test_a_database_object_opens_the_file_of_its_creation(folders: tuple[Path, Path]) -> None:
    here, there = folders
    async with Sqlite("x.db") as database:
        os.chdir(there)
        async with Endpoint("e", database):
            pass
    assert (files(here), files(there)) == ({"x.db"}, set())


async def test_a_client_opens_the_file_of_its_creation_each_time(folders: tuple[Path, Path]) -> None:
    here, there = folders
    client = postdate.connect("sqlite:///x.db")
    os.chdir(there)
    message_id = await client.send(b"", destination="q", delay=HOUR)
    await client.close()
    os.chdir(there.parent)
    assert await client.get(message_id) is not None
    assert (await client.explain(message_id)).state.value == "waiting"
    await client.close()
    assert (files(here), files(there), files(there.parent)) == ({"x.db"}, set(), set())


async def test_a_client_opens_the_file_that_the_settings_named_when_it_was_created(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = folders
    monkeypatch.setenv("POSTDATE_STORE__ADDRESS", "sqlite:///x.db")
    async with postdate.connect() as client:
        os.chdir(there)
        await client.send(b"", destination="q", delay=HOUR)
    assert (files(here), files(there)) == ({"x.db"}, set())


async def test_a_function_names_the_file_at_its_first_call(folders: tuple[Path, Path]) -> None:
    here, there = folders
    async with postdate.connect(lambda: "sqlite:///x.db") as client:
        message_id = await client.send(b"", destination="q", delay=HOUR)
        os.chdir(there)
        assert await client.get(message_id) is not None
    assert (files(here), files(there)) == ({"x.db"}, set())


def test_only_paths_of_files_are_made_absolute(folders: tuple[Path, Path]) -> None:
    here, _ = folders
    assert absolute_address_of("sqlite:///x.db") == f"sqlite:///{here}/x.db"
    for address in ("sqlite:////x.db", "postgresql:///shop", "memory:", "sqlite:///:memory:", "amqp://h/v", ""):
        assert absolute_address_of(address) == address
    settings = with_absolute_files(load_settings(None, {}, {"store.address": "sqlite:///x.db"}))
    assert settings.transport.address == f"local:///{here}/x.db"
    assert settings.origin("store.address") == "option --store"
