"""Stores on database servers that claim by row locks: everything but the dialect. Source: ADR 0008.

A server's room gives its driver (subclasses of `DatabaseServer` and `ServerSession` in ``connection``) and its dialect:
`RowLockStatements` as data, and the methods at the end of `RowLockTables`. `LockingStore` is the store.
"""
