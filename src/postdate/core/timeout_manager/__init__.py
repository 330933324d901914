"""The timeout manager: two queues and a storage of timeouts between them, for those who still run it.

``reading`` says what its messages mean, ``steps`` are those of its queues; ``looking`` finds what is due and
``announced`` remembers what it has told of.
Source: specification 4; ADR 0014.
"""
