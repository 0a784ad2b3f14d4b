"""What a certificate is about: settings, and drafters with small targets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Drafter, Model, Processor, Rule
from spec_jax.drafters.common.vocabulary import aligned
from spec_jax.drafters.standalone.model import standalone
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel
from spec_jax.named import to_drafter
from spec_jax.testing.mocks import mock_model, scripted_drafter, toy_model, toy_params
from spec_jax.testing.oracles import Row, toy_logits
from spec_jax.tree import Tree

NUM_TOKENS = 3  # of a target that certify makes
# ids of a target and of a draft whose last ids are padding
_PADDED = 5
_PADDED_DRAFT = 4
_MAX_VOCAB = 64
_TREE = Tree((0, 0, 1))
_PROMPTS = ((0, 1), (2,), (1, 1, 2))

STANDARD_SETTINGS = {
    "temperature 0.7": SamplerConfig(temperature=0.7),
    "temperature 1.3": SamplerConfig(temperature=1.3),
    "top-k": SamplerConfig(temperature=1.0, top_k=2),
    "top-p": SamplerConfig(temperature=1.0, top_p=0.7),
    "min-p": SamplerConfig(temperature=1.0, min_p=0.3),
    "penalties": SamplerConfig(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.4
    ),
    "all together": SamplerConfig(
        temperature=0.8,
        top_k=3,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=((1, 0.5),),
    ),
}


def _biased(*bias: tuple[int, float]) -> SamplerConfig:
    return SamplerConfig(temperature=1.0, logit_bias=bias)


# Target and draft. A bias of e.g. 7 makes a token of a toy model a thousand times as probable, in
# some of its contexts more and in some less.
_EXTREMES = (
    (_biased((0, 3.5)), _biased((0, 4.5))),  # nearly sure: .9 to .99
    (_biased((0, 6.5)), _biased((0, 7.5))),  # .999
    (_biased((0, 9.0)), _biased((0, 13.8))),  # .9999, and the draft 1 - 1e-6
    (_biased((0, 13.8)), _biased((0, 9.0))),
    (_biased((2, -12.0)), _biased((1, -40.0))),  # tokens that are rare for one of the two
    (_biased((2, -60.0)), _biased((2, -30.0))),  # for both
    (_biased((1, -86.5)), _biased((2, -86.5))),  # at the end of float32's range
    (_biased((0, 110.0)), _biased((0, 110.0))),  # all but one of them underflow
    (SamplerConfig(temperature=1e8),) * 2,  # equal
)

# Logits of once .0256 that differ by 1e-4 or less, when each token has been seen.
_NEAR_TIES = SamplerConfig(
    temperature=0.0, repetition_penalty=1e4, logit_bias=tuple((i, 256.0) for i in range(NUM_TOKENS))
)


def standard_rows(draft: SamplerConfig | None = None) -> list[Row]:
    """Every standard setting as one row of a mixed batch, with prompts of different lengths.

    Args:
      draft: the draft's sampler; by default each row's own setting.
    """
    pairs = [(setting, draft or setting) for setting in STANDARD_SETTINGS.values()]
    return [Row(_PROMPTS[i % 3], *pair) for i, pair in enumerate(pairs)]


def certified_rows(*, is_greedy: bool = False, processors: tuple[Processor, ...] = ()) -> list[Row]:
    """Returns the settings of ``certify``: prompts of several lengths in one mixed batch.

    They lead to contexts whose distributions are wide, peaked, equal, or have tokens of tiny
    probability, on the target's and on the draft's side.

    Args:
      is_greedy: only those of temperature 0.
      processors: of logits, in all settings.
    """
    wide = SamplerConfig(temperature=1.2)
    settings = list(STANDARD_SETTINGS.values())
    pairs = [(setting, (setting, wide)[i % 2]) for i, setting in enumerate(settings)]
    pairs += _EXTREMES
    greedy = SamplerConfig(temperature=0.0)
    pairs += [
        (SamplerConfig(temperature=0.6, top_p=0.8), SamplerConfig(temperature=1.0)),
        (SamplerConfig(temperature=1.7, top_p=0.6), SamplerConfig(temperature=0.5)),
        (greedy, SamplerConfig(temperature=1.0)),
        (SamplerConfig(temperature=1.0), greedy),
        (SamplerConfig(temperature=0.0, repetition_penalty=1.5), greedy),
        (_NEAR_TIES, SamplerConfig(temperature=1.0)),
    ]

    def use(config):
        return dataclasses.replace(config, processors=processors)

    rows = [Row(_PROMPTS[i % 3], *map(use, pair)) for i, pair in enumerate(pairs)]
    return [row for row in rows if row.target.temperature == 0 or not is_greedy]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A drafter, and the small target that it drafts for.

    Attributes:
      target: the target.
      drafter: the drafter.
      params: ``{"target": ..., "draft": ...}``.
    """

    target: LoadedModel
    drafter: Drafter
    params: dict[str, Any]

    def logits_of(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns f32[V], what the target says after these tokens, without its cache."""
        logits = np.array(toy_logits(self.params["target"], tokens))
        logits[self.target.model.last_id + 1 :] = -np.inf
        return logits

    def system(self, rule: Rule, num_draft: int) -> decoding.System:
        """Returns the system of a rule; ``num_draft`` is K of a chain, a tree has its own size."""
        return system_of(self.target.model, self.drafter, rule, num_draft)


def system_of(target: Model, drafter: Drafter, rule: Rule, num_draft: int) -> decoding.System:
    """Returns the system of a rule; ``num_draft`` is K of a chain, a tree has its own size.

    Args:
      target: the target.
      drafter: what drafts.
      rule: what accepts.
      num_draft: K of chains.
    """
    num_draft = num_draft if drafter.shape.tree is None else drafter.shape.tree.num_nodes
    return decoding.System(target, drafter, rule, num_draft)


def make_subject(drafter: Any, params: Any, seed: int, *, is_padded: bool = False) -> Subject:
    """Returns a drafter with a target of three tokens, or of the vocabulary that it has.

    Args:
      drafter: see ``certify``; None is a toy draft model.
      params: the drafter's, or a function of the target that makes them; None: those of a toy
        model.
      seed: of the toy parameters.
      is_padded: the target has ids that only pad its vocabulary.

    Raises:
      ConfigError: the drafter's vocabulary is too large or too small.
    """
    vocab_size = _PADDED if is_padded else NUM_TOKENS
    if isinstance(drafter, Drafter) and drafter.vocab_size is not None:
        vocab_size = drafter.vocab_size
        if not NUM_TOKENS <= vocab_size <= _MAX_VOCAB:
            raise ConfigError(
                f"drafter {drafter.name!r} has a vocabulary of {vocab_size} ids, and {NUM_TOKENS} "
                f"to {_MAX_VOCAB} can be certified; give certify a function make(target) that "
                "returns the drafter for the target that it is called with"
            )
    num_tokens = NUM_TOKENS if is_padded else None
    target = mock_model(vocab_size, seed, num_tokens=num_tokens)
    # A new object: nothing that was compiled before is used, since the functions that a drafter
    # or a rule calls may have changed in the meantime.
    model = toy_model.__wrapped__(vocab_size, num_tokens=num_tokens)
    target = dataclasses.replace(target, model=model)
    if drafter is None:
        vocab_size = _PADDED_DRAFT if is_padded else vocab_size
        own = standalone(aligned(toy_model(vocab_size), model))
    else:
        own = to_drafter(drafter, target)
    params = params(target) if callable(params) else params
    draft = toy_params(vocab_size, seed + 1) if params is None else params
    return Subject(target, own, {"target": target.params, "draft": draft})


def other_drafters(rule: Rule, subject: Subject) -> list[Subject]:
    """Returns what else a rule is certified with: a deterministic drafter, a tree of drafts."""

    def count(tokens, length, num_draft):
        pending = jnp.take_along_axis(tokens, length[:, None], axis=1)
        return (pending + length[:, None] + jnp.arange(num_draft)) % NUM_TOKENS

    drafters = [scripted_drafter(count)]
    if rule.has_trees:
        drafters.append(standalone(toy_model(NUM_TOKENS), _TREE)._replace(name="tree"))
    return [dataclasses.replace(subject, drafter=drafter) for drafter in drafters]


def prefixes(subject: Subject, num_rows: int, max_size: int) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (row, output) of every output of 1 to ``max_size`` tokens.

    Args:
      subject: of whose target the tokens are.
      num_rows: number of rows.
      max_size: 0 stands for one output of one token.
    """
    ids = range(subject.target.model.last_id + 1)
    outputs = [()]
    for size in range(1, max_size + 1):
        outputs += itertools.product(ids, repeat=size)
    outputs = outputs[1:] or [(1,)]
    return [(row, tuple(output)) for row in range(num_rows) for output in outputs]
