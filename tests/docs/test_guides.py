"""The snippets of the guides run as they stand, and print what the text says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("*.md"))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_snippets_run_and_print_what_is_said(guide: Path, tmp_path: Path) -> None:
    text = guide.read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```\n+(?:It prints `([^`]*)`)?", text, re.DOTALL | re.MULTILINE)
    assert snippets
    for code, said in snippets:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == (f"{said}\n" if said else "")


def test_links_between_documents_lead_somewhere() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for page in [*docs.rglob("*.md"), docs.parent / "ARCHITECTURE.md", docs.parent / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
