"""The experiment of ``experiments.train_lm``: data, model, loss, and the loop's functions."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

import spec_jax
from configs import train_zoo_target
from experiments.run import cli, inputs
from experiments.training import text as texts
from experiments.training.run import Exported
from spec_jax import processes
from spec_jax.config import SamplerConfig
from spec_jax.data import tokens
from spec_jax.data.batches import Corpus, window_batches
from spec_jax.drafters.standalone import objective
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.evaluation import teacher_forced
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.loading import LoadedModel, load_model
from spec_jax.meshes import mesh_of
from spec_jax.models import checkpoint, transformer
from spec_jax.models.checks import is_integer
from spec_jax.models.config import text_part
from spec_jax.models.families import family_of_type
from spec_jax.models.files import read_json
from spec_jax.models.params import num_params, placement
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.progress import Progress
from spec_jax.sharding import replicate
from spec_jax.show.summary import count_text
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.log import Log
from spec_jax.train.means import merge, report
from spec_jax.train.optimizer import make_optimizer
from spec_jax.train.placement import Placement
from spec_jax.train.step import TrainState, train_step

FREE = (
    "log_every",
    "eval_every",
    "eval_windows",
    "eval_prompts",
    "eval_new_tokens",
    "eval_prompt_tokens",
    "eval_num_draft",
    "checkpoint_every_s",
    "mesh",
    "is_fully_sharded",
)


def validate(config: ConfigDict) -> None:
    """Raises ConfigError if a key is unknown or a value cannot be trained with."""
    cli.check_keys(config, train_zoo_target.get_config())
    cli.require_positive(
        config,
        "steps batch length long_batch long_length eval_batch eval_length log_every eval_every",
    )
    texts.validate(config)
    for name in ("long_share", "own_share", "optimizer.decay_share"):
        share = config.optimizer.decay_share if "." in name else config[name]
        cli.require(0.0 <= share <= 1.0, config, name, "a number in [0, 1]")
    longest = max(config.length, config.long_length, config.eval_length)
    limit = stated_model(config).get("max_position_embeddings", longest)
    if not is_integer(limit):
        raise ConfigError(f"max_position_embeddings is {limit!r}; expected an integer")
    if longest > limit:
        raise ConfigError(f"windows of {longest} tokens exceed max_position_embeddings {limit}")


def stated_model(config: ConfigDict) -> dict[str, Any]:
    """Returns the keys of a config.json that say what is trained, without a vocabulary.

    Raises:
      ConfigError: The family of ``model_json`` is not supported.
      WeightsError: There is no such file.
    """
    if not config.model_json:
        return config.model.to_dict()
    hf = dict(text_part(read_json(pathlib.Path(config.model_json))))
    family_of_type(hf.get("model_type"))
    return hf


def load_text(
    config: ConfigDict, teacher: LoadedModel | None, folder: pathlib.Path
) -> tuple[Tokenizer, Corpus, Corpus]:
    """Returns the tokenizer, the text to train on and the held-out text.

    The tokenizer is the teacher's; without a teacher it is trained on the text.

    Args:
      config: See ``configs/train_zoo_target.py``.
      teacher: The model to distil from, or None.
      folder: The folder for packed documents.
    """
    if teacher is not None:
        tokenizer = teacher.tokenizer
    else:
        documents = texts.texts_of(config.data)
        backend = tokens.train_tokenizer(documents, config.vocab_size)
        special = {"bos_token": tokens.END_OF_TEXT, "eos_token": tokens.END_OF_TEXT}
        extra = {
            "clean_up_tokenization_spaces": False,
            "model_max_length": stated_model(config).get("max_position_embeddings"),
        }
        tokenizer = Tokenizer(backend, special | extra)
    return tokenizer, *texts.load(config.data, tokenizer, folder)


def continuations(
    config: ConfigDict, teacher: LoadedModel | None, text: Corpus, folder: pathlib.Path
) -> Corpus | None:
    """Returns training windows that the teacher continued, packed; None if ``own_share`` is 0.

    They are sampled once (even batches at temperature 1, odd ones at 0.5) and stored in the folder,
    so that a resumed run has the same tokens. The file's name is made of what they depend on.

    Args:
      config: See ``configs/train_zoo_target.py``.
      teacher: The model that continues; None if there is none.
      text: The training text, whose windows are begun.
      folder: The folder of the run.
    """
    if teacher is None or not config.own_share:
        return None
    weights = inputs.of_path(config.teacher) if processes.is_writer() else None
    values = [config[key] for key in ("seed", "length", "own_batches", "own_batch", "own_prompt")]
    known = [spec_jax.__version__, weights, texts.fingerprint([text]), values]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
    path = folder / f"continuations.{processes.from_writer(digest)}.npy"
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
    end = np.asarray([tokens.separator_id(teacher.tokenizer)])
    prompt = config.own_prompt
    batch = config.own_batch
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


class LmExperiment:
    """Data, model, loss, and the functions that the training loop calls."""

    title = "A language model"

    def __init__(self, config: ConfigDict, workdir: pathlib.Path):
        self.placement = Placement.of(config.mesh, config.is_fully_sharded)
        self.placement.check_batch("batch", config.batch)
        if round(config.steps * config.long_share):
            self.placement.check_batch("long_batch", config.long_batch)
        mesh = self.placement.mesh
        axis_rules = self.placement.axis_rules
        self.config = config
        self.teacher: LoadedModel | None = None
        if config.teacher:
            self.teacher = load_model(config.teacher, mesh=mesh, axis_rules=axis_rules)
            if self.teacher.tokenizer is None:
                raise ConfigError(
                    f"the teacher {config.teacher} has no tokenizer; expected tokenizer.json"
                )
        self.tokenizer, self.text, self.held_out = load_text(config, self.teacher, workdir / "data")
        texts.check_held_out(self.held_out, config.eval_length + 1, config.data, "eval_length")
        end = tokens.separator_id(self.tokenizer)  # at which the model begins and stops
        hf = stated_model(config) | {"bos_token_id": end, "eos_token_id": end}
        hf["vocab_size"] = self.tokenizer.vocab_size
        self.model_config = family_of_type(hf["model_type"]).config.from_hf(hf)
        self.optimizer = make_optimizer(**config.optimizer, steps=config.steps)
        self._key = jax.random.key(config.seed)
        loss = functools.partial(objective.lm_loss, config=self.model_config)
        if self.teacher is not None:
            loss = functools.partial(
                objective.distill_loss,
                config=self.model_config,
                teacher_config=self.teacher.config,
                ce_weight=config.ce_weight,
                divergence=config.divergence,
            )
        self.own = continuations(config, self.teacher, self.text, workdir)
        draw = functools.partial(window_batches, seed=config.seed)
        read = [self.text] if self.own is None else [self.text, self.own]
        shares = [1.0] if self.own is None else [1.0 - config.own_share, config.own_share]
        self._usual = draw(read, shares, batch=config.batch, length=config.length + 1)
        self._first_long = config.steps - round(config.steps * config.long_share)
        if self._first_long < config.steps:
            size = dict(batch=config.long_batch, length=config.long_length + 1)
            self._long = draw([self.text], [1.0], **size)
        step = functools.partial(train_step, objective=loss, optimizer=self.optimizer)
        self._where = mesh and self.placement.state_shardings(
            placement("the model", self.model_config, mesh, axis_rules), self._make, self._key
        )
        self._step = self.placement.jit_step(step, self._where)
        self._loss = self.placement.jit(lambda *args: replicate(loss(*args)))
        self._teacher_params = self.teacher and self.teacher.params
        self.trained = [self.text]
        self.windows = [(text, config.length + 1) for text in read]
        self.windows += [(self.held_out, config.eval_length + 1)]
        self.summary = (
            f"{num_params(self.model_config) / 1e6:.2f}M parameters, "
            f"{count_text(len(self.text.tokens))} training tokens"
        )
        self.loop = {
            "tokens_per_step": lambda batch: batch.shape[0] * (batch.shape[1] - 1),
            "eval_every": config.eval_every,
        }

    def init_state(self) -> TrainState:
        """Returns new parameters, the same for the same seed."""
        return self.placement.create(self._make, self._where, self._key)

    def begin(self, state: TrainState) -> TrainState:
        """Returns the state: a model begins with random weights."""
        return state

    def _make(self, key: jax.Array) -> TrainState:
        params = transformer.init_params(self.model_config, key)
        return TrainState.create(params, self.optimizer)

    def step(self, state: TrainState, batch: np.ndarray) -> tuple[TrainState, dict]:
        """Trains one step."""
        return self._step(state, self.placement.place(batch), self._teacher_params)

    def batch_at(self, step: int) -> np.ndarray:
        """Returns the windows of a step, one token longer than their length.

        They are of the text, and a share of what the teacher wrote if there is any. The last
        ``long_share`` of the run has longer windows, only of the text.
        """
        return (self._usual if step < self._first_long else self._long)[step]["tokens"]

    def held_out_figures(self, state: TrainState, n_windows: int | None = None) -> dict:
        """Returns means over held-out windows: all of them, or the first ``n_windows``."""
        length = self.config.eval_length + 1
        count = min(self.held_out.num_windows(length), n_windows or len(self.held_out.tokens))
        found = []
        size = self.config.eval_batch
        for i in range(0, count, size):
            rows = [self.held_out.window(j, length) for j in range(i, min(i + size, count))]
            part = self.placement.place(np.stack([row["tokens"] for row in rows]))
            _, figures = self._loss(state.params, part, self._teacher_params)
            found.append(jax.device_get(figures))
        return {name: float(x) for name, x in report(merge(*found)).items()}

    def evaluate(self, state: TrainState) -> dict:
        """Returns held-out figures; of a draft also tau and acceptance by real decoding."""
        config = self.config
        teacher = self.teacher
        mesh = self.placement.mesh
        figures = self.held_out_figures(state, config.eval_windows)
        figures = {f"held_out_{name}": value for name, value in figures.items()}
        if teacher is None or not config.eval_prompts:
            return figures
        model = transformer.model(self.model_config, num_tokens=self.tokenizer.num_ids)
        draft = LoadedModel("draft", model, state.params, self.tokenizer, self.model_config)
        ids = texts.prompts(
            self.held_out,
            config.data,
            teacher,
            num_prompts=config.eval_prompts,
            prompt_tokens=config.eval_prompt_tokens,
            max_new_tokens=config.eval_new_tokens,
        )
        _, stats = teacher_forced.decode(
            teacher,
            draft,
            ids,
            num_draft=config.eval_num_draft,
            batch=len(ids),
            max_new_tokens=config.eval_new_tokens,
            devices=MeshOptions(mesh),
        )
        return figures | teacher_forced.acceptance_figures(stats)

    def export(
        self, folder: pathlib.Path, state: TrainState, saved: Checkpoints, log: Log
    ) -> Exported:
        """Exports the last state, with figures over all held-out windows and bits per byte."""
        final = self.held_out_figures(state)
        ids = self.held_out.tokens.tolist()
        num_bytes = len(self.tokenizer.backend.decode(ids, skip_special_tokens=True).encode())
        bits_per_nat_token = len(ids) / num_bytes / math.log(2)
        final["bits_per_byte"] = final.get("ce", final["loss"]) * bits_per_nat_token
        log.write(self.config.steps, **{f"final_{name}": x for name, x in final.items()})
        model = (state.params, self.model_config, self.tokenizer)
        checkpoint.save_pretrained(folder / "export", *model, dtype="bfloat16")
        return Exported(
            final, f"{final['bits_per_byte']:.3f} bits per byte at step {int(state.step)}"
        )
