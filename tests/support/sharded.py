"""Decoders of tiny models for a choice of mesh, target, drafter, rule and so on.

``FACTORS`` lists the choices, ``is_feasible`` says which of them go together, and ``decode`` runs
one case, on its mesh or on one device.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from support import tiny_models
from support.meshes import NAMES, mesh
from support.scripted import BUCKETS, Known, Script
from support.tiny_models import loaded, near
from support.tiny_tokenizers import letters

from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.engine.queue import DecodeQueue
from spec_jax.loading import LoadedHead, LoadedModel, random_head
from spec_jax.models.config import ModelConfig

V, D, K, MAX = 16, 32, 3, 22
STOP = 5
# Every number of heads, units and tokens is divided by eight, but for ``grouped``: its key-value
# heads by two only, and its vocabulary by nothing.
SIZES = dict(vocab_size=V, hidden_size=D, intermediate_size=48, num_hidden_layers=2)
LLAMA = ModelConfig(**SIZES, num_attention_heads=8, max_position_embeddings=256)
GROUPED = dataclasses.replace(
    LLAMA, vocab_size=V - 1, num_key_value_heads=2, tie_word_embeddings=True
)
WIDTHS = dict(vocab_size=V, hidden_size=D)
BAMBA_SIZES = dict(num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256)
TARGETS = {
    "llama": LLAMA,
    "grouped": GROUPED,
    "mamba2": dataclasses.replace(tiny_models.MAMBA2, **WIDTHS, num_heads=8),
    "bamba": dataclasses.replace(
        tiny_models.BAMBA, **SIZES, **BAMBA_SIZES, mamba_n_heads=8, mamba_d_head=8
    ),
}
# The layer of MTP modules for each target.
QWEN = dict(num_attention_heads=8, num_experts=8, shared_expert_intermediate_size=16)
DEEPSEEK = dict(num_attention_heads=8, n_routed_experts=8, n_group=4, max_position_embeddings=256)
MODULES = {
    "llama": LLAMA,
    "grouped": dataclasses.replace(
        tiny_models.QWEN3_NEXT, vocab_size=V - 1, hidden_size=D, max_position_embeddings=256, **QWEN
    ),
    "mamba2": dataclasses.replace(tiny_models.DEEPSEEK, **WIDTHS, **DEEPSEEK),
    "bamba": LLAMA,
}
TREES = {
    "chain": {"num_speculative_tokens": K},
    "static": {"tree": (2, 1, 1)},
    "dynamic": {"tree_depth": 2, "tree_top_k": 2, "num_speculative_tokens": 4},
}
PROMPTS = [[1, 2, 3], [4, 9, 6, 7, 8, 9, 10], [2], [3, 1, 4, 1, 9], [9, 9], [7, 8, 7, 8]]
PROMPTS += [[11, 3, 2, 1, 12, 13], [14, 2, 3]]
PENALISED = dict(repetition_penalty=1.2, presence_penalty=0.2, frequency_penalty=0.3)
SAMPLERS = {
    ("greedy", "bare"): [{}],
    ("greedy", "filtered"): [{}, PENALISED, {"logit_bias": ((3, 0.7), (4, -np.inf))}],
    ("sampled", "bare"): [{"temperature": 1.0}, {"temperature": 0.6}],
    ("sampled", "filtered"): [
        {"temperature": 1.0},
        {"temperature": 0.9, "top_k": 7, "top_p": 0.9, **PENALISED},
        {"temperature": 0.8, "min_p": 0.05, "logit_bias": ((3, 0.7), (4, -np.inf))},
        {},
    ],
}


class Case(NamedTuple):
    """One choice of everything."""

    mesh: str
    target: str
    drafter: str
    member: str
    tree: str
    rule: str
    sampling: str
    layers: str
    draft: str
    rows: str
    drive: str

    @property
    def kind(self) -> str:
        """What drafts: of some drafters there are two."""
        return MEMBERS[self.drafter][self.member == "second"]

    @property
    def strategy(self) -> str:
        """The rule's name."""
        if self.rule != "another":
            return self.rule
        return ANOTHER_OF_CHAINS[self.rows] if self.tree == "chain" else "traversal"


MEMBERS = dict(plain=("plain",), copies=("ngram", "suffix"), standalone=("standalone",))
MEMBERS |= dict(eagle=("eagle3", "eagle1"), mtp=("recycled", "sequential"))
METHODS = {"eagle3": "eagle", "eagle1": "eagle", "recycled": "mtp", "sequential": "mtp"}
ANOTHER_OF_CHAINS = {"even": "block", "odd": "typical-acceptance"}
_FACTORS = dict(mesh=NAMES, target=tuple(TARGETS), drafter=tuple(MEMBERS))
_FACTORS |= dict(member=("first", "second"), tree=tuple(TREES))
_FACTORS |= dict(rule=("greedy", "match", "residual", "another"), sampling=("bare", "filtered"))
_FACTORS |= dict(layers=("separate", "scanned"), draft=("sharded", "replicated"))
_FACTORS |= dict(rows=("even", "odd"), drive=("call", "stream", "queue", "adaptive"))
FACTORS = Case(**_FACTORS)


