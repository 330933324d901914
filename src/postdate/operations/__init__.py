"""Operators' actions, in one place for the command line and the web.

Every function takes an :class:`postdate.wiring.OpenDeployment` and ``now``, and returns a plain dataclass that can be
written as JSON as it is: times in UTC, names instead of numbers, no secrets.
"""

from postdate.operations.doctor import Diagnosis, Probe, Verdict, diagnose
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
from postdate.operations.explanation import Explanation, MessageState, explain
from postdate.operations.messages import (
    Change,
    MessageDetails,
    MessageLine,
    MessageList,
    MessageLocation,
    Statistics,
    cancel,
    list_messages,
    reschedule,
    show_message,
    statistics,
)
from postdate.operations.needs import check_readable, check_set_up, present
from postdate.operations.outgoing import SendReport, SetUp, send, set_up
from postdate.operations.set_aside import (
    Mended,
    SetAside,
    SetAsideDetails,
    SetAsideList,
    count_set_aside,
    delete_set_aside,
    list_set_aside,
    put_back,
    show_set_aside,
)

__all__ = [
    "Change",
    "Diagnosis",
    "ErrorDetails",
    "ErrorLine",
    "ErrorList",
    "Explanation",
    "Mended",
    "MessageDetails",
    "MessageLine",
    "MessageList",
    "MessageLocation",
    "MessageState",
    "Probe",
    "Returned",
    "SendReport",
    "SetAside",
    "SetAsideDetails",
    "SetAsideList",
    "SetUp",
    "Statistics",
    "Verdict",
    "cancel",
    "check_readable",
    "check_set_up",
    "count_set_aside",
    "delete_set_aside",
    "diagnose",
    "explain",
    "list_errors",
    "list_messages",
    "list_set_aside",
    "present",
    "put_back",
    "reschedule",
    "return_all",
    "return_messages",
    "send",
    "set_up",
    "show_error",
    "show_message",
    "show_set_aside",
    "statistics",
]
