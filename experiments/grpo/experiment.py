"""The experiment of ``experiments.rl``: prompts, rollouts, rewards, and the update."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from configs import rl
from experiments.grpo import report, rewards
from experiments.grpo.objective import Batch, advantages, grpo_loss, logprobs
from experiments.run import cli
from experiments.run.drafts import load_drafts
from experiments.training.run import Exported
from spec_jax import processes
from spec_jax.compilation import Timed
from spec_jax.config import SamplerConfig
from spec_jax.config.checks import is_count, is_integer, is_list, is_number
from spec_jax.data import python_source, questions
from spec_jax.data.batches import Corpus
from spec_jax.decoding import Finish, System
from spec_jax.drafters.loaded import beside_target
from spec_jax.drafters.suffix import History
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError, TrainingError
from spec_jax.evaluation.prompts import PromptEncoder
from spec_jax.loading import DTYPES, LoadedModel, load_model
from spec_jax.meshes import platform_of
from spec_jax.models import checkpoint
from spec_jax.models.params import placement
from spec_jax.rollouts import Rollout, rollout
from spec_jax.testing.auditing.invariant import invariant_pair
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.log import Log, read_metrics
from spec_jax.train.means import Mean
from spec_jax.train.placement import Placement
from spec_jax.train.step import TrainState, cast, train_step

SIGNATURES = "signatures"  # prompts of the standard library's functions
ROLLOUTS = ("speculative", "plain", "invariant", "invariant-plain")
OLD = ("recomputed", "rollout")
FREE = ("log_every", "checkpoint_every_s", "eval_every", "compare_every", "export_dtype")
_HELD_OUT_SEEDS = 2**31  # of evaluations; those of steps count from 0


class Prompts(NamedTuple):
    """The prompts of a step.

    Attributes:
      tokens: i32[P,T], right-padded.
      lengths: i32[P].
      seeds: u32[B], of every row.
      names: of every prompt.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    seeds: np.ndarray
    names: tuple[str, ...]


@flax.struct.dataclass
class PolicyState:
    """Everything that a run carries from one step to the next.

    Prompts and seeds are functions of the step.
    """

    train: TrainState
    reference: Any  # weights that the policy stays near; {} without a distance to them
    memory: Any  # what the drafter "suffix" has learned, on the host; {} for others

    @property
    def step(self) -> jax.Array:
        """i32[], steps done."""
        return self.train.step


def validate(config: ConfigDict) -> None:
    """Raises ConfigError if a key is unknown or a value cannot be trained with."""
    cli.check_keys(config, rl.get_config())
    positive = "steps prompts_per_step samples prompt_tokens max_new_tokens epochs accumulate"
    cli.require_positive(config, f"{positive} log_every")
    rows = config.prompts_per_step * config.samples
    stages = config.stages
    are_pairs = is_list(stages) and all(is_list(pair) and len(pair) == 2 for pair in stages)
    is_fit = are_pairs and all(is_integer(x, 1) for pair in stages for x in pair)
    widths = [rows, *(pair[0] for pair in stages)] if is_fit else []
    is_fit = is_fit and all(after < before for before, after in zip(widths, widths[1:]))
    clip = config.clip
    is_clip = is_list(clip) and len(clip) == 2
    is_clip = is_clip and is_number(clip[0], 0, 1) and is_number(clip[1], 0)
    is_drafting = config.drafter != "none" and not config.rollouts.endswith("plain")
    is_invariant = config.rollouts.startswith("invariant")
    cli.require_each(
        config,
        (config.samples > 1, "samples", "2 or more: rewards are compared within a group"),
        (config.rollouts in ROLLOUTS, "rollouts", f"one of {', '.join(ROLLOUTS)}"),
        (config.old_logprobs in OLD, "old_logprobs", f"one of {', '.join(OLD)}"),
        (config.reward_on in ("text", "ids"), "reward_on", "text or ids"),
        (config.strategy in ("match", "residual"), "strategy", "match or residual"),
        (
            config.strategy == "match" or not is_invariant,
            "strategy",
            "match where rollouts are invariant: residual samples other tokens than plain decoding",
        ),
        (config.sampler.temperature > 0, "sampler.temperature", "a number above 0"),
        (config.optimizer.lr > 0, "optimizer.lr", "a number above 0"),
        (config.optimizer.clip > 0, "optimizer.clip", "a number above 0"),
        (config.kl_weight >= 0, "kl_weight", "0 (no reference) or more"),
        (config.reference_every >= 0, "reference_every", "0 (the first policy) or more"),
        (rows % config.accumulate == 0, "accumulate", f"a divisor of the {rows} rows"),
        (is_fit, "stages", f"pairs (rows, K), of falling rows below {rows}: ((32, 4), (16, 6))"),
        (is_drafting or not stages, "stages", "none where nothing is drafted"),
        (
            not is_invariant or not stages,
            "stages",
            "none where rollouts are invariant, which keep K and the number of rows",
        ),
        (is_clip, "clip", "two numbers, the first at most 1: (0.2, 0.2)"),
        (
            config.drafter == "none" or is_integer(config.num_draft, 1),
            "num_draft",
            "1 or more; to decode without drafts, set drafter to none",
        ),
        (config.dtype in ("", "float32", "bfloat16"), "dtype", "float32, bfloat16, or empty"),
        (config.export_dtype in DTYPES, "export_dtype", f"one of {', '.join(DTYPES)}"),
        (is_count(config.seed), "seed", "an integer of 0 or more"),
        (is_count(config.eval_every), "eval_every", "0 (only at the end) or more"),
        (is_count(config.compare_every), "compare_every", "0 (never) or more"),
        (is_number(config.checkpoint_every_s, 0), "checkpoint_every_s", "0 or more"),
    )
    SamplerConfig(**config.sampler)
    rewards.load(config.reward)


