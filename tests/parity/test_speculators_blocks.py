"""Agreement with ``speculators``: a block drafter that we export has the same logits there."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from speculators_models import load_theirs, torch
from support.block_drafts import HEADS, TARGET, features_of, head_of
from support.tiny_models import LLAMA

from spec_jax import load_model
from spec_jax.contracts import Prompt
from spec_jax.drafters.block.model import block_drafter, block_states
from spec_jax.drafters.block.objective import candidate_loss
from spec_jax.drafters.block.steps import confidence_logits, normed, step_logits
from spec_jax.models import transformer
from spec_jax.models.checkpoint import save_pretrained

# What the package and those that it imports warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = np.random.default_rng(5).integers(0, LLAMA.vocab_size, 12)
CASES = {  # none with a window: its mask is the caller's there
    "dflash": dataclasses.replace(HEADS["dflash"], windows=(), is_causal=()),
    "dflash2": dataclasses.replace(HEADS["dflash2"], windows=()),
    "dspark": HEADS["dspark"],
    "gated": dataclasses.replace(HEADS["gated"], windows=(), is_causal=()),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    save_pretrained(path, TARGET.params, LLAMA)
    return load_model(path)


@torch.no_grad()
def their_block(model, features, ids):
    """States under the final norm f32[S,D] and base logits f32[S,V], by the package's layers."""
    n, S = len(features), len(ids)
    context = model.hidden_norm(model.fc(torch.tensor(features)[None]))
    x, at = model.embed_tokens(torch.tensor(ids)[None]), torch.arange(n + S)[None]
    turns = model.rotary_emb(x, at)
    options = dict(attention_mask=None, position_ids=at, use_cache=False, position_embeddings=turns)
    for layer in model.layers:
        x = layer(hidden_states=x, target_hidden=context, **options)
    h = model.norm(x)
    return h, model.lm_head(h)


@torch.no_grad()
def their_step(model, config, h, base, before):
    """Logits f32[S,V] and confidences f32[S], after the tokens ``before`` each position."""
    if config.name == "dflash":
        return base[0].numpy(), None
    before = torch.tensor(before)[None]
    if config.name == "dflash2":
        ids, scores = model.candidate_selector.select(base, h, before)
        whole = torch.full_like(base, -torch.inf).scatter(-1, ids, scores)
        return whole[0].numpy(), None
    e = model.markov_head.prev_embeddings(before)
    bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=h, prev_emb=e)
    read = torch.cat([h, e], dim=-1) if config.confidence_with_markov else h
    return (base + bias)[0].numpy(), torch.sigmoid(model.confidence_head(read))[0].numpy()


@pytest.mark.parametrize("name", CASES)
def test_an_exported_block_drafter_has_the_same_logits_there(tmp_path, target, name):
    """After a prefill and after a commit; the step after tokens that are given."""
    config = CASES[name]
    head = head_of(config)
    head.save(tmp_path, target, format="speculators")
    theirs = load_theirs(tmp_path, config.name)
    theirs.load_verifier_weights()
    model = transformer.model(LLAMA, config.taps)
    drafter = block_drafter(config, model)
    params = {"head": head.params, "target": target.params}
    features = features_of(config, TEXT[None])
    first, after = 0 if config.is_anchor_first else 1, np.arange(3, 3 + config.max_draft) % 31

    @jax.jit
    def ours(cache, pending):
        x, _ = block_states(params, pending, cache, config.block_size, config, model)
        x = x[:, first:]
        base = model.unembed(params["target"], normed(params["head"], x, config))
        before = jnp.concatenate([pending[:, None], after[None, :-1]], axis=1)
        logits = step_logits(params, base, x, before, config, model)
        if config.name in ("dflash", "dflash2"):
            return logits[0], None
        return logits[0], jax.nn.sigmoid(confidence_logits(params["head"], x, before, config))[0]

    state = drafter.init(params, 1, 24)
    n = 5
    state = drafter.prefill(
        params, state, Prompt(TEXT[None, :n], jnp.asarray([n]), None, features[:, :n])
    )
    for more in (3, 0):
        logits, confidence = ours(state, jnp.asarray(TEXT[n : n + 1]))
        ids = np.full(config.block_size, config.mask_token_id)
        ids[0] = TEXT[n]
        h, base = their_block(theirs, np.array(features[0, :n]), ids)
        before = np.concatenate([TEXT[n : n + 1], after[:-1]])
        expected, sure = their_step(theirs, config, h[:, first:], base[:, first:], before)
        largest = np.abs(expected[np.isfinite(expected)]).max()
        assert largest > 0.5
        # What is no candidate of DFlash 2 cannot be drafted there, and here only beside no other.
        logits = jnp.where(logits < -1e3, -jnp.inf, logits)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * largest)
        if sure is not None:
            np.testing.assert_allclose(confidence, sure, rtol=0, atol=1e-5)
        new = features[:, n : n + 4]
        state = drafter.commit(params, state, None, jnp.asarray([more]), new, None)
        n += more


@torch.no_grad()
def test_labels_among_candidates_cost_the_same_there(tmp_path, target):
    """In nats, of labels that are candidates and of others, by the package's own selector."""
    from speculators.models.dflash2 import metrics

    config = CASES["dflash2"]
    head = head_of(config)
    head.save(tmp_path, target, format="speculators")
    theirs = load_theirs(tmp_path, config.name)
    theirs.load_verifier_weights()
    rng = np.random.default_rng(3)
    base = rng.normal(size=(1, 24, LLAMA.vocab_size)).astype(np.float32)
    x = rng.normal(size=(1, 24, LLAMA.hidden_size)).astype(np.float32)
    before, labels = rng.integers(0, LLAMA.vocab_size, (2, 1, 24))
    nats, is_candidate = candidate_loss(head.params, base, x, before, labels, config)
    logits, selector = torch.tensor(base), theirs.candidate_selector
    likely = logits.topk(selector.top_k, dim=-1).indices
    ids, place, has_label = metrics.selector_training_candidates(likely, torch.tensor(labels))
    h = theirs.norm(torch.tensor(x))
    scores = selector.score_candidates(logits, h, torch.tensor(before), ids)
    expected = torch.nn.functional.cross_entropy(scores[0], place[0], reduction="none")
    np.testing.assert_array_equal(is_candidate, has_label)
    assert 0 < is_candidate.sum() < is_candidate.size
    np.testing.assert_allclose(nats[0], expected, rtol=1e-5, atol=1e-5)
