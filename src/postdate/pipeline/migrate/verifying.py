"""Compare moved batches with the target: every field of every message. In a task of Spark, or on the driver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from postdate.backends.sql.timeouts_migration.tables import MigrationSource
from postdate.core.copies import MISSING, difference, different_fields
from postdate.errors import MessageError, PipelineError
from postdate.messages import DelayedMessage
from postdate.pipeline.migrate.ends import TargetStore
from postdate.pipeline.migrate.moving import BatchTask
from postdate.pipeline.migrate.results import BatchComparison, Difference
from postdate.ports import Record
from postdate.ports.migrating import MigrationRun

_ATTEMPTS: Final = 3
"""Number of looks for a missing message.

A retried message may become pending again between the look at pending messages
and the look at its records.
"""


def verify_batch(source: MigrationSource, target: TargetStore, run: MigrationRun, task: BatchTask) -> BatchComparison:
    """Compare a moved batch, which is still hidden in the source, with the messages in the target.

    Raises PipelineError if the hidden messages have changed since they were moved.
    """
    try:
        messages = source.read_batch(run, task.number)
    except MessageError as error:
        raise _changed_error(run, task, str(error)) from error
    if len(messages) != task.count:
        raise _changed_error(run, task, f"it has {len(messages):,} messages, and had {task.count:,}")
    missing, moved_on, different = messages, 0, dict[str, str]()
    for _ in range(_ATTEMPTS):
        differences_by_id = _compare_messages(target, missing)
        missing = [message for message in missing if differences_by_id.get(message.message_id) == MISSING]
        moved_on += sum(not what for what in differences_by_id.values())
        different |= {id_: what for id_, what in differences_by_id.items() if what and what != MISSING}
        if not missing:
            break
    different |= {message.message_id: MISSING for message in missing}
    named_differences = tuple(Difference(*each) for each in sorted(different.items()))
    return BatchComparison(run.run_id, len(messages) - moved_on - len(different), moved_on, named_differences)


def _changed_error(run: MigrationRun, task: BatchTask, reason: str) -> PipelineError:
    return PipelineError(f"batch {task.number} of run {run.run_id} has changed since it was moved: {reason}")


def _compare_messages(target: TargetStore, messages: Sequence[DelayedMessage]) -> dict[str, str]:
    """Return the differences by id; empty for a message that the target has ended or changed.

    A message that is missing in the result is pending and unchanged.
    """
    copies = {copy.message_id: copy for copy in target.read_pending([message.message_id for message in messages])}
    pairs = [(message, copies.get(message.message_id)) for message in messages]
    uncertain_pairs = [(message, copy) for message, copy in pairs if copy is None or different_fields(message, copy)]
    records = defaultdict[str, list[Record]](list)
    for record in target.read_records([message.message_id for message, _ in uncertain_pairs]):
        records[record.message_id].append(record)
    return {
        message.message_id: difference(message, copy, records[message.message_id]) for message, copy in uncertain_pairs
    }
