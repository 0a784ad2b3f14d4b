"""The comment of a field becomes its description in the reference."""

from __future__ import annotations

from typing import Any

import griffe

from experiments.run.config_help import comments_of


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
    lines = attr.lines_collection[attr.filepath]
    above, beside = comments_of(lines, attr.lineno, attr.endlineno)
    # The shape stands beside the assignment and comes first.
    return ". ".join(filter(None, (beside.rstrip("."), above)))
