"""What a destination means in MSMQ, and which ones mean nothing."""

import pytest

from postdate.backends.msmq.address import QueueAddress, parse_address, parse_machine, receiving_address
from postdate.errors import ConfigurationError, QueueNotFound


@pytest.mark.parametrize(
    ("destination", "format_name", "shown"),
    [
        ("orders", r"DIRECT=OS:.\private$\orders", "orders@HERE1"),
        ("orders@SALES1", r"DIRECT=OS:SALES1\private$\orders", "orders@SALES1"),
        ("orders@sales.example.org", r"DIRECT=OS:sales.example.org\private$\orders", "orders@sales.example.org"),
        ("orders@10.0.0.7", r"DIRECT=TCP:10.0.0.7\private$\orders", "orders@10.0.0.7"),
        ("orders@.", r"DIRECT=OS:.\private$\orders", "orders@HERE1"),
        ("orders@LocalHost", r"DIRECT=OS:.\private$\orders", "orders@HERE1"),
        ("Sales.Orders.timeouts", r"DIRECT=OS:.\private$\Sales.Orders.timeouts", "Sales.Orders.timeouts@HERE1"),
        ("Bestellungen für Köln", r"DIRECT=OS:.\private$\Bestellungen für Köln", "Bestellungen für Köln@HERE1"),
    ],
)
def test_an_address_is_a_private_queue_here_or_on_another_machine(destination, format_name, shown):
    address = parse_address(destination)
    assert address.format_name == format_name
    assert address.path_name == format_name.partition(":")[2]
    assert address.text("HERE1") == shown


@pytest.mark.parametrize(
    ("destination", "said"),
    [
        ("a@b@c", "write queue or queue@machine"),
        ("@SALES1", "write queue or queue@machine"),
        ("orders@", "write queue or queue@machine"),
        (" @SALES1", "write queue or queue@machine"),
        ("orders@two words", "'two words' is neither the name of a machine nor an IPv4 address"),
        ("orders@-a", "'-a' is neither"),
        ("orders@fe80::1", "'fe80::1' is neither"),
        (r"private$\orders", r"must not contain '\\\\'"),
        ("a;b", "must not contain ';'"),
        ("a+b", r"must not contain '\+'"),
        ("a,b", "must not contain ','"),
        ('a"b', r"""must not contain '"'"""),
        ("a\nb", r"must not contain '\\n'"),
        ("x" * 125, "the name has 125 characters; MSMQ allows 124"),
        ("🕰" * 63, "the name has 126 characters"),
    ],
)
def test_what_can_be_no_queue_is_not_found_and_says_why(destination, said):
    with pytest.raises(QueueNotFound, match=said):
        parse_address(destination)


def test_the_longest_name_is_allowed():
    assert parse_address("x" * 124).name == "x" * 124


def test_a_queue_without_a_machine_is_on_that_of_the_transport():
    assert parse_address("orders", "SALES1") == QueueAddress("orders", "SALES1")
    assert parse_address("orders@STOCK", "SALES1") == QueueAddress("orders", "STOCK")
    assert parse_address("orders@.", "SALES1") == QueueAddress("orders")


@pytest.mark.parametrize(
    ("place", "machine"),
    [("msmq:", "."), ("MSMQ:", "."), ("msmq://", "."), ("msmq://SALES1", "SALES1"), ("msmq://10.0.0.7/", "10.0.0.7")],
)
def test_the_address_of_a_transport_names_a_machine_or_none(place, machine):
    assert parse_machine(place) == machine


@pytest.mark.parametrize("place", ["msmq:SALES1", "msmq://a b", "msmq://a/b", "amqp://a", "msmq", ""])
def test_other_addresses_of_a_transport_are_refused(place):
    with pytest.raises(ConfigurationError, match="write msmq: for this machine, or msmq://machine"):
        parse_machine(place)


def test_format_names_of_queues_to_receive_from_have_at_most_150_characters():
    rest = len(r"DIRECT=OS:HERE1\private$" + "\\")
    assert receiving_address("x" * 124, ".", "HERE1").name == "x" * 124
    longest = "M" * (150 - rest - 124 + len("HERE1"))
    assert receiving_address("x" * 124, ".", longest).machine == "."
    with pytest.raises(QueueNotFound, match="its format name would have 151 characters"):
        receiving_address("x" * 124, ".", f"{longest}M")
    with pytest.raises(QueueNotFound, match="its format name would have 151 characters"):
        receiving_address(f"{'x' * 124}@{longest}M", ".", "HERE1")
