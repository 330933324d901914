"""What the figures of ``python -m benchmarks`` are made of."""

import itertools
import os
import socket
import struct
import time
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from benchmarks import deployment as benchmarks_deployment
from benchmarks import system
from benchmarks.bench import Arrivals, Services
from benchmarks.churn import rates
from benchmarks.limits import due_times, moving_floor
from benchmarks.result import BenchmarkResult
from benchmarks.shared_count import SharedCount
from benchmarks.targets.amqp import Confirms

from postdate.backends.rabbitmq import wire
from postdate.cli.bench.messages import id_of

RUN = "0123456789ab"
NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)


def deployment():
    return benchmarks_deployment.Deployment(
        RUN, benchmarks_deployment.Opening("memory:"), benchmarks_deployment.Opening("memory:")
    )


# --- messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 0xFFFF, 0x1_0000, 5_000_000, (1 << 48) - 1])
def test_an_id_says_its_number(number):
    assert benchmarks_deployment.number_of(id_of(number, RUN)) == number
    assert len(id_of(number, RUN)) == 36


def test_messages_made_in_bulk_are_the_same_as_messages_made_one_by_one():
    wanted = benchmarks_deployment.load(deployment(), range(7, 30), NOON, timedelta(milliseconds=3), batch=10)
    made = list(itertools.chain.from_iterable(wanted.batches()))
    assert made == [wanted.message(number) for number in range(7, 30)]
    assert [len(batch) for batch in wanted.batches()] == [10, 10, 3]


def test_parts_of_a_load_make_up_the_load():
    whole = benchmarks_deployment.load(deployment(), range(3, 104), NOON, timedelta(microseconds=333))
    made = [each for part in benchmarks_deployment.parts(whole, 2) for batch in part.batches() for each in batch]
    assert made == [whole.message(number) for number in range(3, 104)]


def test_due_times_are_those_of_the_messages():
    wanted = benchmarks_deployment.load(deployment(), range(2, 50), NOON, timedelta(seconds=1) / 7)
    assert wanted.dues() == [wanted.due(number).timestamp() for number in range(2, 50)]


def test_a_load_and_a_deployment_survive_being_written_down():
    wanted = benchmarks_deployment.load(deployment(), range(3), NOON, timedelta(seconds=1))
    assert benchmarks_deployment.from_json(benchmarks_deployment.to_json(wanted)) == wanted
    assert benchmarks_deployment.Deployment.from_json(deployment().to_json()) == deployment()


def test_a_process_names_itself_where_the_server_shows_it():
    plain = benchmarks_deployment.Opening("postgresql://host/db", name_parameter="application_name")
    assert plain.seen_as("postdate bench moving").address.endswith("/db?application_name=postdate%20bench%20moving")
    more = benchmarks_deployment.Opening("postgresql://host/db?a=b", name_parameter="application_name")
    assert more.seen_as("x").address == "postgresql://host/db?a=b&application_name=x"
    assert benchmarks_deployment.Opening("sqlite:///x").seen_as("x") == benchmarks_deployment.Opening("sqlite:///x")


# --- what arrived ------------------------------------------------------------------------------------------------


def test_each_message_once_is_nothing_lost_doubled_or_unexpected():
    arrivals = Arrivals(range(5))
    assert arrivals.add(id_of(number, RUN) for number in range(5)) == 5
    assert (arrivals.lost, arrivals.duplicated, arrivals.unexpected) == (0, 0, 0)


def test_lost_doubled_and_unexpected_messages_are_counted_apart():
    arrivals = Arrivals(range(10, 20))
    arrivals.add(id_of(number, RUN) for number in (10, 11, 11, 12, 12, 12, 13, 25, 26, 26))
    arrivals.add([])
    assert arrivals.lost == 6
    assert arrivals.duplicated == 3  # 11, 12 and the unexpected 26
    assert arrivals.unexpected == 2


