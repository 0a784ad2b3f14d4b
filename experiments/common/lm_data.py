"""The data of ``experiments.train_lm``: the corpus, and text that a teacher wrote."""

from __future__ import annotations

import functools
import pathlib

import numpy as np
from ml_collections import ConfigDict

from spec_jax import processes
from spec_jax.config import SamplerConfig
from spec_jax.data import python_source, tokens
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedModel
from spec_jax.meshes import mesh_of
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.progress import Progress


def load_text(config: ConfigDict, teacher: LoadedModel | None):
    """Returns the tokenizer, training tokens i32[T], held-out tokens, and their text's bytes."""
    train = python_source.documents("train", tests_share=config.tests_share)
    held_out = python_source.documents("held_out")
    if teacher is not None:
        tokenizer = teacher.tokenizer
    else:
        backend = tokens.train_tokenizer((text for _, text in train), config.vocab_size)
        special = {"bos_token": tokens.END_OF_TEXT, "eos_token": tokens.END_OF_TEXT}
        extra = {
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.model.max_position_embeddings,
        }
        tokenizer = Tokenizer(backend, special | extra)
    held_out_bytes = sum(len(text.encode()) for _, text in held_out)
    return (
        tokenizer,
        tokens.pack(tokenizer.backend, train),
        tokens.pack(tokenizer.backend, held_out),
        held_out_bytes,
    )


def continuations(
    config: ConfigDict, teacher: LoadedModel | None, text, path: pathlib.Path
) -> np.ndarray | None:
    """Returns training windows that the teacher continued, packed; None if ``own_share`` is 0.

    They are sampled once (even batches at temperature 1, odd ones at 0.5) and stored in ``path``,
    so that a resumed run has the same tokens.
    """
    if teacher is None or not config.own_share:
        return None
    if processes.from_writer(path.exists()):
        return np.load(path)
    decoder = SpeculativeDecoder(teacher, mesh=mesh_of(teacher.params))
    end, prompt, batch = text[0], config.own_prompt, config.own_batch
    parts = []
    with Progress(config.own_batches, "the teacher writes", every_s=10) as bar:
        for i in range(config.own_batches):
            ids = tokens.batch_at(text, i, seed=config.seed + 1, batch=batch, length=prompt - 1)
            sampler = SamplerConfig(temperature=0.5 if i % 2 else 1.0, seed=i * batch)
            found = decoder.generate(
                ids.tolist(), config.length - prompt, sampler=sampler, stop_tokens=()
            )
            for row, generation in zip(ids, found):
                parts += [[end], row, generation.tokens]
            bar.step(f"batch of {batch} rows")
    whole = np.concatenate([*parts, [end]]).astype(np.int32)
    if processes.is_writer():
        partial = path.with_suffix(".partial.npy")
        np.save(partial, whole)
        partial.replace(path)
    return whole


def batch_for(config: ConfigDict, text, own, step: int) -> np.ndarray:
    """Returns the windows of a step: of the text, and of the teacher's ``own`` if there are any.

    The last ``long_share`` of the run has longer windows, only of the text.
    """
    at = functools.partial(tokens.batch_at, step=step, seed=config.seed)
    if step >= config.steps - round(config.steps * config.long_share):
        return at(text, batch=config.long_batch, length=config.long_length)
    n_own = 0 if own is None else round(config.batch * config.own_share)
    sources = [(text, config.batch - n_own), (own, n_own)]
    return np.concatenate([at(s, batch=n, length=config.length) for s, n in sources if n])
