"""From where delayed messages move: timeout managers' storage, and Postdate's own stores, as sources of a migration.

What all of them share; the SQL of each server is in the room of its backend. Source: specification 4.12; ADR 0015.
"""
