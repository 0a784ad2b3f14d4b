"""The data of ``experiments.train_lm``: a text, and what a teacher wrote after parts of it."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

import numpy as np
from ml_collections import ConfigDict

from experiments.training import training_text
from spec_jax import processes
from spec_jax.config import SamplerConfig
from spec_jax.data import tokens
from spec_jax.data.batches import Corpus, window_batches
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedModel
from spec_jax.meshes import mesh_of
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.progress import Progress


def load_text(
    config: ConfigDict, teacher: LoadedModel | None, folder: pathlib.Path
) -> tuple[Tokenizer, Corpus, Corpus]:
    """Returns the tokenizer, the text to train on and the held-out text.

    The tokenizer is the teacher's; without a teacher it is trained on the text.
    """
    if teacher is not None:
        tokenizer = teacher.tokenizer
    else:
        texts = training_text.texts_of(config.data)
        backend = tokens.train_tokenizer(texts, config.vocab_size)
        special = {"bos_token": tokens.END_OF_TEXT, "eos_token": tokens.END_OF_TEXT}
        extra = {
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.model.max_position_embeddings,
        }
        tokenizer = Tokenizer(backend, special | extra)
    return tokenizer, *training_text.load(config.data, tokenizer, folder)


def continuations(
    config: ConfigDict, teacher: LoadedModel | None, text: Corpus, path: pathlib.Path
) -> Corpus | None:
    """Returns training windows that the teacher continued, packed; None if ``own_share`` is 0.

    They are sampled once (even batches at temperature 1, odd ones at 0.5) and stored in ``path``,
    so that a resumed run has the same tokens.
    """
    if teacher is None or not config.own_share:
        return None
    if not processes.from_writer(path.exists()):
        whole = _continue(config, teacher, text)
        if processes.is_writer():
            partial = path.with_suffix(".partial.npy")
            np.save(partial, whole)
            partial.replace(path)
        processes.from_writer(None)
    return Corpus("the teacher's text", np.load(path))


def _continue(config: ConfigDict, teacher: LoadedModel, text: Corpus) -> np.ndarray:
    decoder = SpeculativeDecoder(teacher, mesh=mesh_of(teacher.params))
    end, prompt, batch = text.tokens[:1], config.own_prompt, config.own_batch
    begun = window_batches([text], [1.0], seed=config.seed + 1, batch=batch, length=prompt)
    parts = []
    with Progress(config.own_batches, "the teacher writes", every_s=10) as bar:
        for i in range(config.own_batches):
            ids = begun[i]["tokens"]
            sampler = SamplerConfig(temperature=0.5 if i % 2 else 1.0, seed=i * batch)
            found = decoder.generate(
                ids.tolist(), config.length - prompt, sampler=sampler, stop_tokens=()
            )
            for row, generation in zip(ids, found):
                parts += [end, row, generation.tokens]
            bar.step(f"batch of {batch} rows")
    return np.concatenate([*parts, end]).astype(np.int32)


def batches(
    config: ConfigDict, text: Corpus, own: Corpus | None
) -> Callable[[int], np.ndarray]:
    """Returns a function of a step that returns its windows, one token longer than their length.

    They are of the text, and a share of the teacher's ``own`` if there is any. The last
    ``long_share`` of the run has longer windows, only of the text.
    """
    draw = functools.partial(window_batches, seed=config.seed)
    texts, shares = [text], [1.0]
    if own is not None:
        texts, shares = [text, own], [1.0 - config.own_share, config.own_share]
    usual = draw(texts, shares, batch=config.batch, length=config.length + 1)
    first_long, longer = config.steps - round(config.steps * config.long_share), None
    if first_long < config.steps:
        longer = draw([text], [1.0], batch=config.long_batch, length=config.long_length + 1)
    return lambda step: (usual if step < first_long else longer)[step]["tokens"]
