"""What an operator does, in one place for the command line and the web.

Every function takes an open :class:`postdate.wiring.Plant` and ``now``, and returns a plain dataclass that can be
written as JSON as it is: times in UTC, names instead of numbers, no secrets.
"""

from postdate.operations.doctor import Check, Diagnosis, Result, diagnose
from postdate.operations.error_queue import (
    ErrorDetails,
    ErrorLine,
    ErrorList,
    Returned,
    list_errors,
    return_all,
    return_messages,
    show_error,
)
from postdate.operations.explanation import Explanation, State, explain
from postdate.operations.messages import (
    Change,
    MessageDetails,
    MessageLine,
    MessageList,
    Place,
    Statistics,
    cancel,
    list_messages,
    reschedule,
    show_message,
    statistics,
)
from postdate.operations.outgoing import Outgoing, Sent, SetUp, send, set_up
from postdate.operations.readiness import check_set_up

__all__ = [
    "Change",
    "Check",
    "Diagnosis",
    "ErrorDetails",
    "ErrorLine",
    "ErrorList",
    "Explanation",
    "MessageDetails",
    "MessageLine",
    "MessageList",
    "Outgoing",
    "Place",
    "Result",
    "Returned",
    "Sent",
    "SetUp",
    "State",
    "Statistics",
    "cancel",
    "check_set_up",
    "diagnose",
    "explain",
    "list_errors",
    "list_messages",
    "reschedule",
    "return_all",
    "return_messages",
    "send",
    "set_up",
    "show_error",
    "show_message",
    "statistics",
]
