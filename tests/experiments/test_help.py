"""``--help`` of the experiments: what a config file's own comments say, with its values."""

import pathlib
import subprocess
import sys

import pytest

from experiments.run import config_help

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_of_every_config_has_a_meaning(path):
    found = config_help.meanings(path)
    assert [key for key, (_, said) in found.items() if not said] == []
    text = config_help.describe(path)
    assert all(f"--config.{key}=" in text for key in found)
    assert all(len(line) <= 80 or " " not in line.strip() for line in text.splitlines())


def test_comments_belong_to_the_keys_beside_and_below_them(tmp_path):
    (tmp_path / "base.py").write_text(
        "from ml_collections import ConfigDict\n\n\ndef get_config():\n    config = ConfigDict()\n"
        "    config.ks = (2, 4)  # drafted tokens\n    # Above it, on\n    # two lines.\n"
        '    config.name = "# no comment"\n    config.sampler = ConfigDict({  # of all\n'
        '        "top_k": 0,  # how many\n        "inner": {"a": 1},  # deep\n    })\n'
        "    config.top_k = 7\n    return config\n"
    )
    found = config_help.meanings(tmp_path / "base.py")
    assert found == {
        "ks": ((2, 4), "drafted tokens"),
        "name": ("# no comment", "Above it, on two lines."),
        "sampler.top_k": (0, "how many"),
        "sampler.inner.a": (1, "deep"),
        "top_k": (7, "how many"),
    }
    (tmp_path / "derived.py").write_text(
        "import sys\nsys.path.insert(0, __file__.rpartition('/')[0])\nimport base\n\n\n"
        "def get_config():\n    config = base.get_config()\n    config.ks = (3,)  # one is enough\n"
        '    config.sampler.update({\n        "top_k": 5,  # few\n    })\n    return config\n'
    )
    derived = config_help.meanings(tmp_path / "derived.py")
    assert derived["ks"] == ((3,), "Drafted tokens. One is enough.")
    assert derived["sampler.top_k"] == (5, "How many. Few.")
    sys.path.remove(str(tmp_path))
    sys.modules.pop("base")


@pytest.mark.exhaustive
def test_help_shows_flags_and_keys():
    command = [sys.executable, "-m", "experiments.decode", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert "python -m experiments.decode" in done.stdout and "--workdir=" in done.stdout
    key = "--config.repeats=2            Turns of each batch; their median counts."
    assert key in done.stdout
