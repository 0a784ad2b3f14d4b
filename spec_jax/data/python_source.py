"""The source of the running interpreter's standard library, as documents.

Every machine with Python has this corpus. Its files depend on the version of the interpreter and
on whether the ``test`` package is installed, so a run records both. The modules in ``HELD_OUT``
and their tests are never trained on.
"""

from __future__ import annotations

import ast
import collections
import itertools
import pathlib
import random
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

from spec_jax.data.splits import check_split, unit_hash
from spec_jax.errors import ConfigError

# Readable modules that are a single file in Python 3.11 to 3.14.
HELD_OUT = (
    "bisect",
    "calendar",
    "colorsys",
    "configparser",
    "csv",
    "difflib",
    "fileinput",
    "fractions",
    "graphlib",
    "heapq",
    "netrc",
    "queue",
    "sched",
    "shlex",
    "statistics",
    "textwrap",
)

# Installed packages, generated tables, and deliberately broken files of the test suite.
_SKIPPED_DIRECTORIES = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
        "lib2to3",
        "lib-dynload",
        "bad_coding",
        "badsyntax",
        "encoded_modules",
    }
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "bad_", "badsyntax")
_MAX_LINE = 300  # characters; longer lines are tables, not code
_MAX_DIGIT_SHARE = 0.2  # of the non-blank characters
_MAX_PROMPT = 700  # characters
_MIN_BODY = 3  # lines of a function that a prompt is made of


class Prompt(NamedTuple):
    """A held-out function up to the end of its docstring, and the body that follows."""

    name: str  # module.qualified_name
    text: str  # preceding code of the module, signature, docstring; no newline at the end
    reference: str  # the body in the library, beginning with a newline


def documents(
    split: str, *, tests_share: float = 1.0, counts: collections.Counter | None = None
) -> list[tuple[str, str]]:
    """Reads one split of the corpus.

    The result is the same for one installation: files are sorted by name and exact duplicates
    are dropped. "held_out" is the modules of ``HELD_OUT`` without their tests. "train" is
    everything else, without the tests of ``HELD_OUT``.

    Args:
      split: "train" or "held_out".
      tests_share: The part, in [0, 1], of the standard library's own test files that "train"
        holds. They are chosen by their names alone.
      counts: Gets the number of "documents", and of files that are left out: of the
        "other_split", "tests" beyond the share, "duplicates", and "not_code".

    Returns:
      Pairs of a name, which is the path below the library with ``/``, and a text.

    Raises:
      ConfigError: The split is unknown, the share is outside [0, 1], or this interpreter does
        not have a held-out module.
    """
    check_split(split)
    if not 0.0 <= tests_share <= 1.0:
        raise ConfigError(f"tests_share is {tests_share!r}; expected a number in [0, 1]")
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    counts = collections.Counter() if counts is None else counts
    found = []
    if split == "held_out":
        for module in HELD_OUT:
            text = _read(root / f"{module}.py")
            if text is None:
                raise ConfigError(
                    f"the standard library at {root} has no readable {module}.py; expected an "
                    "interpreter installed with its source"
                )
            found.append((f"{module}.py", text))
        counts["documents"] += len(found)
        return found
    seen = set()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        folders = relative.parts[:-1]
        is_foreign = any(f in _SKIPPED_DIRECTORIES or f.startswith("config-") for f in folders)
        if is_foreign or relative.name.startswith(_SKIPPED_PREFIXES):
            continue
        name = relative.as_posix()
        is_test = any(folder in ("test", "tests", "idle_test") for folder in folders)
        if is_held_out(relative):
            counts["other_split"] += 1
        elif is_test and unit_hash(name.encode()) >= tests_share:
            counts["tests"] += 1
        elif (text := _read(path)) in seen:
            counts["duplicates"] += 1
        elif text is None or not _is_prose_like(text):
            counts["not_code"] += 1
        else:
            counts["documents"] += 1
            seen.add(text)
            found.append((name, text))
    return found


