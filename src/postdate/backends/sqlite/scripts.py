"""What an administrator runs by hand to make a file, where services may not."""

from __future__ import annotations

from postdate.backends.sqlite import timeouts
from postdate.backends.sqlite.setup import MARKS, OUTBOX_MARKS, SAGA_MARKS, setup_script


class SqliteScripts:
    """See :class:`postdate.ports.FileScripts`."""

    def database(self) -> str:
        """See :meth:`postdate.ports.FileScripts.database`."""
        return setup_script("database", MARKS)

    def timeouts(self, endpoint: str, table_prefix: str | None) -> str:
        """See :meth:`postdate.ports.FileScripts.timeouts`."""
        return timeouts.setup_statements(endpoint, table_prefix)

    def sagas(self) -> str:
        """See :meth:`postdate.ports.FileScripts.sagas`."""
        return setup_script("sagas", SAGA_MARKS)

    def outbox(self) -> str:
        """See :meth:`postdate.ports.FileScripts.outbox`."""
        return setup_script("outbox", OUTBOX_MARKS)
