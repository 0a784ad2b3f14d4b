"""Question sets by name: loaded by the package ``datasets`` or from the hub, or what to fetch."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from spec_jax.data.records import read_rows
from spec_jax.errors import ConfigError, did_you_mean


class QuestionSource(NamedTuple):
    """Where a question set lies.

    Attributes:
      dataset: The arguments of ``datasets.load_dataset``; empty if the hub does not have it.
      split: The split that holds the questions.
      file: A file of rows in the dataset's repository of the hub; empty if there is none.
      url: The publisher's own file.
    """

    dataset: tuple[str, ...]
    split: str
    file: str
    url: str


_PROBE_S = 5.0  # how long the hub may take to answer
_GITHUB = "https://raw.githubusercontent.com"
SOURCES = {
    "humaneval": QuestionSource(
        ("openai/openai_humaneval",),
        "test",
        "",
        f"{_GITHUB}/openai/human-eval/master/data/HumanEval.jsonl.gz",
    ),
    "gsm8k": QuestionSource(
        ("openai/gsm8k", "main"),
        "test",
        "",
        f"{_GITHUB}/openai/grade-school-math/master/grade_school_math/data/test.jsonl",
    ),
    "mtbench": QuestionSource(
        ("HuggingFaceH4/mt_bench_prompts",),
        "train",
        "raw/question.jsonl",
        f"{_GITHUB}/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    "specbench": QuestionSource(
        (), "", "", f"{_GITHUB}/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
    ),
}


def is_name(data: str) -> bool:
    """Whether ``data`` names a question set. A file of that name is given as ./NAME."""
    return data in SOURCES


def check(data: str) -> None:
    """Raises ConfigError unless ``data`` is empty, the name of a set, or a file."""
    if not data or is_name(data) or pathlib.Path(data).is_file():
        return
    hint = did_you_mean(data.lower(), SOURCES)
    raise ConfigError(
        f"data is {data!r}, which cannot be read{hint}; expected one of {', '.join(SOURCES)}, or "
        "an existing file of questions"
    )


def rows(name: str) -> list[tuple[Any, str]]:
    """Returns the rows of a question set, each with its place for messages.

    Args:
      name: One of ``SOURCES``.

    Raises:
      ConfigError: It cannot be loaded here; the message says what to install or to fetch.
    """
    source = SOURCES[name]
    tried = []
    if source.dataset:
        with _without_retries(source.dataset[0]) as silence:
            try:
                import datasets

                found = datasets.load_dataset(*source.dataset, split=source.split)
                numbered = enumerate(found, 1)
                return [(_usual(dict(row)), f"{name}: row {number}") for number, row in numbered]
            except ImportError:
                tried.append("the package datasets is not installed (pip install datasets)")
            except Exception as error:  # of many types: no network, no such file, a changed format
                tried.append(f"datasets: {_first_line(error)}")
            if source.file:
                try:
                    from huggingface_hub import hf_hub_download

                    path = hf_hub_download(source.dataset[0], source.file, repo_type="dataset")
                    return [(_usual(row), place) for row, place in read_rows(pathlib.Path(path))]
                except Exception as error:
                    tried.append(f"hub: {silence or _first_line(error)}")
    else:
        tried.append("the hub does not have it")
    file = source.url.rpartition("/")[2]
    raise ConfigError(
        f"data is {name!r}, which is not loaded: {'; '.join(tried)}. Where there is a network, run "
        f"`curl -LO {source.url}`; then --config.data={file}"
    )


@contextlib.contextmanager
def _without_retries(repo: str) -> Iterator[str]:
    """Yields why the hub cannot be reached, empty if it can.

    Where it does not answer, its libraries only use their caches meanwhile: by themselves each of
    them would ask it six times, for 23 seconds, and they have no option against that.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    before = constants.HF_HUB_OFFLINE
    silence = ""
    if not before:
        try:
            url = hub.hf_hub_url(repo, "README.md", repo_type="dataset")
            hub.get_hf_file_metadata(url, timeout=_PROBE_S)
        except errors.HfHubHTTPError:  # it has answered
            pass
        except Exception as error:  # of the library that the hub's version uses
            silence = f"it does not answer ({_first_line(error)})"
    constants.HF_HUB_OFFLINE = before or bool(silence)
    try:
        yield silence
    finally:
        constants.HF_HUB_OFFLINE = before


def _usual(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row whose turns are called so, as in MT-bench's own file."""
    if not isinstance(row.get("prompt"), list):
        return row
    names = {"prompt": "turns", "prompt_id": "question_id"}
    return {names.get(key, key): value for key, value in row.items()}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
