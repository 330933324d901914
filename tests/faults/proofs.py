"""Which tests of ``make test`` prove, kind of fault by kind of fault, what the lab proves on whole deployments."""

from collections.abc import Mapping
from typing import Final


def _in_short(title: str, deployment: str) -> str:
    return f"tests/faults/test_faults.py::test_in_short[{title}: {deployment}]"


_LAB_CUT: Final = _in_short("Link to the store cut", "one PostgreSQL schema")
_LAB_TERMINATED: Final = _in_short("pg_terminate_backend", "one PostgreSQL schema")
_UNIT, _PLACES = "tests/unit", "tests/integration"
_BROKER_AWAY: Final = (
    f"{_UNIT}/test_outages.py::test_while_the_broker_is_away_for_a_minute_nothing_is_recorded_and_little_is_claimed",
    f"{_PLACES}/test_rabbitmq.py::test_a_send_over_a_cut_connection_is_answered_and_a_later_one_arrives",
)
_BROKER_SILENT: Final = (
    f"{_PLACES}/test_rabbitmq.py::test_a_broker_that_falls_silent_is_answered_for",
    f"{_PLACES}/test_rabbitmq.py::test_a_receiver_notices_a_silent_broker_by_its_heartbeats",
    f"{_UNIT}/test_outages.py::test_no_answer_from_a_transport_that_pipelines_counts_against_nothing",
)
_STORE_SILENT: Final = (
    f"{_UNIT}/test_silence.py::test_a_look_that_is_never_answered_is_an_outage_and_what_it_claims_at_last_goes_back",
    f"{_PLACES}/test_locking_silence.py::test_every_call_ends_where_the_network_swallows_what_is_said",
    f"{_PLACES}/test_postgres_silence.py::test_what_was_claimed_on_a_forgotten_connection_is_free_again",
)
_NO_SERVER_CONNECTION: Final = (
    _LAB_CUT,
    f"{_PLACES}/test_locking_stores.py::test_connections_that_died_while_idle_are_replaced",
    f"{_PLACES}/azure/test_idle_connections.py::test_a_table_and_its_lease_go_on_as_if_nothing_had_been",
)
_LOCKED_TABLE: Final = (
    f"{_PLACES}/test_postgres_silence.py::test_a_locked_table_ends_no_call_later_than_the_silence_it_may_keep",
    f"{_PLACES}/test_postgres_silence.py::test_a_locked_table_does_not_cost_a_process_what_it_holds",
    f"{_PLACES}/test_locking_silence.py::test_a_table_that_somebody_has_locked_is_not_waited_for_for_ever",
)
_ROLE_LIMITS: Final = f"{_PLACES}/test_postgres_silence.py::test_limits_of_the_role_are_no_failure_of_a_message"
_MISSING_RIGHT: Final = (
    f"{_PLACES}/test_postgres_silence.py::test_a_right_that_is_taken_away_holds_up_delivery_and_costs_no_message",
    f"{_UNIT}/test_sent_once.py::test_while_removing_fails_for_ten_minutes_each_is_sent_once",
)
_CLOCKS_SET: Final = (
    f"{_UNIT}/test_store_clock.py::test_setting_the_machine_s_clock_changes_nothing_and_making_nothing_early",
    f"{_UNIT}/test_poller.py::test_a_clock_set_back_makes_nothing_early_and_does_not_make_it_spin",
    f"{_UNIT}/test_poller.py::test_a_clock_set_forward_makes_it_at_most_a_minute_late",
)