def test_a_result_keeps_its_promise_only_without_any_of_them():
    assert BenchmarkResult("drain", 1, lost=0, duplicated=0, early=0).promise_kept
    for fault in ("lost", "duplicated", "early"):
        assert not replace(BenchmarkResult("drain", 1), **cast("Any", {fault: 1})).promise_kept


# --- times -------------------------------------------------------------------------------------------------------


def services(marks, started=0.0):
    nowhere = cast("Any", None)
    running = Services(nowhere, nowhere, [], [], started)
    running.found = [{"marks": each} for each in marks]
    return running


def test_lateness_is_that_of_the_batch_in_which_a_message_was_delivered():
    running = services([[(11.0, 2), (13.5, 1)]])
    assert running.lateness_of([13.0, 10.0, 10.5]) == [1.0, 0.5, 0.5]


def test_a_delivery_before_its_due_time_is_negative():
    assert services([[(9.5, 1)]]).lateness_of([10.0]) == [-0.5]


def test_the_time_of_several_services_ends_with_the_last_delivery_of_any():
    assert services([[(1.0, 5), (4.0, 5)], [(2.0, 5), (3.0, 5)]], started=0.5).seconds == 3.5


def test_rates_are_those_of_each_tenth_of_the_messages():
    marks = [(100 + tenth * tenth, 10) for tenth in range(1, 11)]
    assert rates(services([marks], started=100.0), 100) == [10 / (2 * tenth + 1) for tenth in range(10)]


def test_a_batch_may_end_several_tenths_at_once():
    found = rates(services([[(101.0, 35), (102.0, 65)]], started=100.0), 100)
    assert len(found) == 10
    assert found[0] == 10.0


def test_the_floor_counts_every_message_from_its_own_due_time():
    dues = due_times(200, 0.1)
    waiting = deque(dues)

    def move(now):
        moved = 0
        while waiting and waiting[0] < now:
            waiting.popleft()
            moved += 1
        return moved

    found = moving_floor(dues, move)
    assert not waiting
    assert 0 <= found.p50_ms <= found.max_ms


# --- confirms ----------------------------------------------------------------------------------------------------


class Line:
    """A connection that says what it was given."""

    def __init__(self, *answers):
        self.answers = deque(answers)

    def call(self, *_):
        return b""

    def read(self, _seconds):
        return self.answers.popleft()


def confirm(tag, *, multiple=False, method=wire.BASIC_ACK):
    return wire.METHOD, 1, struct.pack(">HHQB", *method, tag, multiple)


def counted(*answers):
    line = Line(*answers)
    confirms = Confirms(cast("Any", line))
    while line.answers:
        confirms.wait()
    return confirms.count


def test_confirms_are_counted_whatever_their_order():
    assert counted([confirm(2), confirm(3)], [confirm(1)]) == 3
    assert counted([confirm(4)], [confirm(3, multiple=True)], [confirm(5)]) == 5
    assert counted([confirm(3, multiple=True)], [confirm(2, multiple=True)]) == 3
    assert counted([confirm(7)], [confirm(5)]) == 2


def test_a_refused_message_and_silence_are_no_limit():
    with pytest.raises(Exception, match="refused"):
        counted([confirm(1, method=wire.BASIC_NACK)])
    with pytest.raises(Exception, match="no confirm"):
        counted([])


# --- processes ---------------------------------------------------------------------------------------------------


def test_a_tally_is_read_by_others(tmp_path):
    with SharedCount(tmp_path / "tally") as ours, SharedCount(tmp_path / "tally") as theirs:
        ours.add(3)
        ours.add(1 << 40)
        assert theirs.value == 3 + (1 << 40)


def test_processor_time_of_this_process_is_seen():
    earlier, ticks = time.process_time(), 0.1  # the system counts hundredths
    seen = system.cpu_seconds(os.getpid())
    assert earlier - ticks < seen < time.process_time() + ticks
    assert system.family_cpu_seconds(os.getpid()) >= seen
    assert system.cpu_seconds(1 << 30) == 0
    assert system.peak_rss_mb() > 1


def test_the_process_behind_a_port_is_found():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert system.listening_pid(port) == os.getpid()
    assert system.listening_pid(port) is None
