"""Where messages, sagas, outboxes and timeouts can be kept, and queues can be: one room a technology.

A room has all that knows its technology. Rooms import ports and below, never each other, but for ``rowlocks``: what
stores on database servers with row locks share.
"""