PROVEN_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "SIGKILL of the service": (
        _in_short("SIGKILL of the service", "one SQLite file"),
        "tests/property/test_delivery_under_faults.py::test_dying_at_every_single_call_loses_nothing",
        f"{_PLACES}/test_postgres_kills.py::test_what_a_killed_process_had_locked_is_delivered_by_another_row_25",
        f"{_PLACES}/test_locking_stores.py::test_what_a_killed_process_held_is_free_again",
        (
            f"{_PLACES}/azure/test_lease.py"
            "::test_row_79_the_lease_of_a_process_that_died_goes_with_what_it_had_in_hand_to_who_waits"
        ),
    ),
    "SIGSTOP of one of two services": (
        (
            f"{_PLACES}/test_frozen_processes.py"
            "::test_what_a_frozen_process_holds_is_taken_over_and_what_it_does_on_waking_has_no_effect"
        ),
        (
            f"{_PLACES}/test_postgres_frozen.py"
            "::test_what_a_frozen_process_holds_is_free_after_a_while_and_it_does_no_harm_when_it_wakes"
        ),
        f"{_PLACES}/test_locking_silence.py::test_a_frozen_process_loses_what_it_holds_and_can_do_nothing_to_it",
        f"{_PLACES}/azure/test_lease.py::test_a_claim_is_void_as_soon_as_its_lease_is_over_by_our_own_clock",
    ),
    "SIGSTOP of the store's server": _STORE_SILENT,
    "SIGKILL of the store's server": (*_NO_SERVER_CONNECTION, _LAB_TERMINATED),
    "SIGSTOP of the broker": _BROKER_SILENT,
    "Restart of the broker": (
        *_BROKER_AWAY,
        f"{_PLACES}/test_rabbitmq.py::test_queues_are_declared_durable",
        f"{_PLACES}/test_rabbitmq_expiry.py::test_another_client_sees_the_time_to_live_row_59",
    ),
    "Broker away with 3,000 due": _BROKER_AWAY,
    "Broker away": _BROKER_AWAY,
    "Link to the store cut": _NO_SERVER_CONNECTION,
    "Link to the store silent": _STORE_SILENT,
    "Answers of the store lost": (
        f"{_PLACES}/test_postgres_doubt.py::test_the_rest_of_a_batch_whose_commit_is_in_doubt_can_be_given_back",
        f"{_PLACES}/test_locking_doubt.py::test_the_rest_of_a_batch_can_be_finished_though_the_answer_was_lost",
        "tests/property/test_row_lock_claims.py::test_nothing_is_lost_and_nothing_done_twice_whatever_answers_are_lost",
    ),
    "Half-open connections to the store": (
        f"{_PLACES}/test_postgres_silence.py::test_delivery_goes_on_when_all_connections_are_forgotten",
        f"{_PLACES}/test_locking_silence.py::test_every_call_ends_where_the_network_swallows_what_is_said",
    ),
    "Half-open connections to the broker": (
        (
            f"{_PLACES}/test_rabbitmq.py"
            "::test_a_receiver_on_a_connection_that_was_forgotten_on_the_way_notices_and_connects_anew"
        ),
        f"{_PLACES}/test_rabbitmq.py::test_a_broker_that_falls_silent_is_answered_for",
    ),
    "Link to the broker silent": _BROKER_SILENT,
    "Slow link to the store": (f"{_PLACES}/test_postgres_silence.py::test_a_slow_link_costs_nothing_but_time",),
    "pg_terminate_backend": (_LAB_TERMINATED,),
    "Two services, ten minutes ahead and behind": (
        (
            f"{_PLACES}/test_postgres_wakeups.py"
            "::test_two_services_whose_clocks_disagree_by_minutes_lose_and_double_nothing"
        ),
        f"{_UNIT}/test_store_clock.py::test_an_endpoint_delays_and_judges_by_the_store_s_clock",
        *_CLOCKS_SET,
    ),
    "A fast clock is set right": (
        f"{_UNIT}/test_poller.py::test_a_clock_set_back_after_a_delivery_does_not_lengthen_the_pause",
    ),
    "A message is due at the end of the year 9999": (
        f"{_UNIT}/test_poller.py::test_what_is_due_at_the_end_of_the_calendar_is_never_due_and_ends_nothing",
        (
            f"{_PLACES}/azure/test_table_store.py"
            "::test_what_others_have_due_in_the_last_second_of_the_calendar_waits_for_ever"
        ),
    ),
    "A clock is set ahead and back": _CLOCKS_SET,
    "Broker low on memory": (
        f"{_PLACES}/test_rabbitmq_protocol.py::test_a_broker_that_blocks_publishers_is_waited_for_in_vain",
        f"{_UNIT}/test_outages.py::test_no_answer_from_a_transport_that_pipelines_counts_against_nothing",
    ),
    "Full queue": (
        f"{_PLACES}/test_rabbitmq_outages.py::test_a_full_queue_moves_nothing_to_the_error_queue",
        f"{_UNIT}/test_outages.py::test_a_full_queue_holds_up_only_what_is_meant_for_it",
    ),
    "Disk full": (
        f"{_PLACES}/test_trouble.py::test_an_endpoint_on_a_full_disk_goes_on_when_there_is_room_again",
        f"{_PLACES}/test_trouble.py::test_a_full_disk_refuses_clearly_loses_nothing_and_works_again_with_room",
    ),
    "DELETE revoked on the waiting messages": _MISSING_RIGHT,
    "INSERT revoked on the records": _MISSING_RIGHT,
    "Records locked, no time limit": _LOCKED_TABLE,
    "Records locked, lock_timeout = '500ms'": (_ROLE_LIMITS,),
    "Records locked, statement_timeout = '2s'": (_ROLE_LIMITS,),
    "Waiting messages locked": _LOCKED_TABLE,
    "File locked by a writer": (
        f"{_PLACES}/test_trouble.py::test_a_database_locked_for_long_is_unavailable_and_then_works_again",
        f"{_PLACES}/test_replaced_files.py::test_whoever_waits_for_a_locked_file_is_told_and_closing_does_not_wait",
    ),
    "Destination and error queue missing": (
        f"{_UNIT}/test_outages.py::test_what_neither_queue_nor_error_queue_can_take_stays_and_waits_longer_each_time",
        f"{_UNIT}/test_dispatcher.py::test_a_missing_destination_goes_to_the_error_queue_after_one_attempt_row_38",
    ),
    "One row whose headers are damaged": (
        _in_short("One row whose headers are damaged", "two SQLite files"),
        f"{_PLACES}/test_unreadable_rows.py::test_whatever_is_damaged_in_a_waiting_row_the_others_are_claimed",
        f"{_PLACES}/test_postgres_damage.py::test_a_damaged_row_holds_up_neither_a_move_nor_who_receives",
    ),
    "One row with a due time outside the calendar": (
        f"{_PLACES}/test_unreadable_rows.py::test_whatever_is_damaged_in_a_waiting_row_the_others_are_claimed",
        f"{_PLACES}/test_unreadable_rows.py::test_whatever_is_damaged_in_a_queue_the_others_are_received",
    ),
    "File replaced": (
        f"{_PLACES}/test_replaced_files.py::test_whoever_had_a_replaced_file_open_stops_and_each_file_has_what_was_committed_to_it",
    ),
    "File torn": (f"{_PLACES}/test_replaced_files.py::test_a_damaged_file_is_told_when_it_is_opened",),
}
"""By the title of a case."""
