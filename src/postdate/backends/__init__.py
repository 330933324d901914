"""Adapters of stores, queues, sagas, outboxes and timeouts: one package per technology, which alone knows it.

These packages import ports and below, and never each other, but for ``sql``: what SQL databases share, and in
``sql.row_locks`` what stores on servers with row locks share.
"""
