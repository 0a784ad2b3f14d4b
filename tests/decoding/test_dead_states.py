"""Nodes without a distribution are a fault only where the target would emit a token from one.

Processors are random automata with dead and final states; where one ends, so does plain decoding.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toys
from support.tiny_models import DEEPSEEK_TARGET, LLAMA, random_weights

import spec_jax
from spec_jax import SamplerConfig, testing
from spec_jax.contracts import Processor, Rule
from spec_jax.engine.generation import Generation, fault_of
from spec_jax.engine.stats import Stats
from spec_jax.errors import InvalidVerdictError
from spec_jax.loading import LoadedModel
from spec_jax.models import transformer
from spec_jax.overlap.overlap import Devices
from spec_jax.processors import per_token
from spec_jax.rules import batched, chain
from spec_jax.testing.oracles import toy_logits

V, NEW = toys.V, 6


class Automata:
    """Automata over ``vocab_size`` tokens, one for each pair of tokens that begins a prompt.

    Attributes:
      prompts: all pairs.
      processor: allows what the automaton of the row allows.
      stop: the stop token.
    """

    def __init__(self, vocab_size: int, num_states: int = 5, seed: int = 0):
        draw, V, S = np.random.default_rng(seed), vocab_size, num_states
        N, self.stop = V * V, V - 1
        self.prompts = [[i // V, i % V] for i in range(N)]
        allowed = draw.random((N, S, V)) < draw.uniform(0.2, 0.9, (N, 1, 1))
        after = draw.integers(0, S, (N, S, V))
        after[:, :, self.stop] = S - 1
        allowed[:, S - 1] = False  # final and dead; a state without a token is dead by chance
        after = np.where(allowed, after, S - 1)
        allowed[:, 0] |= np.eye(V, dtype=bool)[draw.integers(0, V, N)]  # each emits a token
        after[:, 0] = np.where(after[:, 0] == S - 1, draw.integers(0, S - 1, (N, V)), after[:, 0])
        after[:, 0, self.stop] = S - 1
        self.allowed, self.after = allowed, after
        tables = jnp.asarray(allowed), jnp.asarray(after, jnp.int32)

        def init(tokens, length, vocab_size):
            return {"which": tokens[0] * V + tokens[1], "state": jnp.zeros((), jnp.int32)}

        def apply(state, logits):
            return jnp.where(tables[0][state["which"], state["state"]], logits, -jnp.inf)

        def advance(state, token):
            return {**state, "state": tables[1][state["which"], state["state"], token]}

        self.processor = Processor("g", *per_token(init, apply, advance))

    def greedy(self, params, prompt: list[int], max_new_tokens: int) -> tuple[tuple, str]:
        """The greedy output of a toy model, and why it ends, without the code that decodes."""
        which, state, output = prompt[0] * self.allowed.shape[2] + prompt[1], 0, []
        while len(output) < max_new_tokens:
            is_allowed = self.allowed[which, state]
            if not is_allowed.any():
                return tuple(output), "nan_target"
            logits = np.where(is_allowed, toy_logits(params, [*prompt, *output]), -np.inf)
            output.append(int(logits.argmax()))
            state = self.after[which, state, output[-1]]
            if output[-1] == self.stop:
                return tuple(output), "stop_token"
        return tuple(output), "length"


AUTOMATA = Automata(V)
PROMPTS, STOPS = AUTOMATA.prompts, [AUTOMATA.stop]
FORBIDDEN = "processor 'g' forbade every token of the target"


def sampler(**options):
    return SamplerConfig(processors=(AUTOMATA.processor,), **options)


MIXED = [sampler(temperature=i % 2 * 1.0, seed=i) for i in range(len(PROMPTS))]
COLD = sampler()


def ends(rows):
    return [(row.tokens, row.finish_reason) for row in rows]


@functools.cache
def make(kind, strategy, shape):
    return toys.decoder(kind, strategy, shape)


@hypothesis.settings(max_examples=4)
@hypothesis.given(
    st.lists(st.integers(0, len(PROMPTS) - 1), min_size=12, max_size=12), st.integers(1, NEW)
)
def test_greedy_rows_of_trees_are_those_of_automata_walked_by_hand(chosen, new):
    """A node may allow fewer tokens than it has children, or none, as after the stop token."""
    prompts = [PROMPTS[i] for i in chosen]
    rows = make("standalone", "greedy", "small").generate(
        prompts, new, sampler=COLD, stop_tokens=STOPS
    )
    assert ends(rows) == [AUTOMATA.greedy(toys.TARGET.params, x, new) for x in prompts]


def test_the_message_names_the_processor_that_forbids_every_token():
    system, params = make("standalone", "greedy", "small").system(), toys.TARGET.params
    found = {tuple(prompt): AUTOMATA.greedy(params, prompt, NEW) for prompt in PROMPTS}
    prompt, output = next((x, y) for x, (y, reason) in found.items() if reason == "nan_target")
    row = Generation(None, tuple(output), "nan_target", Stats())

    def message(config):
        return fault_of(row, system, config, prompt).text

    assert message(COLD) == FORBIDDEN
    bans = SamplerConfig(logit_bias=tuple((i, -np.inf) for i in range(V)))
    assert message(bans) == FORBIDDEN.replace("'g'", "'logit_bias'")
    assert message(SamplerConfig()) == "the target's logits were not finite"


@functools.cache
def plain(has_heat):
    options = dict(sampler=MIXED if has_heat else COLD, stop_tokens=STOPS)
    rows = spec_jax.SpeculativeDecoder(toys.TARGET).generate(PROMPTS, NEW, **options)
    reasons = collections.Counter(row.finish_reason for row in rows)
    assert min(reasons[x] for x in ("nan_target", "stop_token", "length")) > 1
    return ends(rows)


CELLS = [
    ("standalone", "match", "dynamic"),
    ("standalone", "greedy", "dynamic"),
    ("eagle3", "match", "static"),  # of a reduced vocabulary
    ("mtp in turn", "match", "chain"),
    ("ngram", "match", "chain"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_rows_are_those_of_plain_decoding_whatever_is_drafted(cell):
    decoder = make(*cell)
    has_heat = cell[1] == "match"
    options = dict(sampler=MIXED if has_heat else COLD, stop_tokens=STOPS)
    assert ends(decoder.generate(PROMPTS, NEW, **options)) == plain(has_heat)
    assert decoder.stats.accepted > 0 and decoder.stats.nan_drafts == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dspark", "host", "unmasked", "overlapped", "queue"])
def test_rows_are_those_of_plain_decoding_however_they_are_driven(name, caplog):
    options = dict(sampler=MIXED, stop_tokens=STOPS)
    make = functools.partial(toys.decoder, "standalone", "match")
    if name == "dspark":
        decoder = toys.decoder("dspark", "match")
    elif name == "host":
        drafter = spec_jax.host_drafter(lambda prefix, k, seed: [(prefix[-1] + 1) % V] * k)
        config = spec_jax.SpeculativeConfig("ngram", toys.K, "match")
        decoder = spec_jax.SpeculativeDecoder(toys.TARGET, None, config, drafter=drafter)
    elif name == "unmasked":  # drafts of a draft that knows no automaton
        decoder = make("static")
        options["draft_sampler"] = [SamplerConfig(x.temperature, seed=x.seed) for x in MIXED]
    elif name == "overlapped":
        own, draft, *_ = jax.devices()
        decoder = make(devices=Devices(draft=draft, target=own))
    else:
        rows = spec_jax.DecodeQueue(make(), PROMPTS, batch=5, max_new_tokens=NEW, **options)
        rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    if name != "queue":
        rows = decoder.generate(PROMPTS, NEW, **options)
    assert FORBIDDEN in caplog.text
    assert ends(rows) == plain(True)


@pytest.mark.exhaustive
def test_a_rule_may_compute_with_log_probabilities_and_is_blamed_for_its_own_verdicts():
    """What it makes of a node without a distribution is not read."""

    def by_logits(target, proposal, noise):
        verdict = chain.residual(target, proposal, noise)
        p = jax.nn.softmax(target.processed, axis=-1)
        drafted = jnp.take_along_axis(p[:-1], proposal.tokens[:, None], axis=1)[:, 0]
        coins = jnp.where(jnp.isnan(drafted), jnp.nan, verdict.accept_probs)
        return verdict.replace(accept_probs=coins)

    def wrong(target, proposal, noise):
        verdict = chain.residual(target, proposal, noise)
        return verdict.replace(replacement=jnp.full(V, jnp.nan))

    config = spec_jax.SpeculativeConfig(
        rejection_sampling_strategy="residual", **toys.SHAPES["chain"]
    )
    options = dict(sampler=sampler(temperature=1.0), stop_tokens=STOPS)
    options["draft_sampler"] = SamplerConfig(temperature=1.0)  # knows no automaton

    def rows(accept):
        rule = Rule("mine", batched(accept), is_lossless=True, needs_probs=True)
        decoder = spec_jax.SpeculativeDecoder(toys.TARGET, toys.DRAFT, config, rule=rule)
        return decoder.generate(PROMPTS, NEW, **options)

    expected = rows(chain.residual)
    assert ends(rows(by_logits)) == ends(expected)
    with pytest.raises(InvalidVerdictError) as error:
        rows(wrong)
    for row, other in zip(error.value.generations, expected):
        assert row.finish_reason == "invalid_verdict" or ends([row]) == ends([other])


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", ["chain", "static"])
def test_nan_of_the_draft_costs_its_drafts_and_no_token_and_is_counted(shape, caplog):
    target, draft = testing.mock_model(V, 0), testing.mock_model(V, 1)
    draft.params["logits"] = draft.params["logits"].at[::5].set(jnp.nan)
    config = spec_jax.SpeculativeConfig(rejection_sampling_strategy="match", **toys.SHAPES[shape])
    decoder = spec_jax.SpeculativeDecoder(target, draft, config)
    hot = dict(sampler=SamplerConfig(temperature=1.0), stop_tokens=())
    with caplog.at_level(logging.WARNING):
        rows = decoder.generate(PROMPTS, 12, **hot)
        warnings = [record.getMessage() for record in caplog.records]
    alone = spec_jax.SpeculativeDecoder(target).generate(PROMPTS, 12, **hot)
    assert ends(rows) == ends(alone)
    assert 0 < decoder.stats.nan_drafts < decoder.stats.rounds and decoder.stats.accepted > 0
    (warning,) = warnings
    assert "logits of drafter 'standalone' were not finite" in warning
    assert f"in {decoder.stats.nan_drafts} rounds" in warning


LATENT = dataclasses.replace(DEEPSEEK_TARGET, first_k_dense_replace=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("config", "shape"), [(LLAMA, "static"), (LATENT, "chain")], ids=["attention-tree", "latent"]
)
def test_a_token_whose_states_are_nan_reaches_only_what_attends_to_it(config, shape):
    """Neither the nodes before it or beside it, nor rounds after it was rejected."""
    bad, prompts = 3, [[i, j] for i in (0, 1, 2, 4) for j in (0, 1, 2, 4)]
    models = []
    for seed in range(2):
        params = random_weights(config, seed)
        params = params | {"embed": params["embed"].at[bad].set(jnp.nan)}
        models.append(LoadedModel(f"{seed}", transformer.model(config), params, config=config))
    speculative = spec_jax.SpeculativeConfig(
        rejection_sampling_strategy="match", **toys.SHAPES[shape]
    )
    decoder = spec_jax.SpeculativeDecoder(*models, speculative)
    hot = SamplerConfig(temperature=1.0, top_k=8, logit_bias=((bad, 0.5),))
    ban = SamplerConfig(temperature=1.0, top_k=8, logit_bias=((bad, -np.inf),))
    for options in (dict(sampler=hot), dict(sampler=ban, draft_sampler=hot)):
        rows = decoder.generate(prompts, 16, stop_tokens=(), **options)
        alone = spec_jax.SpeculativeDecoder(models[0])
        plain_rows = alone.generate(prompts, 16, stop_tokens=(), sampler=options["sampler"])
        assert ends(rows) == ends(plain_rows)
        is_met = [row.finish_reason == "nan_target" for row in rows]
        assert any(is_met) == ("draft_sampler" not in options) and not all(is_met)
    last = [row.trace.offered[8:] for row in rows]  # of the second call, whose drafts are not NaN
    assert any(row.stats.nan_drafts for row in rows) and all(max(x) > 0 for x in last)
