"""Messages, their headers, and their formats in stores and queues.

All are pure values: nothing here does I/O. Only :func:`new_message_id` reads the machine's time, for the order of ids
in an index. Header names and formats are those of NServiceBus (docs/specification-rows.md, rows 10-14), so that
endpoints on either side of a queue understand each other.
"""

from postdate.messages.headers import (
    Headers as Headers,
    Origin as Origin,
    check_headers as check_headers,
    decode_headers as decode_headers,
    encode_headers as encode_headers,
    is_saga_timeout as is_saga_timeout,
    origin_of as origin_of,
    size_in_bytes as size_in_bytes,
)
from postdate.messages.message import (
    DESTINATION_LIMIT as DESTINATION_LIMIT,
    DelayedMessage as DelayedMessage,
    Envelope as Envelope,
    INTENTS as INTENTS,
    MARKERS as MARKERS,
    MESSAGE_ID_LIMIT as MESSAGE_ID_LIMIT,
    OF_THE_STORE as OF_THE_STORE,
    OWN_PREFIX as OWN_PREFIX,
    check_destination as check_destination,
    check_id as check_id,
    check_reschedule as check_reschedule,
    check_text as check_text,
    new_message_id as new_message_id,
    copy_with_due as copy_with_due,
    headers_with_due as headers_with_due,
    text_with_due as text_with_due,
    encode_for_store as encode_for_store,
    too_large_error as too_large_error,
    copy_with_failures as copy_with_failures,
)
from postdate.messages.times import (
    LONGEST_TIME_TO_BE_RECEIVED as LONGEST_TIME_TO_BE_RECEIVED,
    aware_utc as aware_utc,
    format_time_span as format_time_span,
    format_timestamp as format_timestamp,
    parse_time_span as parse_time_span,
    parse_timestamp as parse_timestamp,
)
from postdate.messages.transit import (
    check_not_reserved as check_not_reserved,
    delay_headers as delay_headers,
    expires_at_of as expires_at_of,
    from_delay_headers as from_delay_headers,
    headers_with_expiry as headers_with_expiry,
    to_envelope as to_envelope,
    strip_delay_headers as strip_delay_headers,
)
