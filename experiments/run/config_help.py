"""The text of ``--help``: what a config file's own comments say of its keys, and their values."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import pathlib
import re
import tokenize
import types
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from experiments.run import lines
from spec_jax.config import sampler

ROOT = pathlib.Path(__file__).resolve().parents[2]
_IMPORTED = re.compile(r"^from configs import ([\w, ]+)$", re.MULTILINE)
_BASE = re.compile(r"^\s*config = (\w+)\.get_config\(\)", re.MULTILINE)


def comments_of(lines: Sequence[str], first: int, last: int) -> tuple[str, str]:
    """Returns the comment above some lines of code, and that beside them.

    Args:
      lines: The lines of the file.
      first: The first line of the code, counted from 1.
      last: Its last line.
    """
    above = []
    for line in reversed(lines[: first - 1]):
        if not line.lstrip().startswith("#"):
            break
        above.insert(0, line.strip().lstrip("# "))
    code = "\n".join(lines[first - 1 : last]).strip()
    beside = []
    with contextlib.suppress(tokenize.TokenError):  # of a bracket that is closed below
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.COMMENT and not token.string.startswith("# fmt:"):
                beside.append(token.string.lstrip("# "))
    return " ".join(above), " ".join(beside)


def comments(path: pathlib.Path) -> dict[str, str]:
    """Returns what the comments of a config file say, by key; dots for keys of sections.

    A comment explains the key on its line; lines of comments, the key on the line below. A file
    that begins with the config of another one has its comments too.

    Args:
      path: The config file.
    """
    source = path.read_text(encoding="utf-8")
    base = {}
    for name in _BASE.findall(source):
        if (path.parent / f"{name}.py").exists():
            base |= comments(path.parent / f"{name}.py")
    found = dict(base)

    def add(key: str, value: ast.expr, first: int) -> None:
        found.setdefault(key, "")
        inner = value.args[0] if isinstance(value, ast.Call) and value.args else value
        if isinstance(inner, ast.Dict):  # ConfigDict({...}), or update({...})
            for name, entry in zip(inner.keys, inner.values):
                if isinstance(name, ast.Constant):
                    add(f"{key}.{name.value}".lstrip("."), entry, name.lineno)
        elif said := " ".join(comments_of(source.splitlines(), first, value.end_lineno)).strip():
            is_more = bool(base.get(key))
            found[key] = f"{sentence(base[key])} {sentence(said)}" if is_more else said

    nodes = (x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Assign | ast.Call))
    for node in sorted(nodes, key=lambda x: x.lineno):
        is_call = isinstance(node, ast.Call)
        name = ast.unparse(node.func if is_call else node.targets[0])
        if name.split(".")[0] == "config" and (name.endswith(".update") or not is_call):
            key = name.removesuffix(".update").removeprefix("config").lstrip(".")
            add(key, node if is_call else node.value, node.lineno)
    return found


def sentence(text: str) -> str:
    """Returns a text as a sentence: with a capital letter and a full stop."""
    end = "" if not text or text.endswith((".", "!", "?", ":")) else "."
    return text[:1].upper() + text[1:] + end


def docstring(path: pathlib.Path) -> str:
    """Returns the docstring of a file."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of a config by their full names, with dots for those of sections."""
    values = {}
    for name in config:
        value = config.get(name)
        is_section = isinstance(value, ConfigDict | Mapping)
        values |= flat(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return values


def meanings(path: pathlib.Path) -> dict[str, tuple[Any, str]]:
    """Returns the value and the meaning of each key of a config file, in the file's order.

    A key without a comment has that of the first key of the same name in another section, or in a
    config that the file imports; or, in the section ``sampler``, the help of ``SamplerConfig``.
    """
    known = comments(path)
    spec = importlib.util.spec_from_file_location("config_of_help", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    values = flat(module.get_config())
    by_name: dict[str, str] = {}
    imported = ",".join(_IMPORTED.findall(path.read_text(encoding="utf-8"))).split(",")
    others = (path.parent / f"{name.strip()}.py" for name in imported if name)
    for key, said in [*known.items(), *(x for p in others for x in comments(p).items())]:
        if said:
            by_name.setdefault(key.rpartition(".")[2], said)
    order = {key: i for i, key in enumerate(known)}
    last = len(order)
    keys = sorted(values, key=lambda key: order.get(key, order.get(key.partition(".")[0], last)))

    def said(key):
        section, _, name = key.rpartition(".")
        option = sampler.options().get(name) if section == "sampler" else None
        return known.get(key) or by_name.get(name) or (option and option.metadata["help"]) or ""

    return {key: (values[key], said(key)) for key in keys}


def describe(path: pathlib.Path) -> str:
    """Returns a line for each key of a config file: its flag with its value, and its meaning."""
    return "\n".join(_line(f"config.{key}", *found) for key, found in meanings(path).items())


def _line(name: str, value: Any, said: str) -> str:
    """Returns a flag with a value as it is typed, and its meaning."""
    if isinstance(value, tuple | list):
        value = ",".join(map(str, value))
    flag = f"  --{name}={'' if value is None else value}"
    if not said:
        return flag
    indent = " " * (44 if lines.width() == 100 else 32)
    if len(flag) <= len(indent) - 2:
        return lines.fill(sentence(said), flag.ljust(len(indent)), indent)
    return f"{flag}\n{lines.fill(sentence(said), indent, indent)}"


def text(module: types.ModuleType, argv: Sequence[str], config_file: str | None) -> str:
    """Returns the text of ``--help``: what the experiment does, its flags, the keys of its config.

    Args:
      module: The main module.
      argv: The command line; the config file that ``--config`` names is described.
      config_file: The one that is described otherwise; None: the experiment has no config.
    """
    known = flags.FLAGS.get_key_flags_for_module(argv[0])
    known = sorted((flag for flag in known if flag.name != "config"), key=lambda flag: flag.name)
    parts = [module.__doc__.strip(), "", "Flags, with their values by default:"]
    parts += [_line(flag.name, flag.default, flag.help or "") for flag in known]
    if config_file is not None:
        given = [x.partition("=")[2] for x in argv[1:] if x.startswith("--config=")]
        path = pathlib.Path(given[-1] if given else config_file)
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        parts += [
            _line("config", shown, "A file of values for the keys below."),
            "",
            f"Keys of {shown}, with its values:",
            describe(path),
        ]
    return "\n".join(parts)
