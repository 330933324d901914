"""The result of a benchmark, as one object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from postdate.cli.bench.messages import percentiles

Figure = float | list[float] | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LatenessInMilliseconds:
    """From due to delivered."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """Figures of one benchmark; :meth:`as_dict` leaves out those that are ``None``.

    Args:
        n: messages.
        rate: messages a second.
        limit: messages a second of the barest way to do the same on the same server, in the same run.
        early: messages that arrived before they were due.
        lateness: from due to visible in the destination queue.
        received: from due to received by another process, which includes that process waking up.
        floor: lateness of the barest loop that does the same, in the same run.
        rss_mb: largest resident memory of the service process, in MiB.
        cpu_s: processor time of the service process.
        server_cpu_s: processor time of the servers, when they run on this machine.
        server_cpu_cores: ``server_cpu_s`` divided by the duration.
        extra: figures of this benchmark alone.
        servers: version and settings of each server.
    """

    benchmark: str
    n: int
    rate: float | None = None
    limit: float | None = None
    lost: int | None = None
    duplicated: int | None = None
    early: int | None = None
    lateness: LatenessInMilliseconds | None = None
    received: LatenessInMilliseconds | None = None
    floor: LatenessInMilliseconds | None = None
    rss_mb: float | None = None
    cpu_s: float | None = None
    server_cpu_s: float | None = None
    server_cpu_cores: float | None = None
    extra: Mapping[str, Figure] | None = None
    servers: Mapping[str, Mapping[str, str]] | None = None

    def as_dict(self) -> dict[str, object]:
        found: dict[str, object] = {"benchmark": self.benchmark, "n": self.n}
        for name in ("rate", "limit", "lost", "duplicated", "early", "rss_mb", "cpu_s", "server_cpu_s"):
            value = getattr(self, name)
            if value is not None:
                found[name] = _rounded(value, 2 if name.endswith("_s") else 1)
        if self.server_cpu_cores is not None:
            found["server_cpu_cores"] = _rounded(self.server_cpu_cores, 3)
        if self.rate is not None and self.limit:
            found["ratio"] = _rounded(self.rate / self.limit, 3)
        for prefix, lateness in (("", self.lateness), ("received_", self.received), ("floor_", self.floor)):
            if lateness is not None:
                found |= {prefix + key: _rounded(value, 2) for key, value in asdict(lateness).items()}
        found |= {key: _rounded(value, 3) for key, value in (self.extra or {}).items()}
        return found if self.servers is None else {**found, "servers": self.servers}

    @property
    def promise_kept(self) -> bool:
        return not (self.lost or self.duplicated or self.early)


def _rounded(value: Figure, digits: int) -> object:
    if isinstance(value, Mapping):
        return {key: _rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each, digits) for each in value]
    return round(value, digits) if isinstance(value, float) else value


def lateness(seconds: Iterable[float]) -> LatenessInMilliseconds:
    """Return percentiles of lateness given in seconds; all are 0 without values."""
    return LatenessInMilliseconds(**percentiles(seconds))