def is_feasible(**chosen: str) -> bool:
    """Whether these choices, of any of the factors, go together."""
    is_a = lambda name, *values: chosen.get(name) in values
    is_no = lambda name, *values: name in chosen and chosen[name] not in values
    is_sequential = is_a("drafter", "mtp") and is_a("member", "second")
    return not (
        (is_a("drafter", "plain", "standalone") and is_no("member", "first"))
        or (is_a("drafter", "plain") and is_no("rule", "greedy", "match"))
        or (is_a("drafter", "plain", "copies") and is_no("tree", "chain"))
        or (is_a("drafter", "plain", "copies") and is_no("draft", "sharded"))
        or (is_sequential and is_no("tree", "chain"))
        or (is_a("drive", "adaptive") and is_no("tree", "chain"))
        or (is_a("drive", "adaptive") and is_a("drafter", "plain"))
        or (is_a("layers", "scanned") and is_no("target", "llama", "grouped"))
    )


def decode(case: Case, *, is_sharded: bool) -> list[tuple[Any, ...]]:
    """What each request comes to: tokens, pieces of text, reason to finish, and counts."""
    decoder = make_decoder(case, is_sharded=is_sharded)
    batch = 8 if case.rows == "even" else 3
    drive = {"call": _call, "stream": _stream, "queue": _queue, "adaptive": _adaptive}[case.drive]
    return drive(decoder, PROMPTS[:batch], batch)


def make_decoder(case: Case, *, is_sharded: bool, **options: Any) -> SpeculativeDecoder:
    """The decoder of a case, on its mesh or on one device."""
    is_scanned = case.layers == "scanned"
    target, draft, config = _target(case.target, is_scanned), None, None
    if case.drafter != "plain":
        shape = TREES[case.tree]
        if case.drive == "adaptive":
            shape = {"is_adaptive": True, "adaptive_buckets": BUCKETS}
        method = METHODS.get(case.kind, case.kind)
        config = SpeculativeConfig(method, rejection_sampling_strategy=case.strategy, **shape)
        draft = _draft(case.kind, case.target, is_scanned)
    kind = "greedy" if case.rule == "greedy" else "sampled"
    turns = itertools.cycle(SAMPLERS[kind, case.sampling])
    samplers = [SamplerConfig(**next(turns), seed=row) for row in range(8)]
    if case.rows == "odd":
        samplers = samplers[:3]
    if is_sharded:
        is_whole = case.draft == "replicated"
        options |= {"mesh": mesh(case.mesh), "is_draft_replicated": is_whole}
    return SpeculativeDecoder(target, draft, config, target_sampler=samplers, **options)


@functools.cache
def _target(name: str, is_scanned: bool) -> LoadedModel:
    config = TARGETS[name]
    if is_scanned:
        config = dataclasses.replace(config, scan_layers=True)
    tokenizer = letters(config.vocab_size)
    return loaded(config, name, tokenizer=tokenizer, stop_tokens=(STOP,))


@functools.cache
def _draft(kind: str, target: str, is_scanned: bool) -> LoadedModel | LoadedHead | None:
    """A draft that is right now and then: the target with noise on its weights, or any head."""
    layer, target = MODULES[target], _target(target, is_scanned)
    if kind in ("ngram", "suffix"):
        return None
    if kind == "standalone":
        return near(target)
    size = target.config.vocab_size
    attends = dataclasses.replace(LLAMA, vocab_size=size)
    taps = (target.config.num_hidden_layers + 1,)
    layer = dataclasses.replace(layer, vocab_size=size, num_hidden_layers=1)
    modules = functools.partial(MtpConfig.of_target, attends, layer=layer, taps=taps)
    config = {
        "eagle1": lambda: EagleConfig.of_target(attends, 1, taps=taps),
        "eagle3": lambda: EagleConfig.of_target(attends, 3, 12, taps=(0, 1, 2)),
        "recycled": modules,
        "sequential": lambda: modules(protocol="sequential", num_modules=K),
    }[kind]()
    head = random_head(config, jax.random.key(0))
    # Random weights are small; larger ones give logits that a wrong mask or position would move.
    scaled = lambda w: w if w.ndim < 2 or w.dtype != jnp.float32 else 10 * w
    return dataclasses.replace(head, params=jax.tree.map(scaled, head.params))


def _row(row) -> tuple[Any, ...]:
    counts = dataclasses.replace(row.stats, prefill_s=0.0, decode_s=0.0)
    return row.tokens, row.text, row.finish_reason, counts


def _call(decoder, prompts, batch):
    """Twice, since suffix decoding copies from what the first call gave."""
    del batch
    calls = [decoder.generate(prompts, max_length=MAX, pad_to=8) for _ in range(2)]
    return [_row(row) for rows in calls for row in rows]


def _adaptive(decoder, prompts, batch):
    """K is what a script says, round by round."""
    del batch
    decoder.adaptive.tuner, decoder.adaptive.costs = Script((3, 0, 0, 1, 0, 3)), Known()
    return [_row(row) for row in decoder.generate(prompts, max_length=MAX, pad_to=8)]


class AfterLooks(CancellationToken):
    """Cancels its row when it is looked at for the fourth time."""

    def watch(self):
        looks = itertools.count()
        return lambda: next(looks) > 2


def _stream(decoder, prompts, batch):
    """Piece by piece, and the second row is cancelled."""
    pieces = []
    tokens = [AfterLooks() if row == 1 else None for row in range(batch)]
    options = dict(
        pad_to=8, cancellation_token=tokens, on_token=lambda row, piece: pieces.append((row, piece))
    )
    rows = decoder.generate(prompts, max_length=MAX, **options)
    return [*map(_row, rows), *pieces]


def _queue(decoder, prompts, batch):
    """More requests than rows, so that some are put in the place of finished ones."""
    requests = enumerate([*prompts, *PROMPTS[:3]])
    found = DecodeQueue(decoder, requests, batch=batch, max_prompt_tokens=8, max_new_tokens=MAX - 8)
    return [(index, *_row(row)) for index, row in found]
