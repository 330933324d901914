"""MSMQ: addresses, messages as its properties, its COM objects and the threads that they live in. See docs/msmq.md."""
