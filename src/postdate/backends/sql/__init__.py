"""The common part of SQL databases: statements that each of them runs unchanged. Source: ADR 0058.

``dialect`` has the differences between databases. ``limits``, ``retention``, ``sagas``, ``outbox``, ``timeouts`` and
``questions`` each have the SQL of one part. ``migrations`` applies numbered scripts. ``timeouts_layout`` knows the
tables of upstream's timeout manager, and ``timeouts_migration`` moves them into a store. Claims differ in kind between
databases, so they are in the packages of the databases; MariaDB and SQL Server share theirs in ``row_locks``.

Read first: ``dialect``, then ``sagas``.
"""
