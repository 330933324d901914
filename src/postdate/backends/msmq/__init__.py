"""Queues of MSMQ on Windows, through its COM objects. Source: docs/msmq.md.

Differences from the other backends: COM objects belong to the thread that created them, so each queue has a thread.
Messages expire in their queues, and may go to the dead-letter queue. It has never been run on Windows by us: the tests
use a strict model of the COM objects.

Read first: ``transport``; then ``queues``. Only ``com`` imports pywin32.
"""

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
