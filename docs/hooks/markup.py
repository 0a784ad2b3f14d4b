"""What becomes of a page's HTML: formulas are drawn by the browser, names lead to the reference."""

from __future__ import annotations

import ast
import collections
import html
import pathlib
import re

import spec_jax

_FORMULA = re.compile(
    r'<(span|div) class="arithmatex">(?:\\\((.*?)\\\)|\\\[(.*?)\\\])</\1>', re.DOTALL
)
_MATHJAX = re.compile(r"<script data-mkdocs-jupyter-mathjax.*?</script>\n?", re.DOTALL)
# Headings, links and blocks of code stay as they are.
_NAME = re.compile(r"(<(a|h[1-6]|pre)\b.*?</\2>)|<code>([A-Za-z_][\w.]*)(\(\))?</code>", re.DOTALL)


def plain_pipes(text: str) -> str:
    """Returns markdown whose tables have plain pipes in code: the forge wants them escaped there.

    Args:
      text: Markdown.
    """
    code = lambda match: match[0].replace(r"\|", "|")
    row = lambda match: re.sub(r"`[^`\n]+`", code, match[0])
    return re.sub(r"^ *\|.*$", row, text, flags=re.MULTILINE)


def formulas(page: str) -> str:
    """Returns a page with its formulas as MathML, which needs no program in the browser."""
    from latex2mathml import converter  # of the extra docs alone

    def draw(match: re.Match) -> str:
        is_block = match[3] is not None
        latex = html.unescape(match[3] if is_block else match[2])
        return converter.convert(latex.strip(), display="block" if is_block else "inline")

    return _FORMULA.sub(draw, page)


def without_mathjax(page: str) -> str:
    """Returns a page without the script of mkdocs-jupyter that fetches MathJax from a host."""
    return _MATHJAX.sub("", page)


def unsearched(page: str) -> str:
    """Returns a page of which the search does not find source code.

    Args:
      page: HTML.
    """
    source = (
        r'<(?:details class="mkdocstrings-source|div class="(?:highlight-ipynb|clipboard-copy-txt))'
    )
    return re.sub(source, lambda match: match[0].replace(" ", " data-search-exclude "), page)


def described(page: str) -> str:
    """Returns a notebook's page whose plots without a text have that of the heading above them.

    Args:
      page: HTML.
    """
    heading = ""

    def change(match: re.Match) -> str:
        nonlocal heading
        if match[1] is None:
            return f'alt="plot: {heading}"'
        heading = re.sub(r"<[^>]+>|¶", "", match[1]).strip()
        return match[0]

    return re.sub(r'<h[1-6][^>]*>(.*?)</h[1-6]>|alt="No description [^"]*"', change, page)


def known_names() -> dict[str, str]:
    """Returns the dotted names of what texts call by a name alone: classes with one of their own.

    What the package offers at its top goes by that name.
    """
    found: dict[str, list[str]] = collections.defaultdict(list)
    package = pathlib.Path(spec_jax.__file__).parent
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{module}.{node.name}")
    names = {name: places[0] for name, places in found.items() if len(places) == 1}
    return names | {name: f"spec_jax.{name}" for name in spec_jax.__all__}


def link_names(page: str, names: dict[str, str]) -> str:
    """Returns a page whose code that is such a name links to its place in the reference.

    Args:
      page: HTML.
      names: What texts call them, and their dotted names.
    """

    def link(match: re.Match) -> str:
        text = match[3] or ""
        dotted = names.get(text) or (text if text.startswith("spec_jax.") else None)
        if dotted is None:
            return match[0]
        return f'<autoref identifier="{dotted}" optional>{match[0]}</autoref>'

    return _NAME.sub(link, page)
