"""Make the long description of the package from README.md: hatchling runs this hook for each build.

Links in the README are relative, so that they work in a checkout and in a fork. On a package index they would be dead.
The address of the repository is taken from ``[project.urls]`` in pyproject.toml, the only place that has it.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(
    r"(?P<before>(?P<image>!)?\[[^\]]*\]\(|^\[[^\]]+\]:[ ]+|\b(?:href|(?P<source>src|srcset))=[\"'])"
    r"(?P<target>[^)\s\"'>]+)",
    re.MULTILINE,
)
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_DEVELOPMENT = re.compile(r"\.dev|\+")


def revision_of(version: str) -> str:
    """Return the tag of a version. A version in development has none: its files are those of the branch ``main``."""
    return "main" if _DEVELOPMENT.search(version) else f"v{version}"


def absolute_links(markdown: str, repository: str, version: str) -> str:
    """Return the text with links to the files of a version in a repository instead of relative ones.

    Code blocks stay as they are. A link within the page leads to the README in the repository, because a package index
    gives headings no anchors.
    """
    revision = revision_of(version)

    def absolute(link: re.Match[str]) -> str:
        target = link["target"]
        if _ABSOLUTE.match(target):
            return link[0]
        # A picture needs its bytes ("raw"); any other file its page ("blob", which also finds folders).
        view = "raw" if link["image"] or link["source"] else "blob"
        path = f"README.md{target}" if target.startswith("#") else target
        return f"{link['before']}{repository}/{view}/{revision}/{path}"

    parts, position = list[str](), 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(absolute, markdown[position : fence.start()]), fence[0]]
        position = fence.end()
    return "".join([*parts, _LINK.sub(absolute, markdown[position:])])


class PackageReadme(MetadataHookInterface):
    """The hook of ``[tool.hatch.metadata.hooks.custom]``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description. ``urls`` and ``version`` are there already."""
        markdown = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = absolute_links(markdown, metadata["urls"]["Repository"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
