"""Spark drivers as processes of their own, which can be killed: ``tests.spark_cluster`` has the cluster they drive.

A driver runs jobs, one after the other. A job is a function, named ``module:function``, that takes the session and
plain values and returns plain values. One line of JSON asks for it on the standard input; one line on the standard
output answers.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pyspark.sql import SparkSession

from postdate.pipeline.session import spark_session

from .machine import LOOPBACK, Daemon  # noqa: TID252 - as in servers.py
from .spark_cluster import ENDS_WITHIN_SECONDS, PROJECT, SparkCluster  # noqa: TID252

_MODULE = "tests.spark_drivers"


class DriverDied(Exception):
    """The driver ended before it had answered."""


class JobFailed(Exception):
    """The job raised an error: its text."""


class SparkDriver:
    """One driver; its session starts with the process and ends with it.

    Args:
        cluster: whose guard ends it at the latest, and whose master it uses unless ``local``.
        name: of the application and of the file with its log, in the cluster's directory.
        local: run the tasks in the driver's own JVM, in two threads.
        remote: the address of a Spark Connect server, whose client this is; it has no JVM.
        conf: Spark settings on top of those of the cluster.
    """

    def __init__(
        self,
        cluster: SparkCluster,
        name: str,
        *,
        local: bool = False,
        remote: str | None = None,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        settings: dict[str, Any] = {
            "app_name": name,
            **({"cores": 2} if local else {"master": cluster.master_url}),
            "conf": {**({} if local else cluster.conf), **(conf or {})},
        }
        if remote is not None:
            settings = {"remote": remote}
        self.log = cluster.directory / f"{name}.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=PROJECT,
                env={**os.environ, **cluster.variables, "SPARK_LOCAL_IP": LOOPBACK},
            )

    @property
    def process(self) -> Daemon | None:
        """The Python process of the driver; None when it has ended."""
        return Daemon.of(self._process.pid)

    def run(self, job: str, **arguments: object) -> Any:
        """Run a job; return what it returned.

        Raises:
            JobFailed: it raised an error.
            DriverDied: the driver ended meanwhile.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"job": job, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.kill()
            self._close()
            raise DriverDied(f"{job}: {self.end_of_log()}")
        answer = json.loads(line)
        if "error" in answer:
            raise JobFailed(f"{job}: {answer['error']}")
        return answer["result"]

    def kill(self) -> bool:
        """Kill it with -9, its JVM as well; False when it had ended before."""
        process = self.process
        if process is not None:
            daemons = [process, *process.descendants()]
            for daemon in daemons:
                daemon.send(signal.SIGKILL)
            for daemon in daemons[1:]:
                daemon.ends_within(ENDS_WITHIN_SECONDS)
        self._process.wait(ENDS_WITHIN_SECONDS)
        return process is not None

    def stop(self) -> None:
        """End it in good order, and with it the application."""
        self._close()
        self._process.wait(ENDS_WITHIN_SECONDS)

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def end_of_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2_000:]


class RestartedDriver:
    """A driver that is started again whenever it was killed, and then given the same job again.

    Args:
        start: starts one.
    """

    def __init__(self, start: Callable[[], SparkDriver]) -> None:
        self._start = start
        self._driver = start()
        self._killed = False
        self._replacing = threading.Lock()

    def run(self, job: str, **arguments: object) -> Any:
        """See :meth:`SparkDriver.run`; a driver that dies by itself is an error, too."""
        while True:
            try:
                return self._driver.run(job, **arguments)
            except DriverDied:
                with self._replacing:
                    if not self._killed:
                        raise
                    self._driver, self._killed = self._start(), False
            except JobFailed:
                raise
            except BaseException:  # a test that ran out of time: its answer must not be taken for the next one's
                self.kill()
                raise

    def kill(self) -> bool:
        """Kill the present one, from any thread; False when it had ended before."""
        with self._replacing:
            self._killed = self._driver.process is not None
            return self._driver.kill()

    @property
    def process(self) -> Daemon | None:
        return self._driver.process

    def stop(self) -> None:
        self._driver.stop()


# --- in the process of the driver -------------------------------------------------------------------------------------


def _session(settings: Mapping[str, Any]) -> SparkSession:
    if "remote" in settings:
        return SparkSession.Builder().remote(settings["remote"]).getOrCreate()
    return spark_session(**settings)


def _work(settings: Mapping[str, Any]) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whoever prints does not answer
    with _session(settings) as spark:
        for line in sys.stdin:
            asked = json.loads(line)
            module, _, function = asked["job"].partition(":")
            try:
                answer = {"result": getattr(importlib.import_module(module), function)(spark, **asked["arguments"])}
            except Exception as error:  # noqa: BLE001 - the asker raises it
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    _work(json.loads(sys.argv[1]))