def is_held_out(relative: pathlib.PurePath) -> bool:
    """Whether a path below the library is a held-out module or one of its tests."""
    stems = [pathlib.PurePath(part).stem for part in relative.parts]
    if len(stems) == 1:
        return stems[0] in HELD_OUT
    names = [s.removeprefix("test_") for s in stems if s.startswith("test_")]
    return any(n == m or n.startswith(m + "_") for n in names for m in HELD_OUT)


def held_out_prompts(n: int, seed: int) -> list[Prompt]:
    """Draws ``n`` different functions of the held-out modules as prompts.

    A prompt is the module's code before the function (whole statements only), the function's
    signature and its docstring, in at most ``_MAX_PROMPT`` characters: the code before the function
    is cut to fit. A model continues with the body. The draw depends on the arguments and the
    installed library alone.

    Args:
      n: The number of prompts.
      seed: The seed that chooses and orders the functions.

    Raises:
      ConfigError: Fewer than ``n`` functions qualify.
    """
    found = []
    for name, text in documents("held_out"):
        found += _functions(name.removesuffix(".py"), text)
    if not 0 <= n <= len(found):
        raise ConfigError(
            f"{n} prompts asked for; the held-out modules have {len(found)} functions that qualify"
        )
    return random.Random(seed).sample(found, n)


def train_pieces(seed: int, *, max_chars: int, tests_share: float = 1.0) -> Iterator[str]:
    """Draws pieces of the split "train", without end.

    A piece begins with the line of a character that is drawn uniformly from the corpus. Piece i
    depends on the arguments, i and the installed library alone.

    Args:
      seed: The seed that chooses the pieces.
      max_chars: The longest piece, in characters; it also ends with its document.
      tests_share: See ``documents``.
    """
    texts = [text for _, text in documents("train", tests_share=tests_share)]
    ends = list(itertools.accumulate(map(len, texts)))
    for index in itertools.count():
        draw = random.Random(f"{seed} {index}")
        (text,) = draw.choices(texts, cum_weights=ends)
        begin = text.rfind("\n", 0, draw.randrange(len(text))) + 1
        yield text[begin : begin + max_chars]


def _functions(module: str, text: str) -> list[Prompt]:
    """Returns the functions of a module that have a docstring, and a body that is long enough."""
    lines = text.splitlines()
    tree = ast.parse(text)
    # (node, qualified name) of every statement of the module and of its classes.
    statements = []
    for node in tree.body:
        statements.append((node, getattr(node, "name", "")))
        if isinstance(node, ast.ClassDef):
            statements += [(m, f"{node.name}.{getattr(m, 'name', '')}") for m in node.body]
    starts = sorted({_first_line(node) for node, _ in statements})
    prompts = []
    for node, name in statements:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node) is None or len(node.body) < 2:
            continue
        end = node.body[0].end_lineno
        if node.end_lineno - end < _MIN_BODY:
            continue
        first = _first_line(node)
        for start in [s for s in starts if s <= first]:
            prompt = "\n".join(lines[start:end]).rstrip()
            if len(prompt) <= _MAX_PROMPT:
                body = "\n".join(["", *lines[end : node.end_lineno]])
                prompts.append(Prompt(f"{module}.{name}", prompt, body))
                break
    return prompts


def _first_line(node: ast.stmt) -> int:
    """Returns the zero-based line on which a statement or its first decorator begins."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)]) - 1


def _read(path: pathlib.Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() + "\n"
    except (OSError, UnicodeDecodeError):
        return None


def _is_prose_like(text: str) -> bool:
    """Whether a file reads as code: no table of numbers, no line longer than ``_MAX_LINE``."""
    solid = [c for c in text if not c.isspace()]
    if len(solid) < 64 or max(map(len, text.splitlines())) > _MAX_LINE:
        return False
    return sum(c.isdigit() for c in solid) / len(solid) <= _MAX_DIGIT_SHARE
