"""An exchange through which programs without Postdate delay messages: where it can be, and how it may be called."""

import pytest

from postdate import DelayedDelivery, DelayExchange, Endpoint, MemoryStore, MemoryTransport
from postdate.errors import ConfigurationError


def test_queues_without_exchanges_refuse_it_at_once() -> None:
    delayed = DelayedDelivery(MemoryStore(), delay_exchange=DelayExchange())
    with pytest.raises(ConfigurationError, match="MemoryTransport has no exchanges"):
        Endpoint("sales", transport=MemoryTransport(), delayed_delivery=delayed)


@pytest.mark.parametrize("name", ["", " ", "amq.topic", "x" * 151])
def test_names_that_no_exchange_can_have_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="the name of an exchange"):
        DelayExchange(name)


def test_another_type_is_declared_by_oneself() -> None:
    with pytest.raises(ConfigurationError, match=r"declare the exchange 'postdate\.due' yourself"):
        DelayExchange(due_type="x-consistent-hash")
