"""What a PostgreSQL store and PostgreSQL queues share: connections, wake-ups, signs of life, names, errors."""

from postdate.postgres.database import Connection, PostgresDatabase

__all__ = ["Connection", "PostgresDatabase"]
