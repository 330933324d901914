"""Adapters of stores, queues, sagas, outboxes and timeouts: one package per technology, which alone knows it.

These packages import ports and below, never each other, except ``rowlocks``, which stores on servers with row locks
share.
"""
