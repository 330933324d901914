"""Stores on database servers that claim by row locks: everything except the dialect. Source: ADR 0008.

The backend of a server provides its driver (subclasses of `DatabaseServer` and `ServerSession` in ``connection``) and
its dialect: `RowLockStatements` as data, and the methods at the end of `RowLockTables`. `LockingStore` is the store.
"""
