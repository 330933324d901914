"""A Spark cluster of real processes on loopback: a standalone master and workers of one core and 1 GiB each.

Executors run as they would at a user's: in a directory of their own, with a Python that has everything Postdate depends
on and not Postdate itself; that comes with the job, as a wheel (``cluster.package``). Everything lives in one temporary
directory. A guard, a process of its own, waits for the end of the one that started the cluster, however it ends; then
it kills what is left of the cluster and removes the directory. Linux only.
"""

import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyspark
from hatchling.builders.wheel import WheelBuilder

from postdate.pipeline.java import STARTUP_OPTIONS, find_java_home, prepare_java_home

from .machine import LOOPBACK, Daemon, daemons_with, until  # noqa: TID252 - as in servers.py

PROJECT = Path(__file__).resolve().parent.parent
SPARK_HOME = Path(pyspark.__file__).parent
STARTS_WITHIN_SECONDS = 120.0  # JVMs on a machine under load
ENDS_WITHIN_SECONDS = 60.0
# In the environment of every process of a cluster, with its directory; executors and their Pythons inherit it.
_MARK = "POSTDATE_SPARK_CLUSTER"
_MODULE = "tests.spark_cluster"


class ClusterError(Exception):
    """A cluster that did not start or does not end. The message says why, with the end of a log."""


@dataclass(frozen=True)
class Executor:
    """A JVM that runs tasks, and its Python processes: first the daemon, then the workers that it forks."""

    jvm: Daemon
    pythons: tuple[Daemon, ...]

    @property
    def python_workers(self) -> tuple[Daemon, ...]:
        """Those in which tasks run; the daemon only makes them."""
        return self.pythons[1:]


