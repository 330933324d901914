"""What a benchmark found, as one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True)
class Lateness:
    """Milliseconds from due to delivered."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one benchmark; what does not apply is left out of :meth:`as_dict`.

    Args:
        benchmark: its name.
        n: messages.
        rate: messages a second.
        limit: messages a second of the barest way to do the same on the same database, in the same run.
        lost: messages that did not arrive.
        duplicated: messages that arrived more than once.
        early: messages that arrived before they were due.
        lateness: from due to visible in the destination queue.
        received: from due to received by another process, which includes that process waking up.
        floor: lateness of an event loop that only sleeps until each due time, in the same run.
        rss_mb: largest resident memory of the service process, in MiB.
        cpu_s: processor time of the service process.
        extra: figures of this benchmark alone.
    """

    benchmark: str
    n: int
    rate: float | None = None
    limit: float | None = None
    lost: int | None = None
    duplicated: int | None = None
    early: int | None = None
    lateness: Lateness | None = None
    received: Lateness | None = None
    floor: Lateness | None = None
    rss_mb: float | None = None
    cpu_s: float | None = None
    extra: dict[str, float] | None = None

    def as_dict(self) -> dict[str, float | int | str]:
        """Return a flat object with ``rate``, ``limit``, ``ratio``, ``p99_ms``, ``floor_p99_ms`` and so on."""
        flat: dict[str, float | int | str] = {"benchmark": self.benchmark, "n": self.n}
        for name in ("rate", "limit", "lost", "duplicated", "early", "rss_mb", "cpu_s"):
            value = getattr(self, name)
            if value is not None:
                flat[name] = round(value, 1) if isinstance(value, float) else value
        if self.rate is not None and self.limit:
            flat["ratio"] = round(self.rate / self.limit, 3)
        for prefix, lateness in (("", self.lateness), ("received_", self.received), ("floor_", self.floor)):
            if lateness is not None:
                flat |= {prefix + key: round(value, 2) for key, value in asdict(lateness).items()}
        return {**flat, **{key: round(value, 3) for key, value in (self.extra or {}).items()}}

    @property
    def promise_kept(self) -> bool:
        """Whether nothing was lost, doubled or early."""
        return not (self.lost or self.duplicated or self.early)


def lateness(values: Sequence[float]) -> Lateness:
    """Return percentiles of lateness given in seconds; at least one value."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000

    return Lateness(at(0.5), at(0.95), at(0.99), ordered[-1] * 1000)


def seconds_between(earlier: datetime, later: datetime) -> float:
    """Return the seconds from one instant to another."""
    return (later - earlier) / timedelta(seconds=1)
