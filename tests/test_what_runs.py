"""What a run of the tests keeps, what is due in turn, and how the work is split."""

from __future__ import annotations

import collections
import os
import random
import subprocess
import tempfile

import pytest
from jax._src import compilation_cache
from support import cost, programs, turns


def test_tidying_removes_parts_of_programs_and_those_unread_for_longest(tmp_path):
    folder = tmp_path / "jax-0"
    folder.mkdir()
    whole = compilation_cache.compress_executable(os.urandom(1000))
    paths = [folder / f"{name}-cache" for name in ("old", "used", "new", "part", "empty")]
    for path, entry in zip(paths, [whole, whole, whole, whole[:-10], b""]):
        path.write_bytes(entry)
    programs.tidy(folder)
    assert sorted(folder.glob("*-cache")) == sorted(paths[:3])
    for path, read_s in zip(paths, (1e9, 3e9, 2e9)):
        os.utime(path, (read_s, 1e9))
    programs.tidy(folder, most_bytes=2 * len(whole))
    assert sorted(folder.glob("*-cache")) == sorted(paths[1:3])
    (tmp_path / "jax-1").mkdir()
    programs.tidy(tmp_path / "jax-1", most_bytes=len(whole))  # another version counts too
    assert list(folder.glob("*-cache")) == [paths[1]]


def test_programs_are_kept_in_the_users_cache_or_else_in_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("SPEC_JAX_TEST_CACHE", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert programs.root() == tmp_path / "cache" / "spec_jax" / "tests"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert programs.root() == tmp_path / "temporary" / "spec_jax" / "tests"
    monkeypatch.setenv("SPEC_JAX_TEST_CACHE", str(tmp_path / "given"))
    assert programs.folder().parent == tmp_path / "given"


FILES = {
    "spec_jax/room/part.py": "",
    "spec_jax/other.py": "",
    "docs/page.md": "",
    "tests/support/shared.py": "from spec_jax.room import part",
    "tests/room/test_room.py": "",
    "tests/test_direct.py": "import spec_jax.room.part",
    "tests/test_through.py": "from support import shared",
    "tests/test_other.py": "from spec_jax import other",
    "tests/test_page.py": "PAGES = 'docs'",
}


@pytest.fixture
def repository(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def git(repository, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(repository), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("spec_jax/room/part.py", "direct through room/room"),
        ("spec_jax/other.py", "other"),
        ("docs/page.md", "page"),
        ("tests/support/shared.py", "through"),
        ("tests/test_other.py", "other"),
        ("tests/test_gone.py", ""),
    ],
)
def test_the_tests_of_a_file_import_it_mirror_it_or_name_it(repository, changed, expected):
    names = {f"tests/test_{name}.py" for name in expected.split()}
    names = {name.replace("test_room/", "room/test_") for name in names}
    assert set(turns.tests_of([changed], repository)) == names


def test_every_test_has_its_turn_and_those_of_what_changed_have_every_one(repository):
    git(repository, "init", "-q")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "0")
    passed = repository.parent / "passed"
    of_now = lambda: turns.of_this_commit(3, passed, repository)
    assert of_now()["share"] is None  # the history is short
    ids = [f"tests/test_a.py::test_{i}" for i in range(60)]
    assert all(turns.is_due(test, of_now()) for test in ids)
    for i in range(25):
        git(repository, "commit", "-q", "--allow-empty", "-m", str(i))
    (repository / "spec_jax/other.py").write_text("A = 1")
    git(repository, "commit", "-qam", "changed")
    seen = []
    for _ in range(3):
        assert of_now()["files"] == ["tests/test_other.py"]
        assert turns.is_due("tests/test_other.py::test_a", of_now())
        seen += [test for test in ids if turns.is_due(test, of_now())]
        git(repository, "commit", "-q", "--allow-empty", "-m", "further")
    assert sorted(seen) == sorted(ids)
    passed.write_text(git(repository, "rev-parse", "HEAD~2") + "\n")
    assert of_now()["files"] == [] and "which passed" in of_now()["text"]
    (repository / "tests/test_new.py").touch()
    assert of_now()["files"] == ["tests/test_new.py"]  # before it is committed
    (repository / "pyproject.toml").touch()
    assert of_now()["share"] is None


def test_without_git_everything_runs(tmp_path):
    assert turns.of_this_commit(3, tmp_path / "passed", tmp_path)["share"] is None


def test_two_workers_end_together_whatever_the_tests_cost():
    draw = random.Random(0)
    costs = {f"f{i}": {"": draw.expovariate(1), "test_a": draw.expovariate(0.1)} for i in range(40)}
    ids = [f"{file}::test_{name}" for file in costs for name in ("a[0]", "a[1]", "b", "c")]
    ids += [f"large::test_a[{i}]" for i in range(50)]
    costs["large"] = {"test_a": 8.0}
    unit_of = cost.units(ids, costs, 2)
    assert unit_of == cost.units(ids[::-1], costs, 2) and set(unit_of) == set(ids)
    total_s = collections.Counter()
    for test, unit in unit_of.items():
        total_s[unit] += cost.expected_s(test, costs)
    assert list(total_s.values()) == sorted(total_s.values(), reverse=True)
    assert len({unit for test, unit in unit_of.items() if test.startswith("f1::")}) == 1
    ends_s = [0.0, 0.0]
    for s in total_s.values():  # who is free takes the next one
        ends_s[ends_s.index(min(ends_s))] += s
    assert max(ends_s) < 1.1 * min(ends_s)
