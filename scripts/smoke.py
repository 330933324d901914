"""Send a delayed message with the installed commands, deliver it, and find it in its queue: the smoke test of a system.

It needs nothing but Python and Postdate, so it runs on Windows and macOS, too. It works in an empty folder.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

POSTDATE = [sys.executable, "-m", "postdate"]
BODY = '{"order": 7}'
PATIENCE_SECONDS = 120


def run(folder: Path, *arguments: str) -> str:
    """Return what a command prints; it must succeed."""
    done = subprocess.run([*POSTDATE, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"postdate {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def has_ended(process: subprocess.Popen[bytes], wait_seconds: float) -> bool:
    """Wait for the end of a process; tell whether it came."""
    try:
        process.wait(wait_seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def deliver(folder: Path) -> str:
    """Return the message as the queue has it, after a service has delivered it."""
    run(folder, "setup", "--queue", "orders")
    run(folder, "send", "orders", BODY, "--delay", "1s")
    with (folder / "service.log").open("w") as log:
        service = subprocess.Popen([*POSTDATE, "run"], cwd=folder, stdout=log, stderr=log)
        try:
            give_up = time.monotonic() + PATIENCE_SECONDS
            while BODY not in (message := run(folder, "queues", "peek", "orders")):
                if has_ended(service, 1.5) or time.monotonic() > give_up:
                    raise SystemExit(f"not delivered:\n{(folder / 'service.log').read_text()}")
        finally:
            service.terminate()
            service.wait()
    return message


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        message = deliver(Path(name))
    print(f"delivered on {sys.platform} by Python {sys.version.split()[0]}:\n{message}")
