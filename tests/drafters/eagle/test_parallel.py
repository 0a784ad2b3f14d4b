"""P-EAGLE: what it computes, the law of its cache, its text, and its rounds."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import parallel_heads
from safetensors.numpy import load_file, save_file
from support.parallel_heads import HEADS, IDS, SIZES, TARGET, V, head_of, tensors_of
from support.tiny_models import LLAMA

from spec_jax import load_draft
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context
from spec_jax.drafters.eagle.parallel import peagle
from spec_jax.errors import ConfigError
from spec_jax.inspection import inspect
from spec_jax.models import transformer
from spec_jax.planning import roofline
from spec_jax.planning.work import Setting
from spec_jax.sampling import make_sampler

TEXT = np.random.default_rng(5).integers(0, V, 14)
N = np.arange(1, 7)  # one row a prompt's length
MORE = 1 + N % 4  # and what each commits after it
K = 4


def exact(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def features_of(config):
    out = transformer.forward(TARGET.params, TEXT[None], config=LLAMA, taps=config.taps)
    return out.features


class Rounds:
    """A drafter whose rows are prefixes of one text."""

    def __init__(self, name, tree=None):
        self.config = HEADS[name]
        self.drafter = peagle(self.config, transformer.model(LLAMA, self.config.taps), tree)
        self.params = {"head": head_of(self.config).params, "target": TARGET.params}
        self.features = features_of(self.config)
        self.tokens = jnp.asarray(np.tile(TEXT, (len(N), 1)), jnp.int32)
        self.propose = jax.jit(self._propose, static_argnums=2)

    def prefilled(self, lengths, *chunk):
        T = int(max(lengths))
        features = jnp.repeat(self.features[:, :T], len(N), axis=0)
        prompt = self.tokens[:, :T], jnp.asarray(lengths), jnp.asarray(TEXT[lengths]), features

        def run(params, *prompt):
            state = self.drafter.init(params, len(N), 20)
            return self.drafter.prefill(params, state, *prompt, *chunk)

        return jax.jit(run)(self.params, *prompt)

    def committed(self, state, lengths, more):
        at = lengths[:, None] + np.arange(4)
        new = jnp.asarray(TEXT[at + 1]), jnp.asarray(more), self.features[0][at], None
        return jax.jit(self.drafter.commit)(self.params, state, *new)

    def _propose(self, state, length, num_draft):
        sampler = make_sampler(SamplerConfig(), len(N), V)
        reads = (False, False, self.drafter.tree is None)
        request = jnp.zeros(len(N), jnp.uint32)
        context = Context(self.tokens, length, sampler, request, *reads)
        return self.drafter.propose(self.params, state, context, num_draft)

    def expected(self, length, num_draft, shift=0):
        """Logits f64[K,V] by independent arithmetic."""
        features, embed = exact(self.features[0, :length]), exact(TARGET.params["embed"])
        ids = np.arange(V) if self.config.layer.vocab_size == V else IDS
        tensors, after = exact(tensors_of(self.config)), TEXT[1 : length + 1]
        own = parallel_heads.scores(tensors, self.config, features, after, embed, num_draft, shift)
        logits = np.full((num_draft, V), -np.inf)
        logits[:, ids] = own
        return logits


@pytest.mark.representatives("p-eagle")
@pytest.mark.parametrize("name", HEADS)
def test_two_rounds_draft_what_a_pass_of_true_and_masked_pairs_defines(name):
    """After prefill, and after a commit of any number of tokens; one row a prefix."""
    rounds = Rounds(name)

    def check(proposal, lengths):
        for b, n in enumerate(lengths):
            logits = rounds.expected(n, K)
            assert proposal.tokens[b].tolist() == logits.argmax(-1).tolist()
            bound = 1e-5 * np.abs(logits[np.isfinite(logits)]).max()
            np.testing.assert_allclose(proposal.logits[b], logits, rtol=0, atol=bound)

    state = rounds.prefilled(N)
    proposal, state = rounds.propose(state, jnp.asarray(N), K)
    check(proposal, N)
    here, late = (rounds.expected(N[-1], K, shift)[1:, IDS] for shift in (0, 1))
    assert np.abs(here - late).max() > 1e-2  # masks one position further are others
    state = rounds.committed(state, N, MORE)
    check(rounds.propose(state, jnp.asarray(N + MORE), K)[0], N + MORE)
    fresh = rounds.prefilled(N + MORE, 3)  # in chunks of three
    caches = (state.cache, fresh.cache)
    for ours, theirs in zip(*(cache.keys + cache.values for cache in caches)):
        shape = (len(N), -1, *ours.shape[-2:])
        for b, n in enumerate(N + MORE):
            np.testing.assert_allclose(
                ours.reshape(shape)[b, :, :n], theirs.reshape(shape)[b, :, :n], atol=1e-5
            )
    np.testing.assert_array_equal(state.cache.length, fresh.cache.length)


@pytest.mark.exhaustive
def test_marginals_do_not_depend_on_k():
    rounds = Rounds("p-eagle")
    state = rounds.prefilled(N)
    short, long = (rounds.propose(state, jnp.asarray(N), k)[0].logits for k in (2, 5))
    np.testing.assert_allclose(short, long[:, :2], atol=1e-5)


KEYS = ("mask_token_id", "ptd_token_id", "pard_token")


def test_a_file_says_the_mask_and_how_many_drafts_were_trained(tmp_path):
    """By any of the projects' keys; the caller may say otherwise, and says what is left out."""
    config = HEADS["one layer"]
    head_of(config).save(tmp_path, TARGET, format="speculators")
    file = tmp_path / "config.json"
    stated = json.loads(file.read_text())
    assert stated["parallel_drafting"] is True and stated["speculators_model_type"] == "peagle"
    (proposal,) = stated["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == config.max_draft
    bare = {name: value for name, value in stated.items() if name not in (*KEYS, "max_draft")}

    def read(hf, **overrides):
        file.write_text(json.dumps(hf))
        return load_draft(tmp_path, TARGET, **overrides).config

    for key in KEYS:
        assert read({**bare, key: 7}) == config
    given = read({**bare, "pard_token": 7}, mask_token_id=3, max_draft=None)
    assert (given.mask_token_id, given.max_draft) == (3, None)
    with pytest.raises(ConfigError, match="has none of mask_token_id, ptd_token_id, pard_token; "):
        read(bare)
    with pytest.raises(ConfigError, match="states several masks"):
        read({**bare, "pard_token": 7, "ptd_token_id": 8})
    with pytest.raises(ConfigError, match=r"pard_token is \[1\]; expected an integer"):
        read({**bare, "pard_token": [1]})
    with pytest.raises(ConfigError, match="mask_token_id is 31; there are 31 embeddings"):
        read(bare, mask_token_id=V)
    file.write_text(json.dumps(stated))
    found = inspect(tmp_path)
    assert found.kind == "peagle" and "max_draft" not in str(found.notes)


def test_the_masked_state_may_be_stored_as_a_row(tmp_path):
    """As NeMo writes it."""
    head = head_of(HEADS["one layer"])
    head.save(tmp_path, TARGET)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    save_file({**stored, "mask_hidden": stored["mask_hidden"][0]}, file)
    again = load_draft(tmp_path, TARGET)
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)


def test_the_pass_of_all_masks_is_planned():
    """A refresh, and all masked pairs at once, whose scores are those of all drafts."""
    config, (B, context) = HEADS["one layer"], (2, 100)
    planned = roofline.round_work(LLAMA, config, K, Setting(B, context)).passes
    assert [(x.name, x.count) for x in planned] == [("verify", 1), ("refresh", 1), ("draft", 1)]
    sizes = {n: w.size for n, w in head_of(config).params.items() if w.ndim == 2}
    maps = sum(sizes[name] for name in ("q", "k", "v", "o", "gate", "up", "down"))
    attended = 4 * SIZES["num_attention_heads"] * SIZES["head_dim"] * context  # a query's
    _, refresh, draft = planned
    assert refresh.work.flops == B * (K + 1) * (2 * (maps + sizes["fc"]) + attended)
    assert draft.work.flops == B * ((K - 1) * (2 * maps + attended) + K * 2 * sizes["head"])
