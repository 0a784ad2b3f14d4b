"""The comment of a field becomes its description in the reference."""

from __future__ import annotations

import io
import tokenize
from typing import Any

import griffe


def comment_of(lines: list[str], first: int, last: int) -> str:
    """Returns the comments above and behind an assignment, as one text.

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
    found = [t.string for t in tokenize.generate_tokens(io.StringIO(code).readline)
             if t.type == tokenize.COMMENT]  # fmt: skip
    behind = [x.lstrip("# ") for x in found if not x.startswith("# fmt:")]
    # The shape stands behind the assignment and comes first.
    return ". ".join(filter(None, (" ".join(behind).rstrip("."), " ".join(above))))


class FieldComments(griffe.Extension):
    """Adds the fields whose meaning stands in a comment to their class's docstring."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Looks at one class, when its fields are known."""
        text = cls.docstring.value if cls.docstring else ""
        said = {
            name: comment_of(field.lines_collection[field.filepath], field.lineno, field.endlineno)
            for name, field in cls.members.items()
            if field.is_attribute and not field.is_alias and "property" not in field.labels
            and field.annotation and field.docstring is None and not name.startswith("_")
        }  # fmt: skip
        lines = [f"  {name}: {comment}" for name, comment in said.items() if comment]
        if lines and "Attributes:" not in text:
            if cls.docstring is None:
                cls.docstring = griffe.Docstring("", parent=cls, parser="google")
            cls.docstring.value = "\n".join([text, "", "Attributes:", *lines]).strip()
