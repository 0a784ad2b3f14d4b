"""What experiments.make_head trains and how: the configs of its parts, and what tau to expect."""

from __future__ import annotations

import math
import pathlib

import jax
import numpy as np
from ml_collections import ConfigDict

from configs import evaluate_zoo, regenerate_zoo, train_head_default
from spec_jax.drafters import registry
from spec_jax.loading import LoadedModel

VIEWS = "views"  # the target's states of the text, until the head is trained
_LARGE = 8192  # U of a target that has more ids
# Tau by tokens trained on, of a target and an objective, K = 4, greedy, on questions of four kinds.
CURVES: dict[tuple[str, str], tuple[tuple[float, float], ...]] = {
    ("zoo/smollm2", "eagle3"): ((1.542e6, 1.52), (2.652e6, 1.71), (3.269e6, 1.78))
}


def expected_tau(target: str, objective: str, num_tokens: float) -> float | None:
    """Returns tau by the curve that was measured for a target; None where it has no such part."""
    curve = CURVES.get((target, objective))
    if not curve or num_tokens < curve[0][0]:
        return None
    tokens, taus = zip(*curve)
    return float(np.interp(math.log(num_tokens), np.log(tokens), taus))


def text_config(config: ConfigDict, num_prompts: int) -> ConfigDict:
    """Returns the config of experiments.regenerate."""
    text = regenerate_zoo.get_config()
    is_cpu = jax.default_backend() == "cpu"
    for name in ("target", "prompt_source", "prompts", "max_new_tokens", "seed"):
        text[name] = config[name]
    text.turns.first_words = config.first_words
    text.update(num_prompts=num_prompts, batch=config.rows, min_prompt_tokens=4)
    if not is_cpu:
        text.update(dtype="bfloat16", refill=config.rows)
    return text


def head_config(config: ConfigDict, folder: pathlib.Path, target: LoadedModel, steps: int):
    """Returns the config of experiments.train_head."""
    head = train_head_default.get_config()
    _, training = registry.objectives()[config.objective]
    size = config.draft_vocab_size
    if size is None:
        size = _LARGE if target.config.vocab_size > _LARGE else 0
    head.update(target=config.target, objective=config.objective, seed=config.seed, steps=steps)
    head.update(batch=config.batch, length=config.length, export_from="last")
    if "draft_vocab_size" in training.options:
        head.head.draft_vocab_size = size
    if "num_steps" in training.objective().options:
        head.loss.num_steps = config.k
    head.data.update(text="", responses=str(folder / "training.jsonl"))
    head.data.has_document_masks = target.model.can_rewind
    head.data.has_prompt_loss = config.prompt_source == "self"
    if jax.default_backend() == "cpu" and config.epochs > 1:
        head.data.view_cache = str(folder / VIEWS)
    # As tried: heads that begin with a map of least squares, and the others.
    rates = {"lr": 0.002} if training.objective().start else {"matrix_lr": 0.03}
    head.optimizer.update(**rates, warmup=max(1, min(20, steps // 10)))
    head.eval.update(every=0, num_draft=config.k)
    return head


def evaluation_config(config: ConfigDict, folder: pathlib.Path) -> ConfigDict:
    """Returns the config of experiments.evaluate."""
    found = evaluate_zoo.get_config()
    found.update(target=config.target, drafts=f"{folder / 'head' / 'export'},ngram")
    found.update(data=str(folder / "questions.jsonl"), num_prompts=0, ks=(config.k,))
    return found
