"""The settings of Azure Storage and of where failures go: read, checked, handed on."""

from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

from postdate.backends.azure.pages import Polling
from postdate.backends.azure.store import AzureTableStore
from postdate.backends.azure.transport import AzureStorageQueueTransport
from postdate.config import load_settings
from postdate.errors import ConfigurationError
from postdate.ports import TransportCapabilities
from postdate.wiring import open_store, open_transport, own_queues, store_settings, transport_settings


def test_where_failures_go_comes_from_the_file_and_its_queues_are_the_endpoints_own(own_folder: Path) -> None:
    (own_folder / "postdate.toml").write_text(
        '[endpoint]\nname = "billing"\n'
        '[delayed_delivery]\npoison_queue = "poison"\nerrors_return_to = "destination"\ndrain_timeout_manager = true\n'
    )
    settings = load_settings(None, {})
    chosen = settings.delayed_delivery
    assert (chosen.poison_queue, chosen.errors_return_to, chosen.drain_timeout_manager) == (
        "poison",
        "destination",
        True,
    )
    can = TransportCapabilities(durable=True, transaction_modes=frozenset())
    assert own_queues(settings, can) == [
        "billing.timeouts",
        "poison",
        "billing.timeoutsdispatcher",
    ]


@pytest.mark.parametrize(("text", "meant"), [("true", True), ("False", False)])
def test_yes_and_no_come_from_the_environment_too(text: str, meant: bool) -> None:
    settings = load_settings(None, {"POSTDATE_DELAYED_DELIVERY__DRAIN_TIMEOUT_MANAGER": text})
    assert settings.delayed_delivery.drain_timeout_manager is meant


def test_the_defaults_are_those_of_the_adapters() -> None:
    chosen = load_settings(None, {})
    of_transport = signature(AzureStorageQueueTransport).parameters
    for name in ("sanitizer", "concurrent_sends", "hold_for", "peek_interval", "longest_idle_wait"):
        assert getattr(chosen.transport, name) == of_transport[name].default, name
    for each in fields(Polling):
        assert getattr(chosen.store, each.name) == each.default, each.name


def test_what_is_set_reaches_the_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCOUNT", "UseDevelopmentStorage=true")
    settings = load_settings(
        None,
        {
            "POSTDATE_STORE__ADDRESS": "azure-table://?connection=env:ACCOUNT",
            "POSTDATE_STORE__TABLE": "Billing",
            "POSTDATE_STORE__PAGE_SIZE": "20",
            "POSTDATE_TRANSPORT__ADDRESS": "azure-queues://?connection=env:ACCOUNT",
            "POSTDATE_TRANSPORT__SANITIZER": "legacy",
        },
    )
    store = open_store(settings.store.address, **store_settings(settings))
    transport = open_transport(settings.transport.address, **transport_settings(settings))
    assert isinstance(store, AzureTableStore)
    assert isinstance(transport, AzureStorageQueueTransport)
    assert (store.table_name, store.polling) == ("billing", Polling(page_size=20))
    assert "'a-b-c'" in transport.service.describe_queue("A..b_c")


def test_what_only_azure_has_is_refused_elsewhere() -> None:
    settings = load_settings(None, {"POSTDATE_STORE__PAGE_SIZE": "4"})
    with pytest.raises(ConfigurationError, match=r"store\.page_size \(environment .*\) is not for SQLite"):
        store_settings(settings)
