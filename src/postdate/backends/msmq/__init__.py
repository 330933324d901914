"""MSMQ, through its COM objects. See docs/msmq.md."""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.settings import LimitedMessages

BACKEND: Final = Backend(
    product="MSMQ",
    place=Place.MACHINE,
    addresses=Addresses(("msmq",), "msmq:"),
    extra="msmq",
    awaits="its first production server",
    transport=Adapter(
        "postdate.backends.msmq.transport:MsmqTransport",
        LimitedMessages,
        arguments=frozenset(
            {
                "transactional",
                "disable_native_time_to_be_received_in_transactions",
                "use_dead_letter_queue",
                "use_dead_letter_queue_for_messages_with_time_to_be_received",
                "use_journal_queue",
            }
        ),
    ),
)
