"""A small training run of the experiments, in one process or in several.

    PYTHONPATH=tests python -m experiments.launch --processes=2 --devices=2 support.train_worker \
        --workdir=DIR --config.mesh=data:2,tensor:2
"""

import contextlib
import sys

from ml_collections import ConfigDict

from configs import train_head_default, train_zoo_target
from experiments import train_head, train_lm
from experiments.run import cli
from spec_jax import processes
from spec_jax.data import python_source
from spec_jax.train import view_cache

STEPS = 6


def get_config():
    return ConfigDict(
        {"what": "lm", "mesh": "", "is_fully_sharded": False, "files": "", "steps": STEPS}
        | {"views": ""}
    )


@contextlib.contextmanager
def few_documents():
    """A small corpus, so that a run takes seconds."""
    whole = python_source.documents
    found = whole("held_out")
    few = {"held_out": found[:2], "train": found[2:6]}
    python_source.documents = lambda split, **options: few[split]
    try:
        yield
    finally:
        python_source.documents = whole


def lm_config():
    config = train_zoo_target.get_config()
    settings = dict(eval_windows=4, log_every=1, eval_every=3, checkpoint_every_s=10_000)
    options = dict(long_batch=4, long_length=32, eval_length=64, eval_batch=4, **settings)
    config.update(vocab_size=300, steps=STEPS, batch=4, length=32, long_share=0.0, **options)
    config.model.update(hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    config.model.update(num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    config.model.update(max_position_embeddings=64)
    config.optimizer.update(name="adamw", lr=1e-2, warmup=2)
    return config


def head_config(files):
    """The head in a folder, trained further for the target beside it on the texts beside it."""
    config = train_head_default.get_config()
    config.target, config.data.text = f"{files}/target", f"{files}/texts.jsonl"
    config.data.held_out_share, config.objective = 0.2, "eagle1"
    config.head.init_from = f"{files}/head"
    config.steps, config.batch, config.length, config.log_every = STEPS, 4, 18, 1
    config.optimizer.update({"name": "adamw", "lr": 1e-2, "warmup": 1})
    options = dict(num_prompts=2, max_new_tokens=8, batch=2, windows=4)
    config.eval.update(every=3, num_draft=2, prompts=f"{files}/prompts.jsonl", **options)
    return config


def record_what_is_stored():
    """Each process writes the names of its views' files beside their folder."""
    save = view_cache.save_file

    def run(arrays, path):
        with open(path.parents[1] / f"stored_by_{processes.index()}", "a") as file:
            print(path.stem, file=file)
        save(arrays, path)

    view_cache.save_file = run


def train(what, workdir, files="", views="", **changes):
    """Runs one of the experiments; ``what`` is "lm" or "head"."""
    config = lm_config() if what == "lm" else head_config(files)
    config.update(changes)
    if views:
        config.data.view_cache = views
    with few_documents():
        return (train_lm if what == "lm" else train_head).train(config, workdir)


def main():
    values = _CONFIG.value.to_dict()
    record_what_is_stored()
    train(values.pop("what"), _WORKDIR.value, **values)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(sys.modules[__name__], "The run's folder.")
    cli.run(main)
