"""Workflows and issue forms are YAML, call what there is, and hold no secret."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def load(path):
    # YAML 1.1 reads the key `on` as true.
    return yaml.safe_load(path.read_text("utf-8"))


def steps_of(workflow):
    return [step for job in workflow["jobs"].values() for step in job.get("steps", ())]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_least_rights_limits_of_time_and_calls_what_there_is(path):
    workflow = load(path)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert workflow["permissions"]["contents"] == "read"
    for job in workflow["jobs"].values():
        if called := job.get("uses"):
            assert (ROOT / called).is_file()
        else:
            assert job["timeout-minutes"] <= 90
    commands = [line.strip() for step in steps_of(workflow) for line in step.get("run", "").splitlines()]
    for target in [line.split()[1] for line in commands if line.startswith("make ")]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for script in [line.split()[1] for line in commands if line.startswith("python scripts/")]:
        assert (ROOT / script).is_file()


def test_the_gate_runs_on_each_python_that_the_package_names():
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text("utf-8"))
    gate = load(ROOT / ".github" / "workflows" / "gate.yml")
    assert gate["jobs"]["gate"]["strategy"]["matrix"]["python"] == classifiers


def test_publishing_needs_no_password_and_follows_the_smoke_test():
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text("utf-8")
    publish = yaml.safe_load(text)["jobs"]["publish"]
    assert "secrets." not in text
    assert publish["permissions"]["id-token"] == publish["permissions"]["attestations"] == "write"
    assert publish["environment"] == "release"
    assert publish["needs"] == ["build", "smoke"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_something(path):
    form = load(path)
    if path.stem == "config":
        assert form == {"blank_issues_enabled": False}
        return
    required = [part["id"] for part in form["body"] if part.get("validations", {}).get("required")]
    assert form["name"]
    assert form["description"]
    assert required
    assert len({part.get("id") for part in form["body"]}) == len(form["body"])


def test_the_smoke_test_delivers_a_message(tmp_path):
    smoke = runpy.run_path(str(ROOT / "scripts" / "smoke.py"))
    assert '"order": 7' in smoke["deliver"](tmp_path)
