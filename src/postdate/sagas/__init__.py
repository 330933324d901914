"""Where saga instances are kept: one adapter, one file. See :class:`postdate.ports.SagaStore`; ADR 0016."""
