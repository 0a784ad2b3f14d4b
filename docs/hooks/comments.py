"""The comment of a field becomes its description in the reference."""

from __future__ import annotations

import io
import tokenize
from typing import Any

import griffe


def comment_of(lines: list[str], first: int, last: int) -> str:
    """Returns the comments above and after an assignment, as one text.

    Args:
      lines: The lines of the file.
      first: The assignment's first line, counted from 1.
      last: Its last line.
    """
    above = []
    for line in reversed(lines[: first - 1]):
        if not line.lstrip().startswith("#"):
            break
        above.insert(0, line.strip().lstrip("# "))
    code = "\n".join(lines[first - 1 : last]).strip()
    found = [
        t.string
        for t in tokenize.generate_tokens(io.StringIO(code).readline)
        if t.type == tokenize.COMMENT
    ]
    after = [x.lstrip("# ") for x in found if not x.startswith("# fmt:")]
    # The shape stands after the assignment and comes first.
    return ". ".join(filter(None, (" ".join(after).rstrip("."), " ".join(above))))


class Comments(griffe.Extension):
    """Adds what a comment says of a field or a constant to the reference, and no name twice."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Adds the fields whose meaning stands in a comment to their class's docstring."""
        text = cls.docstring.value if cls.docstring else ""
        fields = {
            name: _said(field)
            for name, field in cls.members.items()
            if field.is_attribute
            and not field.is_alias
            and "property" not in field.labels
            and field.annotation
            and field.docstring is None
            and not name.startswith("_")
        }
        lines = [f"  {name}: {comment}" for name, comment in fields.items() if comment]
        if lines and "Attributes:" not in text:
            if cls.docstring is None:
                cls.docstring = griffe.Docstring("", parent=cls, parser="google")
            cls.docstring.value = "\n".join([text, "", "Attributes:", *lines]).strip()

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Gives a constant of a module the text of its comment."""
        if attr.parent.is_module and attr.docstring is None and (said := _said(attr)):
            attr.docstring = griffe.Docstring(said, parent=attr, parser="google")

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Leaves what the package offers at its top to that page alone."""
        if pkg.name == "spec_jax":
            tops = [pkg[name].final_target for name in pkg.exports if pkg[name].is_alias]
            for top in tops:
                top.public = False
            for module in pkg.modules.values():
                _hide(module, {top.path for top in tops})


def _hide(module: griffe.Module, paths: set[str]) -> None:
    for name in module.exports or ():
        if module[name].is_alias and module[name].final_target.path in paths:
            module[name].public = False
    for inner in module.modules.values():
        _hide(inner, paths)


def _said(attr: griffe.Attribute) -> str:
    return comment_of(attr.lines_collection[attr.filepath], attr.lineno, attr.endlineno)
