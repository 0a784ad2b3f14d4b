"""Links of the repository's texts, made links of the site.

On the forge a link leads to a file. On the site a document has a page, and so has every other file
of text that a document links to: its source.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator

PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "WORKSPACE.md": "workspace.md"}
# Code is passed over: fenced, then between backticks.
_LINK = re.compile(r"(^( *)```.*?^\2```|`[^`\n]*`)|\]\(([^)\s]+)\)", re.DOTALL | re.MULTILINE)


def target_of(link: str, origin: str) -> str | None:
    """Returns the path in the repository that a link leads to; None where it leads elsewhere.

    Args:
      link: As it is written, without a fragment.
      origin: The path in the repository of the text that holds it.
    """
    if not link or link.startswith("/") or re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def page_of(path: str) -> str:
    """Returns the path below docs/ of the page of a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def found(text: str, origin: str) -> Iterator[str]:
    """Yields the paths in the repository that the links of a text lead to."""
    for match in _LINK.finditer(text):
        path = match[3] and target_of(match[3].partition("#")[0], origin)
        if path:
            yield path


def rewrite(text: str, origin: str, page: str, is_file: Callable[[str], bool]) -> str:
    """Returns a text with its links to files made links to pages.

    A link to a folder, which has no page, becomes its text.

    Args:
      text: Markdown.
      origin: The path in the repository of the text.
      page: The path below docs/ of the page that shows it.
      is_file: Whether a path of the repository is a file.
    """

    def change(match: re.Match) -> str:
        link, _, fragment = (match[3] or "").partition("#")
        path = target_of(link, origin)
        if path is None or not (is_file(path) or path in PAGES):
            return match[0]  # code, another host, a place on this page, or broken: mkdocs warns
        to = posixpath.relpath(page_of(path), posixpath.dirname(page) or ".")
        return f"]({to}{'#' if fragment else ''}{fragment})"

    return _LINK.sub(change, text)
