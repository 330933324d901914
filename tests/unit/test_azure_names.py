"""Names of the queues that an endpoint has beside its own, and what is said of names that cannot be."""

import pytest

from postdate.backends.azure.queues import SANITIZERS, queue_name
from postdate.endpoint.delayed_delivery import timeouts_dispatcher_queue, timeouts_queue
from postdate.errors import ConfigurationError


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_endpoints_own_queues_are_called_as_upstream_calls_them_under_every_choice(sanitizer: str) -> None:
    chosen = SANITIZERS[sanitizer]
    assert queue_name(timeouts_queue("Sales"), chosen) == "sales-timeouts"
    assert queue_name(timeouts_dispatcher_queue("Sales"), chosen) == "sales-timeoutsdispatcher"


@pytest.mark.parametrize("name", ["sales.orders", "sales.timeouts.old", "sales.eu.timeouts", "sales.Timeouts2"])
def test_strict_leaves_the_dots_of_others_alone(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be the name of a queue"):
        queue_name(name, SANITIZERS["strict"])


@pytest.mark.parametrize(
    ("name", "mending"),
    [
        ("Sales.Orders", "choose another, or sanitizer='dashes', which changes it to 'sales-orders'"),
        ("Sales_Orders", "choose another, or sanitizer='legacy', which changes it to 'sales-orders'"),
        ("-", "choose another"),
    ],
)
def test_what_is_refused_says_how_to_mend_it(name: str, mending: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        queue_name(name, SANITIZERS["strict"])
    assert str(caught.value).endswith(f"; {mending}")


def test_a_sanitizer_of_ones_own_that_leaves_the_dot_is_answered_with_one_that_does_not() -> None:
    with pytest.raises(ConfigurationError, match=r"'sales\.timeouts' cannot be .* sanitizer='dashes'"):
        queue_name(timeouts_queue("sales"), lambda name: name)
