"""A consumer that takes messages off a queue in one SQLite file without us."""

from postdate.backends.sqlite.benchmark import SqliteTarget

_TAKE = """
    DELETE FROM queue_message WHERE seq IN (
        SELECT seq FROM queue_message WHERE queue_id = (SELECT queue_id FROM queue WHERE name = ?)
        ORDER BY seq LIMIT ?)
    RETURNING message_id, content
"""


class SqliteTaken(SqliteTarget):
    """A file, from whose queues messages are taken by bare SQL."""

    _opened = None

    def __exit__(self, *error):
        if self._opened is not None:
            self._opened.close()
        super().__exit__(*error)

    def take(self, queue: str, limit: int) -> list[str]:
        """Take up to ``limit`` messages off a queue and return their ids."""
        if self._opened is None:
            self._opened = self.connection(self.path)
        self._opened.execute("BEGIN IMMEDIATE")
        taken = self._opened.execute(_TAKE, (queue, limit)).fetchall()
        self._opened.executemany("DELETE FROM content WHERE seq = ?", [(content,) for _, content in taken])
        self._opened.execute("COMMIT")
        return [message_id for message_id, _ in taken]
