"""What can be in the way only where both ends are Postdate stores: the same table twice, ways back. On the driver."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import Final

from postdate.config import resolved
from postdate.errors import MigrationConflict
from postdate.migrating.store_tables import StoreTables
from postdate.migrating.tables import MigrationSource
from postdate.pipeline.stores import StoreSpec
from postdate.wiring.migration_sources import is_store_source, store_source

_SHOWN: Final = 10


def between_stores(
    source: MigrationSource, target: StoreSpec, names: Sequence[str], cutoff: datetime
) -> Mapping[str, tuple[str, ...]]:
    """Return what keeps messages of each endpoint from moving between these two; empty when nothing does.

    A store knows the ids of messages that were moved out of it, so as not to deliver one that comes a second time. It
    would not take such a message back, and its records would say that it has ended: so nothing moves that way.

    Args:
        source: where the messages wait.
        target: where they would go; set up.
        names: of the endpoints whose messages are to move.
        cutoff: what is due earlier stays.

    Raises:
        StoreError: one of the two failed.
    """
    place = resolved(target.address, os.environ)
    if not isinstance(source, StoreTables) or not is_store_source(place):
        return {}
    with closing(store_source(place, schema=target.schema)) as other:
        table = other.table_for(target.endpoint, target.table)
        is_same_place = source.same_place(other)
        leaving = other.being_emptied(table)
        if leaving is not None:
            busy = f"the target itself is being emptied by migration {leaving.run_id}: end that one first"
            return dict.fromkeys(names, (busy,))
        try:
            gone = other.given_away(table)
        except MigrationConflict as error:
            return dict.fromkeys(names, (str(error),))
    found = dict[str, tuple[str, ...]]()
    for name in names:
        if is_same_place and source.table_of(name) == table:
            found[name] = ("its messages wait in the target already: source and target are the same table",)
        elif gone and (back := source.waiting_among(name, gone, cutoff)):
            some = ", ".join(back[:_SHOWN]) + (", …" if len(back) > _SHOWN else "")
            said = "were moved out of the target before, which knows their ids and would not take them back"
            found[name] = (f"{len(back):,} {said}: {some}; move to a table or file of another name",)
    return found
