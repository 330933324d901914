"""The storage of a timeout manager as the source of a migration.

This package has the common part; the SQL of each server is in the package of its backend. Source: ADR 0015.
"""
