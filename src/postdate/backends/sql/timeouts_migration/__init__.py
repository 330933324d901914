"""From where delayed messages move: a timeout manager's storage as the source of a migration.

What all of them share; the SQL of each server is in the room of its backend. Source: specification 4.12; ADR 0015.
"""