@dataclass
class SparkCluster:
    """A cluster in one directory; use :func:`spark_cluster`.

    Args:
        directory: where all of it lives; must not exist, and is gone afterwards.
        workers: how many.
        environment: variables of the workers, which their executors inherit: the place for secrets.
        within_driver: master and workers are threads of the driver's JVM; executors are processes still.
    """

    directory: Path
    workers: int = 2
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    within_driver: bool = False
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    _guard: subprocess.Popen[bytes] | None = None

    # --- what a driver needs ---

    @property
    def master_url(self) -> str:
        if self.within_driver:
            return f"local-cluster[{self.workers},1,512]"
        return f"spark://{LOOPBACK}:{self._port_said('Starting Spark master at')}"

    @property
    def web_url(self) -> str:
        """The master's web page."""
        return f"http://{LOOPBACK}:{self._port_said('Bound MasterWebUI')}"

    @property
    def package(self) -> Path:
        """The wheel of Postdate, under the name that Spark takes; see docs/guides/spark-cluster.md."""
        return self.directory / "postdate.zip"

    @property
    def python(self) -> Path:
        """The Python of the executors, without Postdate."""
        return self.directory / "python" / "bin" / "python"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a process that belongs to the cluster: the guard ends it with the others."""
        return {
            "SPARK_LOCAL_IP": LOOPBACK,  # where web pages listen; without it, everywhere
            "SPARK_LOCAL_DIRS": str(self.directory / "local"),
            "TMPDIR": str(self.directory / "temporary"),
            **self.environment,
            _MARK: str(self.directory),
        }

    @property
    def conf(self) -> dict[str, str]:
        """Settings for ``spark_session(master=cluster.master_url, conf=...)`` on this machine."""
        return {
            "spark.driver.host": LOOPBACK,
            "spark.driver.bindAddress": LOOPBACK,
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": " ".join(STARTUP_OPTIONS),
            # No task before every executor is there: else the first might do the work of all.
            "spark.cores.max": str(self.workers),
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            "spark.pyspark.python": str(self.python),
            "spark.submit.pyFiles": str(self.package),
        }

    # --- life ---

    def start(self) -> None:
        """Start it, and return when the master knows all workers.

        Raises:
            ClusterError: it did not come up; nothing of it is left running.
        """
        self.directory.mkdir(mode=0o700)
        (self.directory / "temporary").mkdir()
        command = [sys.executable, "-m", _MODULE, str(self.directory)]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=PROJECT, start_new_session=True)
        try:
            self._make_python()
            self._make_package()
            if self.within_driver:
                return
            self._start_master()
            self._wait_for("master", lambda: self.web_page() is not None)  # a worker that finds none waits for long
            for number in range(self.workers):
                self._start_worker(number)
            self._wait_for("workers", lambda: len(self._alive_workers()) == self.workers)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill all its processes, and return when they and the directory are gone. Without effect when stopped."""
        if self._guard is None:
            return
        guard, self._guard = self._guard, None
        assert guard.stdin is not None
        guard.stdin.close()
        for child in self._children:
            child.wait(ENDS_WITHIN_SECONDS)
        if guard.wait(ENDS_WITHIN_SECONDS) != 0:
            raise ClusterError(f"the processes of the cluster in {self.directory} did not end: {self.processes()}")

    def _start_master(self) -> None:
        options = ["--port", "0", "--webui-port", "0"]  # it says which it has found
        self._start("master", "org.apache.spark.deploy.master.Master", LOOPBACK, *options)

    def _port_said(self, words: str) -> int:
        """Return the port in a line of the master's log; 0, where nobody listens, before it is there."""
        log = (self.directory / "master" / "log").read_text(encoding="utf-8", errors="replace")
        found = re.search(rf"{words}.*:(\d+)$", log, re.MULTILINE)
        return int(found[1]) if found else 0

    def _start_worker(self, number: int) -> None:
        options = ["--cores", "1", "--memory", "1g", "--webui-port", "0", self.master_url]
        # Spark runs the second attempt of a speculated task on another host only, so each worker is a host.
        host = f"127.0.0.{number + 1}"
        self._start(f"worker-{number}", "org.apache.spark.deploy.worker.Worker", host, *options)

    def _start(self, name: str, main_class: str, host: str, *options: str) -> None:
        home = self.directory / name
        home.mkdir()
        java_options = [
            *STARTUP_OPTIONS,
            "-Djava.net.preferIPv4Stack=true",
            "-Dspark.master.rest.enabled=false",  # a second door, at a fixed port
            "-Dspark.deploy.maxExecutorRetries=-1",  # kills are no reason to give an application up
        ]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "LC_ALL": "C.UTF-8",
            "TZ": "America/St_Johns",  # not that of the driver, nor UTC: no time may depend on it
            "JAVA_HOME": str(prepare_java_home(find_java_home(None, os.environ), self.directory)),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_WORKER_DIR": str(home / "work"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": " ".join(java_options),
            "SPARK_LAUNCHER_OPTS": " ".join(STARTUP_OPTIONS),
            **self.variables,
            "SPARK_LOCAL_IP": host,
        }
        with (home / "log").open("wb") as log:
            self._children.append(
                subprocess.Popen(
                    [SPARK_HOME / "bin" / "spark-class", main_class, "--host", host, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=home,
                    env=environment,
                    start_new_session=True,
                )
            )

    def _wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        def ended() -> bool:
            return any(child.poll() is not None for child in self._children)

        if not until(lambda: ended() or condition(), STARTS_WITHIN_SECONDS) or ended():
            logs = [path.read_text(encoding="utf-8", errors="replace") for path in self.directory.glob("*/log")]
            raise ClusterError(f"no {what} within {STARTS_WITHIN_SECONDS:g} s:\n" + "\n".join(t[-2_000:] for t in logs))

    def _make_python(self) -> None:
        """Make a virtual environment with all that is installed here, as links, except Postdate."""
        home = self.directory / "python"
        venv.create(home, symlinks=True, with_pip=False)
        (there,) = home.glob("lib/python*/site-packages")
        for entry in SPARK_HOME.parent.iterdir():
            # Of the files with paths one leads to the source tree.
            if not entry.name.startswith("postdate") and entry.suffix != ".pth":
                (there / entry.name).symlink_to(entry)

    def _make_package(self) -> None:
        (built,) = WheelBuilder(str(PROJECT)).build(directory=str(self.directory / "wheel"), versions=["standard"])
        shutil.copy(built, self.package)

    # --- what runs ---

    def web_page(self, path: str = "/json/") -> str | None:
        """Return a page of the master; None while it does not answer."""
        with suppress(OSError), urllib.request.urlopen(self.web_url + path, timeout=5) as answer:
            return answer.read().decode()
        return None

    def _alive_workers(self) -> list[dict[str, Any]]:
        page = self.web_page()
        return [] if page is None else [worker for worker in json.loads(page)["workers"] if worker["state"] == "ALIVE"]

    def processes(self) -> list[Daemon]:
        """Return all its processes, those of its executors included."""
        return daemons_with(f"{_MARK}={self.directory}")

    def executors(self) -> list[Executor]:
        """Return the executors that run now, by age of their JVMs: the children of the workers."""
        workers = [daemon for child in self._children[1:] for daemon in [Daemon.of(child.pid)] if daemon is not None]
        jvms = [below for worker in workers for below in worker.descendants() if _is_executor(below)]
        return [Executor(jvm, tuple(_by_age(jvm.descendants()))) for jvm in _by_age(jvms)]

    def kill_worker(self, number: int) -> bool:
        """Kill one worker with -9, with its executors and their Pythons, as when a machine goes down."""
        worker = Daemon.of(self._children[1 + number].pid)
        if worker is None:
            return False
        daemons = [worker, *worker.descendants()]
        for daemon in daemons:
            daemon.send(signal.SIGKILL)
        return all(daemon.ends_within(ENDS_WITHIN_SECONDS) for daemon in daemons[1:])

    def kill_executor(self, number: int) -> bool:
        """Kill one executor with -9, counted around; False when there is none."""
        return _kill([executor.jvm for executor in self.executors()], number)

    def kill_python_worker(self, number: int) -> bool:
        """Kill one Python in which tasks run with -9, counted around; False when there is none."""
        return _kill([worker for executor in self.executors() for worker in executor.python_workers], number)


def listening_addresses(daemons: Iterable[Daemon]) -> set[str]:
    """Return the addresses, without ports, where any of these processes accepts TCP connections."""
    sockets = {inode for daemon in daemons for inode in _sockets_of(daemon)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    listening = [fields[1].partition(":")[0] for fields in lines if fields[3] == _LISTENS and fields[9] in sockets]
    return {str(_address(packed)) for packed in listening}


_LISTENS = "0A"


def _sockets_of(daemon: Daemon) -> set[str]:
    found: set[str] = set()
    with suppress(OSError):  # it has ended
        for file in Path(f"/proc/{daemon.pid}/fd").iterdir():
            with suppress(OSError):
                found.update(re.findall(r"^socket:\[(\d+)\]$", str(file.readlink())))
    return found


def _address(packed: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address of /proc/net: hexadecimal words, each in the byte order of the machine."""
    words = [bytes.fromhex(packed[at : at + 8]) for at in range(0, len(packed), 8)]
    whole = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ipaddress.ip_address(whole)
    return address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address


def _is_executor(jvm: Daemon) -> bool:
    with suppress(OSError):
        return b"CoarseGrainedExecutorBackend" in Path(f"/proc/{jvm.pid}/cmdline").read_bytes()
    return False


def _kill(daemons: list[Daemon], number: int) -> bool:
    if not daemons:
        return False
    chosen = daemons[number % len(daemons)]
    chosen.send(signal.SIGKILL)
    return chosen.ends_within(ENDS_WITHIN_SECONDS)


def _by_age(daemons: list[Daemon]) -> list[Daemon]:
    return sorted(daemons, key=lambda daemon: (daemon.born_ticks, daemon.pid))


@contextmanager
def spark_cluster(
    workers: int = 2, environment: Mapping[str, str] | None = None, *, within_driver: bool = False
) -> Generator[SparkCluster]:
    """Lend a cluster that runs; nothing of it is left afterwards.

    Args:
        workers: how many, of one core and 1 GiB each.
        environment: further variables of the workers and of what they start.
        within_driver: the driver's JVM has master and workers: two processes less, and executors of their own still.

    Raises:
        ClusterError: it did not come up.
    """
    directory = Path(tempfile.mkdtemp(prefix="postdate-cluster-")) / "cluster"
    cluster = SparkCluster(directory, workers, environment or {}, within_driver)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


# --- the guard --------------------------------------------------------------------------------------------------------


def _guard(directory: Path) -> int:
    """Wait for the end of the process that started the cluster, then end the cluster."""
    sys.stdin.buffer.read()

    def gone() -> bool:
        left = daemons_with(f"{_MARK}={directory}")
        for daemon in left:  # more than once: one that is killed may just have started another
            daemon.send(signal.SIGKILL)
        return not left

    ended = until(gone, ENDS_WITHIN_SECONDS)
    shutil.rmtree(directory.parent)
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(_guard(Path(sys.argv[1])))
