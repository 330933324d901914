"""Settings of delayed delivery, with the names and defaults of the specification (1.4)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from postdate.errors import ConfigurationError
from postdate.ports import ClaimingStore

_30_SECONDS = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class DelayedDelivery:
    """How messages are kept until they are due.

    Args:
        store: where they wait.
        number_of_retries: dispatch attempts after the first before a message goes to the error queue; 0 or more.
        time_to_trigger_store_circuit_breaker: how long storing may fail before it is a critical error; above zero.
        time_to_trigger_fetch_circuit_breaker: the same for looking for due messages.
        time_to_trigger_dispatch_circuit_breaker: the same for sending due messages.
        maximum_recovery_failures_per_second: failures of failure handling that are borne, over 30 s; above 0.

    Raises:
        ConfigurationError: a value is out of range.
    """

    store: ClaimingStore
    number_of_retries: int = 0
    time_to_trigger_store_circuit_breaker: timedelta = _30_SECONDS
    time_to_trigger_fetch_circuit_breaker: timedelta = _30_SECONDS
    time_to_trigger_dispatch_circuit_breaker: timedelta = _30_SECONDS
    maximum_recovery_failures_per_second: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.store, ClaimingStore):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"store must be a delayed message store, not {self.store!r}")
        if self.number_of_retries < 0:
            raise ConfigurationError(f"number_of_retries must be 0 or more, not {self.number_of_retries}")
        if self.maximum_recovery_failures_per_second <= 0:
            raise ConfigurationError("maximum_recovery_failures_per_second must be above 0")
        for name in ("store", "fetch", "dispatch"):
            setting = f"time_to_trigger_{name}_circuit_breaker"
            if getattr(self, setting) <= timedelta(0):
                raise ConfigurationError(f"{setting} must be above zero, not {getattr(self, setting)}")
