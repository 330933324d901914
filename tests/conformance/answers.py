"""What every backend answers to the same questions, and what puts each answer to the test: the table of the documents.

A cell names a check of the conformance suites, as ``topic.name``, or a test of ours, as ``place.py::name``. Where
backends answer differently, the cell says what the reason is: what has none is a fault.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

QUESTIONS: Mapping[str, str] = {
    "beats": "who beats",
    "counts": "who counts",
    "outage": "what is an outage",
    "unreadable": "what is marked as unreadable",
    "full": "what a full server means",
    "wakes": "who wakes",
}


@dataclass(frozen=True)
class Answer:
    """One cell.

    Args:
        text: the answer, in a few words.
        proofs: checks and tests that would fail if it were another.
    """

    text: str
    proofs: Sequence[str]


_DIES = "claims.claims_end_with_their_process"
_STORED_COUNT = "claims.failures_add_up"
_QUEUED_COUNT = "receiving.a_message_rolled_back_is_received_again"
_COUNTS = (_STORED_COUNT, _QUEUED_COUNT)
_UNREADABLE = "unreadable.an_unreadable_message_holds_up_nothing"
_EARLIER, _ELSEWHERE = "claims.what_is_due_earlier_wakes", "claims.other_processes_are_woken"
_DURING_A_LOOK = "claims.what_is_stored_during_a_look_is_not_slept_over"
_WAKES = (_EARLIER, _DURING_A_LOOK, _ELSEWHERE)
_NO_QUEUE = "unreadable.what_no_queue_takes_is_marked"
_REFUSALS = "storing.what_a_store_says_of_itself_blames_no_message"
_QUEUES_WAKE = "capabilities.other_processes_are_woken"
_PUSHED = "receiving.receiving_waits_for_a_message"
_IN = "integration"

ANSWERS: Mapping[str, Mapping[str, Answer]] = {
    "SQLite": {
        "beats": Answer(
            "the system, by a locked file, and a thread that touches it; frozen for 60 s, others take over",
            (
                _DIES,
                f"{_IN}/test_frozen_processes.py::test_a_process_that_holds_for_long_and_lives_keeps_what_it_holds",
            ),
        ),
        "counts": Answer("the row, of store and queue", _COUNTS),
        "outage": Answer(
            "whatever SQLite says of itself: locked for long, not writable, full, a failing disk",
            (
                _REFUSALS,
                f"{_IN}/test_trouble.py::test_a_database_locked_for_long_is_unavailable_and_then_works_again",
                f"{_IN}/test_trouble.py::test_what_may_not_be_written_is_refused_clearly_and_works_again_after_mending",
            ),
        ),
        "unreadable": Answer(
            "the row, of store and queue, with its bytes; and what no queue takes", (_UNREADABLE, _NO_QUEUE)
        ),
        "full": Answer(
            "nothing is stored, and all goes on once there is room",
            (f"{_IN}/test_trouble.py::test_an_endpoint_on_a_full_disk_goes_on_when_there_is_room_again",),
        ),
        "wakes": Answer("whoever commits, by a datagram on the loopback interface", (*_WAKES, _QUEUES_WAKE)),
    },
    "PostgreSQL": {
        "beats": Answer(
            "the server, by a connection, and the thread that listens on it; silent for 60 s, others end its sessions",
            (_DIES, f"{_IN}/test_postgres_frozen.py::test_a_process_that_lives_keeps_what_it_holds_however_long"),
        ),
        "counts": Answer("the row, of store and queue", _COUNTS),
        "outage": Answer(
            "no connection, no answer, and whatever the server says of itself, by the class of its error",
            (
                _REFUSALS,
                f"{_IN}/test_read_only.py::test_what_the_server_says_of_itself_is_told_by_its_class",
                f"{_IN}/test_postgres_silence.py::test_delivery_goes_on_when_all_connections_are_forgotten",
                f"{_IN}/test_postgres_silence.py::test_limits_of_the_role_are_no_failure_of_a_message",
            ),
        ),
        "unreadable": Answer(
            "the row, of store and queue, with its bytes; and what no queue takes", (_UNREADABLE, _NO_QUEUE)
        ),
        "full": Answer(
            "nothing is stored, and all goes on once there is room",
            ("faults/test_faults.py::test_every_promise_holds_through",),
        ),
        "wakes": Answer("the commit, by a notification", (*_WAKES, _QUEUES_WAKE)),
    },
    "MariaDB": {
        "beats": Answer(
            "the server, by a connection with a thread of its own; silent for 60 s, the server ends it",
            (_DIES, f"{_IN}/test_locking_silence.py::test_a_process_that_lives_keeps_what_it_holds"),
        ),
        "counts": Answer("the row", (_STORED_COUNT,)),
        "outage": Answer(
            "as in PostgreSQL",
            (_REFUSALS, f"{_IN}/test_locking_silence.py::test_a_frozen_server_is_an_outage"),
        ),
        "unreadable": Answer("the row, in its place; and what no queue takes", (_UNREADABLE, _NO_QUEUE)),
        "full": Answer(
            "as in SQLite, by the number of the error",
            (f"{_IN}/test_mariadb.py::test_errors_of_the_server_are_translated",),
        ),
        "wakes": Answer(
            "the thread asks ten times a second, as the server does not call; a commit of this process, at once",
            _WAKES,
        ),
    },
    "SQL Server": {
        "beats": Answer(
            "as in MariaDB; nothing ends a silent connection but others who may",
            (f"{_IN}/test_sqlserver.py::test_a_process_that_shows_no_life_is_ended_where_we_may",),
        ),
        "counts": Answer("the row", (_STORED_COUNT,)),
        "outage": Answer(
            "as in PostgreSQL, by number and severity",
            (f"{_IN}/test_sqlserver.py::test_errors_of_the_server_are_translated",),
        ),
        "unreadable": Answer("the row, in its place; and what no queue takes", (_UNREADABLE, _NO_QUEUE)),
        "full": Answer(
            "as in SQLite, by the number of the error",
            (f"{_IN}/test_sqlserver.py::test_errors_of_the_server_are_translated",),
        ),
        "wakes": Answer("as in MariaDB", _WAKES),
    },
    "RabbitMQ": {
        "beats": Answer(
            "a thread, on the connection",
            (
                f"{_IN}/test_rabbitmq.py::test_a_receiver_notices_a_silent_broker_by_its_heartbeats",
                f"{_IN}/test_rabbitmq.py::test_a_receiver_whose_event_loop_stands_keeps_what_it_holds",
            ),
        ),
        "counts": Answer(
            "the broker in a quorum queue, beside this process; in a classic one, which does not count, this process",
            (
                _QUEUED_COUNT,
                f"{_IN}/test_rabbitmq.py::test_what_another_process_gave_back_counts_as_a_failure_of_it",
                f"{_IN}/test_rabbitmq_limits.py::test_a_message_whose_handler_ends_its_process_goes_to_the_error_queue_after_its_tries",
            ),
        ),
        "outage": Answer(
            "no connection, no confirm, an alarm; a full queue, of its messages alone",
            (
                f"{_IN}/test_rabbitmq_outages.py::test_messages_wait_while_a_broker_is_frozen",
                f"{_IN}/test_rabbitmq_outages.py::test_a_memory_alarm_is_an_outage_and_its_end_is_noticed_at_once",
            ),
        ),
        "unreadable": Answer(
            "nothing: a queue keeps no place for it; what cannot be read is received, and ends in the error queue",
            (
                f"{_IN}/test_rabbitmq_protocol.py::test_a_message_that_cannot_be_read_keeps_nothing_beside_it_from_being_held",
            ),
        ),
        "full": Answer(
            "what is due waits in its store until there is room",
            (
                f"{_IN}/test_rabbitmq_outages.py::test_a_full_queue_moves_nothing_to_the_error_queue",
                f"{_IN}/test_rabbitmq_outages.py::test_messages_wait_while_a_broker_is_short_of_memory",
            ),
        ),
        "wakes": Answer("the broker, which pushes", (_PUSHED, _QUEUES_WAKE)),
    },
    "Azure Storage": {
        "beats": Answer(
            "a task of the event loop, which renews a lease of 15 s, and hides what was received anew",
            (
                _DIES,
                f"{_IN}/azure/test_lease.py::test_row_80_a_lease_is_renewed_many_times",
                f"{_IN}/azure/test_queues.py::test_what_is_held_is_hidden_anew_before_its_time_has_run_out",
            ),
        ),
        "counts": Answer(
            "the entity in the table; in a queue Azure, and the text of the message, which says how each time ended",
            (
                *_COUNTS,
                f"{_IN}/azure/test_queues.py::test_what_a_dead_process_held_is_free_when_its_time_has_run_out_and_counts_as_a_failure",
            ),
        ),
        "outage": Answer(
            "no connection, no answer, throttling, a wrong key",
            (
                f"{_IN}/azure/test_table_store.py::test_throttling_is_an_outage_and_nothing_is_lost",
                f"{_IN}/azure/test_queues.py::test_throttling_of_receivers_is_an_outage_and_their_messages_stay",
            ),
        ),
        "unreadable": Answer(
            "the entity of the table; what no queue of Azure can have read ends in the error queue",
            (
                _UNREADABLE,
                _NO_QUEUE,
                f"{_IN}/azure/test_queues.py::test_what_is_in_no_envelope_ends_in_the_error_queue_with_the_reason",
            ),
        ),
        "full": Answer(
            "as throttling: an account has room for all, and no rate for all at once",
            (
                f"{_IN}/azure/test_queues.py::test_a_throttled_account_is_left_alone_for_as_long_as_it_asks_and_nothing_is_lost",
            ),
        ),
        "wakes": Answer(
            "this process itself; others look, less often the longer nothing comes: Azure does not call",
            (*_WAKES, _QUEUES_WAKE),
        ),
    },
    "MSMQ": {
        "beats": Answer(
            "nobody: the system ends the transactions of a process that dies",
            ("unit/test_msmq.py::test_what_a_dead_process_had_in_hand_is_in_its_place_again",),
        ),
        "counts": Answer(
            "this process, as MSMQ does not",
            (_QUEUED_COUNT, "unit/test_msmq.py::test_failures_are_counted_across_receivers_of_a_transport"),
        ),
        "outage": Answer(
            "the service has stopped",
            (
                "unit/test_msmq.py::test_a_service_that_stops_is_unreachable_and_handles_are_opened_anew_when_it_is_back",
            ),
        ),
        "unreadable": Answer(
            "nothing, as in RabbitMQ",
            ("unit/test_msmq_content.py::test_what_cannot_be_read_is_a_message_all_the_same",),
        ),
        "full": Answer("what is due waits in its store", ("unit/test_msmq.py::test_no_room_passes",)),
        "wakes": Answer("the system, for which a thread waits", (_PUSHED, _QUEUES_WAKE)),
    },
    "Redis": {
        "beats": Answer(
            "a thread, which tells the server; not heard for 60 s, others take over",
            (
                _DIES,
                f"{_IN}/test_redis.py::test_who_was_frozen_loses_what_it_held_and_is_told",
                f"{_IN}/test_redis.py::test_a_process_shows_that_it_lives_while_its_event_loop_stands",
            ),
        ),
        "counts": Answer("the hash of the message, of store and queue", _COUNTS),
        "outage": Answer(
            "no connection, no answer, and whatever the server says of itself, by the word its error begins with",
            (
                f"{_IN}/test_redis.py::test_what_the_server_says_is_an_outage_or_not",
                f"{_IN}/test_redis.py::test_a_master_that_became_a_replica_is_an_outage",
            ),
        ),
        "unreadable": Answer(
            "the key, of whatever type, of store and queue, with its bytes; and what no queue takes",
            (
                _UNREADABLE,
                _NO_QUEUE,
                f"{_IN}/test_redis_foreign_keys.py::test_a_foreign_key_in_a_store_is_as_any_message_that_cannot_be_read",
            ),
        ),
        "full": Answer(
            "nothing is stored or sent; what makes room goes on",
            (
                f"{_IN}/test_redis.py::test_a_full_server_takes_nothing_and_loses_nothing",
                f"{_IN}/test_redis_full.py::test_an_endpoint_that_starts_on_a_full_server_empties_it",
            ),
        ),
        "wakes": Answer("the script that stores, by publishing", (*_WAKES, _QUEUES_WAKE)),
    },
    "memory": {
        "beats": Answer("nobody: what it holds ends with the process", ("claims.a_claimed_message_is_hidden",)),
        "counts": Answer("the entry, of store and queue", _COUNTS),
        "outage": Answer(
            "nothing", ("unit/test_outages.py::test_no_connection_is_unreachable_for_store_and_queues_alike",)
        ),
        "unreadable": Answer("nothing: it has no rows that could be damaged", (_UNREADABLE,)),
        "full": Answer("the memory of the process has an end, and then the process", ("storing.too_large_is_refused",)),
        "wakes": Answer("whoever stores or sends", (_EARLIER, _DURING_A_LOOK, _PUSHED)),
    },
}


def answers_table() -> str:
    """Return the Markdown table."""
    lines = [f"| backend | {' | '.join(QUESTIONS.values())} |", "|---|" + "---|" * len(QUESTIONS)]
    for product, cells in ANSWERS.items():
        row = [f"{cells[each].text} ({', '.join(f'`{proof}`' for proof in cells[each].proofs)})" for each in QUESTIONS]
        lines.append(f"| {product} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"
