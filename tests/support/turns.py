"""What a landing runs of the exhaustive tier: a share in turn, and the tests of what changed.

The tests of a changed module are the test files that import it, themselves or by what they share
in ``tests``, and those in the folder of tests that mirrors its own. Of any other changed file they
are the test files that name it or its folder.

    python tests/support/turns.py    # records, beside the kept programs, that HEAD has passed
"""

import ast
import pathlib
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
EVERYTHING = {"pyproject.toml", "tests/conftest.py"}  # every test depends on them
_RECENT = 20  # commits whose changes are tested where none of them is known to have passed


def of_this_commit(turns: int, passed: pathlib.Path, root: pathlib.Path = ROOT) -> dict[str, Any]:
    """What the exhaustive tier runs now.

    Args:
      turns: how many shares there are.
      passed: the file of commits that have passed.
      root: of the repository.

    Returns:
      ``share``, from 0 (None: everything runs); ``turns``; ``files`` of tests that run whole; and
      ``text``, which says so.
    """

    def everything(why):
        return {"share": None, "turns": turns, "files": [], "text": f"everything runs: {why}"}

    try:
        commits = _git(root, "rev-list", "HEAD")
        is_shallow = _git(root, "rev-parse", "--is-shallow-repository") == ["true"]
    except (OSError, subprocess.CalledProcessError):
        return everything("there is no history of git")
    if is_shallow or len(commits) <= _RECENT:
        return everything("the history of git is short")
    known = set(passed.read_text().split()) if passed.exists() else set()
    base = next((commit for commit in commits if commit in known), commits[_RECENT])
    changed = set(_git(root, "diff", "--name-only", base))  # of the working tree, committed or not
    changed |= set(_git(root, "ls-files", "--others", "--exclude-standard"))
    if changed & EVERYTHING:
        return everything(f"{', '.join(sorted(changed & EVERYTHING))} changed since {base[:9]}")
    share, files = len(commits) % turns, tests_of(changed, root)
    since = "which passed" if base in known else f"{_RECENT} commits ago"
    text = f"share {share + 1} of {turns} (commit {len(commits)}), and whole the {len(files)} files"
    text += f" of what changed since {base[:9]}, {since}"
    return {"share": share, "turns": turns, "files": files, "text": text}


def is_due(test: str, turn: dict[str, Any]) -> bool:
    """Whether a test, given by its id, runs in this turn."""
    if turn["share"] is None or test.partition("::")[0] in turn["files"]:
        return True
    return zlib.crc32(test.encode()) % turn["turns"] == turn["share"]


def tests_of(changed: Iterable[str], root: pathlib.Path = ROOT) -> list[str]:
    """The files of tests of what changed, all relative to the root.

    Args:
      changed: files, some of which may be gone.
      root: of the repository.
    """
    changed, tests = set(changed), root / "tests"
    modules = {name for path in changed if path.endswith(".py") for name in _names(path)}
    others = {path for path in changed if not path.endswith(".py")}
    others |= {pathlib.Path(path).parent.name for path in others}
    folders = {mirror for path in changed for mirror in _mirrors(path)}
    imports = {path: set(_imports(path)) for path in sorted(tests.rglob("*.py"))}
    shared = {path.relative_to(tests).with_suffix("").as_posix(): path for path in imports}

    def is_of(path: pathlib.Path, seen: set[pathlib.Path]) -> bool:
        """Whether what changed is imported, directly or through modules of the tests."""
        seen.add(path)
        names = imports[path]
        through = (shared.get(name.replace(".", "/")) for name in names)
        return bool(names & modules) or any(p and p not in seen and is_of(p, seen) for p in through)

    found = []
    for path in imports:
        name = path.relative_to(root).as_posix()
        if not path.name.startswith("test_"):
            continue
        is_mirror = path.parent.relative_to(tests).as_posix() in folders
        words = set(re.findall(r"[\w./-]+", path.read_text(encoding="utf-8")))
        if name in changed or is_mirror or words & others or is_of(path, set()):
            found.append(name)
    return found


def _names(path: str) -> Iterator[str]:
    """The dotted names by which a module is imported, from the root or from ``tests``."""
    dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    yield dotted
    if dotted.startswith("tests."):
        yield dotted.removeprefix("tests.")


def _mirrors(path: str) -> Iterator[str]:
    """The folder in ``tests`` of a file of the package or of experiments."""
    top, *parts = path.split("/")[:-1] or [""]
    if top == "spec_jax" and parts:
        yield "/".join(parts)
    elif top in ("experiments", "configs"):
        yield "experiments"


def _imports(path: pathlib.Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _git(root: pathlib.Path, *arguments: str) -> list[str]:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def main() -> None:
    from support import programs

    if _git(ROOT, "status", "--porcelain"):
        print("what has passed is no commit: files differ from it")
    else:
        with open(programs.root() / "passed", "a", encoding="utf-8") as file:
            file.write(_git(ROOT, "rev-parse", "HEAD")[0] + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()
