"""Wrong clocks for real processes: libfaketime, from Debian's packages."""

from pathlib import Path

from .servers import install  # noqa: TID252 - as in servers.py


def environment(offset_seconds: int) -> dict[str, str]:
    """Return what shows a process another time of day; it waits as long as ever."""
    return {
        "LD_PRELOAD": str(_library()),
        "FAKETIME": f"{offset_seconds:+d}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }


def _library() -> Path:
    found = _find()
    if found is None:
        install(["faketime"])
        found = _find()
    assert found is not None, "the package faketime is installed, and its library is not"
    return found


def _find() -> Path | None:
    return next(iter(sorted(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"))), None)
