"""What the gate leaves out has a reason, a part, and a proof in the gate."""

import pytest
from tests.soak import PARTS, PROBLEMS, ROOT, Soak, _without_proof


def test_what_is_left_out_of_this_run_has_its_proof(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.stash[PROBLEMS] == []


@pytest.mark.parametrize(
    ("proof", "problem"),
    [
        ("tests/a.py::test_in_the_gate", None),
        ("tests/a.py::test_in_the_gate[one]", None),
        ("tests/a.py::test_left_out", "is left out of the gate itself"),
        ("tests/a.py::test_gone", "does not exist"),
        (
            "tests/unit/test_soak.py::test_a_proof_must_exist_and_be_in_the_gate",
            None,
        ),  # in a file that is not collected
        ("tests/unit/test_soak.py::test_gone", "does not exist"),
        ("tests/unit/no_such_file.py::test_gone", "does not exist"),
    ],
)
def test_a_proof_must_exist_and_be_in_the_gate(proof: str, problem: str | None) -> None:
    soaks = {"tests/a.py::test_left_out": Soak("slow", "kills", (proof,))}
    found = list(_without_proof(soaks, ["tests/a.py::test_left_out", "tests/a.py::test_in_the_gate[one]"]))
    assert found == ([] if problem is None else [f"the proof {proof} {problem}"])


@pytest.mark.parametrize(
    "mark",
    [
        pytest.mark.soak("slow", part="no such part", proven_by="tests/a.py::test_one"),
        pytest.mark.soak("", part="kills", proven_by="tests/a.py::test_one"),
        pytest.mark.soak("slow", part="kills", proven_by=""),
        pytest.mark.soak("slow", part="kills"),
        pytest.mark.soak("slow", part="kills", proven_by="tests/conformance/test_adapters.py::test_store"),
        pytest.mark.soak(part="kills", proven_by="tests/a.py::test_one"),
    ],
)
def test_a_mark_that_says_too_little_is_refused(mark: pytest.MarkDecorator) -> None:
    with pytest.raises((ValueError, KeyError)):
        Soak.of_mark(mark.mark)


def test_every_part_is_run_at_night() -> None:
    workflow = (ROOT / ".github" / "workflows" / "soak.yml").read_text("utf-8")
    assert f"part: [{', '.join(PARTS)}]" in workflow
