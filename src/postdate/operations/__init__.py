"""The actions of operators, in one place for the command line and the web.

Every function takes an :class:`postdate.wiring.OpenDeployment` and ``now``. It returns a plain dataclass that can be
written as JSON without conversion: times in UTC, names instead of numbers, no secrets.
"""

from postdate.operations.doctor import Diagnosis as Diagnosis, Probe as Probe, Verdict as Verdict, diagnose as diagnose
from postdate.operations.error_edits import Edit as Edit, edit as edit
from postdate.operations.error_queue import (
    ErrorDetails as ErrorDetails,
    ErrorFilter as ErrorFilter,
    ErrorGroups as ErrorGroups,
    ErrorLine as ErrorLine,
    ErrorList as ErrorList,
    group_errors as group_errors,
    list_errors as list_errors,
    show_error as show_error,
)
from postdate.operations.error_returns import (
    ReturnResult as ReturnResult,
    Treatment as Treatment,
    return_all as return_all,
    return_messages as return_messages,
)
from postdate.operations.explanation import Explanation as Explanation, MessageState as MessageState, explain as explain
from postdate.operations.messages import (
    Change as Change,
    ChangeCounts as ChangeCounts,
    MessageDetails as MessageDetails,
    MessageLine as MessageLine,
    MessageList as MessageList,
    MessageLocation as MessageLocation,
    Statistics as Statistics,
    cancel as cancel,
    cancel_all as cancel_all,
    change_each as change_each,
    list_messages as list_messages,
    record_counts as record_counts,
    reschedule as reschedule,
    reschedule_all as reschedule_all,
    show_message as show_message,
    statistics as statistics,
)
from postdate.operations.needs import (
    check_readable as check_readable,
    check_setup as check_setup,
    read_present as read_present,
)
from postdate.operations.outgoing import (
    SendReport as SendReport,
    SetupResult as SetupResult,
    send as send,
    set_up as set_up,
)
from postdate.operations.sagas import KnownSaga as KnownSaga, list_sagas as list_sagas, show_saga as show_saga
from postdate.operations.state import (
    Interval as Interval,
    RecentLateness as RecentLateness,
    Overview as Overview,
    overview as overview,
)
from postdate.operations.unreadable import (
    DiscardResult as DiscardResult,
    UnreadableLine as UnreadableLine,
    UnreadableDetails as UnreadableDetails,
    UnreadableList as UnreadableList,
    count_unreadable as count_unreadable,
    discard_unreadable as discard_unreadable,
    list_unreadable as list_unreadable,
    show_unreadable as show_unreadable,
)