def read_prompts(
    config: ConfigDict, target: LoadedModel
) -> tuple[list[tuple[str, list[int]]], list[str]]:
    """Reads the prompts.

    Args:
      config: See ``configs/rl.py``.
      target: The model that they are for.

    Returns:
      Every prompt with its name, of which those that are held out come first: of a file, rows at
      even distances. And sentences on rows that are left out.

    Raises:
      ConfigError: There are too few, or one of a file is longer than ``prompt_tokens``.
    """
    limit = config.prompt_tokens
    count = config.prompts_per_step
    if config.prompts == SIGNATURES:
        parts = [_signatures(split, target, limit) for split in ("held_out", "train")]
        prompts = [*parts[0][:count], *parts[1]]
        notes = []
    else:
        encode = PromptEncoder(target)
        chosen, _, notes = questions.load(config.prompts, 0)
        prompts = [(question.name, encode(question)) for question in chosen]
        held_out = [i * len(prompts) // count for i in range(min(count, len(prompts)))]
        order = [*held_out, *sorted({*range(len(prompts))} - {*held_out})]
        prompts = [prompts[i] for i in order]
        for name, ids in prompts:
            if len(ids) > limit:
                raise ConfigError(
                    f"prompt {name} has {len(ids)} tokens; prompt_tokens is {limit}: raise it, or "
                    "leave that prompt out"
                )
    if len(prompts) < 2 * count:
        raise ConfigError(
            f"{config.prompts} has {len(prompts)} prompts; expected {2 * count} or more, of which "
            f"{count} are held out: lower prompts_per_step"
        )
    return prompts, notes


def _signatures(split: str, target: LoadedModel, limit: int) -> list[tuple[str, list[int]]]:
    """Returns the first lines of the functions of a split of the standard library, each once."""
    found = {}
    for path, text in python_source.documents(split, tests_share=0.0):
        for line in re.findall(r"^def \w+\(.*\):$", text, re.MULTILINE):
            found.setdefault(line, f"{path} {line}")
    encoded = ((name, target.tokenizer.encode(line)) for line, name in found.items())
    kept = [(name, ids) for name, ids in encoded if len(ids) <= limit]
    order = np.random.default_rng(0).permutation(len(kept))
    return [kept[i] for i in order]


def make_decoder(config: ConfigDict, target: LoadedModel) -> SpeculativeDecoder:
    """Returns the decoder of the rollouts.

    Args:
      config: See ``configs/rl.py``.
      target: The policy before the first step.

    Raises:
      ConfigError: The drafter does not fit the target, or drafts nothing where drafts are needed.
    """
    draft = None
    drafts = None
    if config.drafter != "none":
        draft, drafts = load_drafts(
            config.drafter, target, config.num_draft, config.strategy, dtype="float32"
        )
    options = {"target_sampler": SamplerConfig(**config.sampler)}
    if config.rollouts == "plain":
        return SpeculativeDecoder.new_n1(target, draft, drafts, **options)
    decoder = SpeculativeDecoder(target, draft, drafts, **options)
    if config.rollouts == "speculative":
        return decoder
    pair = invariant_pair(decoder)
    return pair.speculative if config.rollouts == "invariant" else pair.plain


class RlExperiment:
    """Policy, prompts, rewards, and the functions that the training loop calls.

    Args:
      config: See ``configs/rl.py``.
      workdir: The run's folder, which is not read.

    Raises:
      ConfigError: A value that does not fit the target, the drafter or the prompts.
    """

    title = "Reinforcement learning with speculative rollouts"
    windows: Sequence[Any] = ()

    def __init__(self, config: ConfigDict, workdir: pathlib.Path):
        del workdir
        if processes.count() > 1:
            raise ConfigError("experiments.rl runs in one process; expected no --num_processes")
        self.config = config
        self.placement = Placement.of(config.mesh)
        mesh = self.placement.mesh
        self.placement.check_batch("prompts_per_step", config.prompts_per_step)
        rules = self.placement.axis_rules
        self.dtype = config.dtype or ("float32" if platform_of(mesh) == "cpu" else "bfloat16")
        self.target = load_model(config.target, "float32", mesh=mesh, axis_rules=rules)
        cli.tokenizer_of(self.target)
        width = config.prompt_tokens + config.max_new_tokens
        if width > self.target.max_length:
            raise ConfigError(
                f"prompts of {config.prompt_tokens} tokens and {config.max_new_tokens} new ones "
                f"are {width}; the target holds {self.target.max_length}"
            )
        self.reward = rewards.load(config.reward)
        prompts, notes = read_prompts(config, self.target)
        self._held_out = prompts[: config.prompts_per_step]
        self._prompts = prompts[config.prompts_per_step :]
        ids = np.concatenate([ids for _, ids in prompts])
        ends = np.cumsum([0, *(len(ids) for _, ids in prompts)])
        self.trained = [Corpus(config.prompts, ids, starts=ends)]
        self.num_rows = config.prompts_per_step * config.samples
        self.decoder = make_decoder(config, self.target)
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(config.optimizer.clip),
            optax.adamw(config.optimizer.lr, b2=0.95, weight_decay=0.0),
        )
        sampler = self.decoder.target_sampler
        model = self.target.model
        self._roll = self._rollouts_of(self.decoder.system(), config.stages)
        plain = SpeculativeDecoder(self.target, target_sampler=sampler)
        self._plain = self._rollouts_of(plain.system(), ())
        options = dict(model=model, sampler=sampler, max_new_tokens=config.max_new_tokens)

        def of_policy(params, *rows):
            return logprobs(cast(params, self.dtype), *rows, **options)

        self._logprobs = self.placement.jit(of_policy)
        self._loss = functools.partial(
            grpo_loss, **options, clip=tuple(config.clip), kl_weight=config.kl_weight
        )
        where = mesh and placement("the policy", self.target.config, mesh, rules)
        self._where = self.placement.state_shardings(where, self._make, self.target.params)
        self._update = self.placement.jit_step(self._updated, self._where)
        drafts = f"by {self.decoder.drafter.name}, K = {self.decoder.num_draft}"
        self.summary = (
            f"{self.target.name}, {len(self._prompts)} prompts, {config.prompts_per_step} a step "
            f"with {config.samples} samples each; drafts {drafts}, {config.rollouts}"
        )
        self.summary = "; ".join([self.summary, *notes])
        self.loop = {
            "tokens_per_step": lambda prompts: len(prompts.seeds) * width,  # of a training pass
            "eval_every": config.eval_every,
            "describe_batch": lambda step: f"prompts {', '.join(self.batch_at(step).names)}",
        }

    def _rollouts_of(self, system: System, stages: Sequence) -> Callable[..., Rollout]:
        """Returns ``(policy, draft, prompts, lengths, seeds) -> Rollout``, compiled."""
        config = self.config
        sample = functools.partial(
            rollout,
            system=system,
            max_new_tokens=config.max_new_tokens,
            samples=config.samples,
            stop_tokens=self.target.stop_tokens,
            stages=tuple(map(tuple, stages)),
        )
        draft = self.decoder.draft

        def run(policy, given, prompts, lengths, seeds):
            policy = cast(policy, self.dtype)
            if draft is not None and system.num_draft > 0:
                given = beside_target(draft, cast(given, self.dtype), policy)
            params = {"target": policy, "draft": given}
            return sample(params, prompts, lengths, self.decoder.target_sampler, seeds)

        return self.placement.jit(run)

    def _make(self, params: Any) -> TrainState:
        return TrainState.create(jax.tree.map(jnp.array, params), self.optimizer)

    def init_state(self) -> PolicyState:
        """Returns the state before the first step: the policy is the target."""
        train = self.placement.create(self._make, self._where, self.target.params)
        reference = self.target.params if self.config.kl_weight > 0 else {}
        history = self.decoder.history
        memory = {} if history is None else jax.device_get(history.params)
        return PolicyState(train, reference, memory)

    def begin(self, state: PolicyState) -> PolicyState:
        """Returns the state: a policy begins as it was loaded."""
        return state

    def batch_at(self, step: int) -> Prompts:
        """Returns the prompts of a step; each is used once before any is used again."""
        count = self.config.prompts_per_step
        chosen = []
        for i in range(step * count, (step + 1) * count):
            epoch, place = divmod(i, len(self._prompts))
            order = np.random.default_rng((self.config.seed, epoch)).permutation(len(self._prompts))
            chosen.append(self._prompts[order[place]])
        return self._batch(chosen, step * self.num_rows)

    def _batch(self, chosen: Sequence[tuple[str, list[int]]], first_seed: int) -> Prompts:
        tokens = np.zeros((len(chosen), self.config.prompt_tokens), np.int32)
        for row, (_, ids) in enumerate(chosen):
            tokens[row, : len(ids)] = ids
        seeds = self.config.seed * 0x9E3779B9 + first_seed + np.arange(self.num_rows)
        lengths = np.asarray([len(ids) for _, ids in chosen], np.int32)
        return Prompts(tokens, lengths, (seeds % 2**32).astype(np.uint32), tuple(zip(*chosen))[0])

    def rollouts(self, state: PolicyState, prompts: Prompts, is_plain: bool = False) -> Rollout:
        """Samples the outputs of a step.

        Args:
          state: The policy, and what the drafter has learned.
          prompts: The prompts.
          is_plain: Whether to decode without drafts.
        """
        draft = self.decoder.draft
        given = state.memory or None if draft is None else draft.params
        arrays = (prompts.tokens, prompts.lengths, prompts.seeds)
        run = self._plain if is_plain else self._roll
        given = None if is_plain else given
        return jax.block_until_ready(run(state.train.params, given, *arrays))

    def outputs(self, found: Rollout) -> list[list[int]]:
        """Returns the ids of every row's output."""
        rows = zip(np.asarray(found.tokens), np.asarray(found.is_output))
        return [tokens[is_output].tolist() for tokens, is_output in rows]

    def rewards(self, prompts: Prompts, outputs: Sequence[Sequence[int]]) -> np.ndarray:
        """Returns the rewards f64[P,N] of outputs.

        Raises:
          TrainingError: The function raised, or returned no finite number.
        """
        N = self.config.samples
        pairs = []
        for row, output in enumerate(outputs):
            ids = prompts.tokens[row // N, : prompts.lengths[row // N]].tolist()
            if self.config.reward_on == "text":
                tokenizer = self.target.tokenizer
                pairs.append((tokenizer.decode(ids), tokenizer.decode_after(ids, output)))
            else:
                pairs.append((ids, output))

        describe = functools.partial(self._describe, prompts)
        found = rewards.score(self.reward, self.config.reward, pairs, describe)
        return np.reshape(found, (-1, N))

    def _describe(self, prompts: Prompts, row: int) -> str:
        N = self.config.samples
        return f"prompt {prompts.names[row // N]!r}, sample {row % N}"

    def step(self, state: PolicyState, prompts: Prompts) -> tuple[PolicyState, dict]:
        """Samples, scores and updates once.

        Raises:
          TrainingError: A reward is not a finite number, a row has a fault, or the update is zero
            although rewards differ.
        """
        config = self.config
        number = int(state.step) + 1
        with Timed() as rolled:
            found = self.rollouts(state, prompts)
        finish = np.asarray(found.counts.finish)
        faulty = np.flatnonzero(~np.isin(finish, (Finish.LENGTH, Finish.STOP_TOKEN)))
        if len(faulty):
            fault = Finish(finish[faulty[0]])
            is_target = fault == Finish.NAN_TARGET
            raise TrainingError(
                f"{len(faulty)} rollouts ended by {fault.name.lower()} in step {number}, first of "
                f"{self._describe(prompts, faulty[0])}: "
                + ("lower optimizer.lr" if is_target else "take another drafter, or none")
            )
        outputs = self.outputs(found)
        figures = self._compared(state, prompts, found, outputs, rolled.run_s)
        with Timed() as scored:
            scores = self.rewards(prompts, outputs)
        above = advantages(scores, config.is_scaled)
        with Timed() as updated:
            batch = Batch(found.tokens, found.is_output, jnp.asarray(above.ravel()))
            if config.old_logprobs == "rollout":
                batch = batch.replace(old=found.logprobs)
            elif config.epochs > 1:
                old, _ = self._logprobs(state.train.params, found.tokens, found.is_output)
                batch = batch.replace(old=old)
            if config.kl_weight > 0:
                _, own = self._logprobs(state.reference, found.tokens, found.is_output)
                batch = batch.replace(reference=own)
            train = state.train
            for _ in range(config.epochs):
                train, learned = self._update(train, batch, np.int32(number))
            jax.block_until_ready(train)
        is_unequal = (above != 0).any(axis=1)
        if is_unequal.any() and learned["update_norm"] == 0:
            raise TrainingError(
                f"the update of step {number} is zero although rewards differ: raise optimizer.lr"
            )
        after = state.replace(train=train, memory=self._remember(state.memory, outputs))
        if config.reference_every and number % config.reference_every == 0:
            reference = jax.tree.map(jnp.array, train.params) if config.kl_weight > 0 else {}
            after = after.replace(reference=reference)
        counts = jax.tree.map(lambda x: int(np.sum(x)), found.counts)
        figures |= {
            "reward": scores.mean(),
            "unequal": is_unequal.mean(),
            "tau": (counts.output - self.num_rows) / max(counts.rounds, 1),
            "output_tokens": counts.output / self.num_rows,
            "passes": float(counts.passes),
            "rollout_tok_s": counts.output / rolled.run_s,
            "rollout_s": rolled.run_s,
            "reward_s": scored.run_s,
            "update_s": updated.run_s,
        }
        return after, {**learned, **figures}

    def _updated(
        self, train: TrainState, batch: Batch, number: jax.Array
    ) -> tuple[TrainState, dict]:
        """``train_step`` in a step of this number, with the norm of the update."""
        options = {"dtype": self.dtype, "accumulate": self.config.accumulate}
        before = train.params
        train, figures = train_step(
            train, batch, objective=self._loss, optimizer=self.optimizer, **options
        )
        moved = jax.tree.map(jnp.subtract, train.params, before)
        return train.replace(step=number), {**figures, "update_norm": optax.tree.norm(moved)}

    def _compared(self, state, prompts, found, outputs, run_s: float) -> dict[str, Mean]:
        """Returns time, tokens and equality of plain decoding, every ``compare_every`` steps."""
        every = self.config.compare_every
        names = ("plain_s", "plain_tokens", "compared_s", "compared_tokens", "identical")
        if not every or int(state.step) % every:
            return dict.fromkeys(names, Mean(np.float32(0), np.float32(0)))
        with Timed() as timed:
            plain = self.rollouts(state, prompts, is_plain=True)
        tokens = [float(np.sum(x.counts.output)) for x in (plain, found)]
        are_equal = [a == b for a, b in zip(outputs, self.outputs(plain))]
        values = timed.run_s, tokens[0], run_s, tokens[1], np.mean(are_equal)
        return {name: Mean(np.float32(x), np.float32(1)) for name, x in zip(names, values)}

    def _remember(self, memory: Any, outputs: Sequence[Sequence[int]]) -> Any:
        """Returns what a drafter with a history knows after these outputs."""
        if not memory:
            return memory
        history = History(0)
        count = int(memory["num_updates"])
        history.__setstate__({"text": np.asarray(memory["tokens"]), "num_updates": count})
        for output in outputs:
            history.add(output)
        return jax.device_get(history.params)

    def evaluate(self, state: PolicyState) -> dict[str, float]:
        """Returns the mean reward on the prompts that are held out, by seeds of their own."""
        prompts = self._batch(self._held_out, _HELD_OUT_SEEDS)
        found = self.rollouts(state, prompts)
        return {"held_out_reward": self.rewards(prompts, self.outputs(found)).mean()}

    def export(
        self, folder: pathlib.Path, state: PolicyState, saved: Checkpoints, log: Log
    ) -> Exported:
        """Exports the last policy, and writes the page of the run."""
        model = (state.train.params, self.target.config, self.target.tokenizer)
        checkpoint.save_pretrained(folder / "export", *model, dtype=self.config.export_dtype)
        figures = report.write(folder, read_metrics(folder / "metrics.jsonl"), self)
        return Exported(figures, report.sentence(figures), ("rl.png",))
