"""What the site needs beyond mkdocs.yml: docstrings as the site's tools read them."""

from __future__ import annotations

import re
from typing import Any

import griffe

# :class:`~package.module.Name` shows Name, :func:`package.name` all of it; the site has no index of them.
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>(~?)([^<]+)</code>")
_PARAMETERS = re.compile(r"(?<=\nParameters\n----------\n).*", re.DOTALL)
_ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    return _ROLE.sub(
        lambda found: f"<code>{found[2].rpartition('.')[2] if found[1] else found[2]}</code>", html
    )


class Parameters(griffe.Extension):
    """Our docstrings have ``name: what it is`` where numpydoc wants the text on a line of its own."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = _PARAMETERS.sub(lambda rest: _ENTRY.sub(r"\1\n    ", rest[0]), text)
