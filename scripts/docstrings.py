"""Make Markdown of the few signs of reStructuredText in docstrings, for the reference of the site.

griffe, which reads the source, runs this for each object.
"""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`[~.]*([^`]+)`")
_PAGE = re.compile(r"(?<![`\w/])docs/([\w/-]+)\.md\b")
_LITERAL_BLOCK = re.compile(r"^::\n|(?<=\w)::$", re.MULTILINE)


class Markdown(griffe.Extension):
    """Names of objects as code, literal blocks as code blocks, names of pages as links from reference/."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None:
            text = _ROLE.sub(lambda role: f"`{role[1].removeprefix('postdate.')}`", obj.docstring.value)
            text = _PAGE.sub(r"[\g<0>](../\1.html)", text)
            obj.docstring.value = _LITERAL_BLOCK.sub(lambda block: ":" if block[0] == "::" else "", text)
