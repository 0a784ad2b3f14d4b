"""A whole evaluation of twenty questions, in this process or in one that is to be killed."""

import json
import pathlib
import re

import jax

from configs import evaluate_zoo
from experiments import evaluate

# What depends on the clock, or on what else the machine does.
TIMES = re.compile(
    r"(.*_s|.*_ms|speedup.*|predicted_speedup|.*tokens_per_s|.*peak_bytes|costs|command|"
    r"(is_)?draft_cost(_told)?|conclusions|notes|environment)$"
)


def questions(folder: pathlib.Path, text: str) -> pathlib.Path:
    """Twenty questions of three categories; those of "writing" have two turns; a line is broken."""
    names = ("writing", "coding", "qa")
    rows = []
    for i in range(20):
        turns = [text[9 * i : 9 * i + 12], text[5 * i : 5 * i + 7]][: 2 if i % 3 == 0 else 1]
        rows.append(json.dumps(dict(question_id=i, category=names[i % 3], turns=turns)))
    path = folder / "questions.jsonl"
    path.write_text("\n".join([*rows[:7], '{"turns": ', *rows[7:]]) + "\n", encoding="utf-8")
    return path


def config_of(pair: pathlib.Path, data: pathlib.Path, **changes):
    """The config of a run on a tiny pair, with a draft that is not there."""
    config = evaluate_zoo.get_config()
    drafts = f"ngram,{pair / 'draft'},{pair / 'gone'}"
    config.update(target=str(pair / "target"), drafts=drafts, data=str(data), num_prompts=0)
    config.update(max_new_tokens=6, ks=(2,), batches=(1, 4), temperatures=(0.0, 1.0))
    config.update(rules=("match",), num_shown=1, has_acceptance_by_kind=True)
    config.update(changes)
    return config


def run(values: str, folder: str, cache: str) -> None:
    """Runs in a process of its own, with the compiled programs of another one."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config = evaluate_zoo.get_config()
    config.update(json.loads(values))
    evaluate.evaluate(config, folder)


def timeless(value):
    """A report without what depends on the clock."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if not TIMES.match(k)}
    return [timeless(v) for v in value] if isinstance(value, list) else value
