"""Agreement with ``speculators``: a P-EAGLE head that we export has the same logits there."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from speculators_models import load_theirs
from support.parallel_heads import HEADS, IDS, TARGET, V, head_of
from support.tiny_models import LLAMA

from spec_jax import load_draft, load_model
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context
from spec_jax.drafters.eagle.parallel import peagle
from spec_jax.models import transformer
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.sampling import make_sampler

torch = pytest.importorskip("torch", reason="parity needs torch (extra 'parity')")
pytest.importorskip("speculators", reason="see tests/parity/speculators.txt")

# What the package and those that it imports warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = np.random.default_rng(5).integers(0, V, 12)
K = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    save_pretrained(path, TARGET.params, LLAMA)
    return load_model(path)


def their_logits(monkeypatch, model, features, hidden, pairs):
    """Logits f32[len(pairs),K,U] of the drafts behind some pairs, by the package's own training.

    Its pairs are shifted as ours are: the state of a token beside the next one. Of what it would
    draw at random, the places of masks, all behind these pairs are taken.
    """
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    T = len(TEXT) - 1
    begin = torch.tensor([*range(T), *np.repeat(pairs, K - 1)])
    depth = torch.tensor([*[0] * T, *[*range(1, K)] * len(pairs)])
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **options: (begin, depth))
    found = []
    handle = model.lm_head.register_forward_hook(lambda m, x, y: found.append(y[0]))
    tensor = lambda x: torch.tensor(np.asarray(x))[None]
    options = dict(verifier_last_hidden_states=tensor(hidden[1:]), num_depths=K)
    options |= dict(loss_config=resolve_loss_config("kl_div", "eager"))  # the other is for a GPU
    with torch.no_grad():
        ids = tensor(TEXT[1:])
        model(tensor(features[:T]), ids, torch.zeros_like(ids), **options)
    handle.remove()
    logits = found[0].numpy()
    masked = logits[T:].reshape(len(pairs), K - 1, -1)
    return np.concatenate([logits[list(pairs), None], masked], axis=1)


@pytest.mark.parametrize("name", HEADS)
def test_an_exported_parallel_head_has_the_same_logits_there(tmp_path, target, name, monkeypatch):
    """After a prefill and after commits, of all masks that a round feeds."""
    config, n = HEADS[name], 3
    head = head_of(config)
    head.save(tmp_path, target, format="speculators")
    theirs = load_theirs(tmp_path, "peagle")
    theirs.load_verifier_weights()
    out = transformer.forward(TARGET.params, TEXT[None], config=LLAMA, taps=config.taps)
    lengths = (n, n + 3, n + 4)
    expected = their_logits(
        monkeypatch, theirs, out.features[0], out.hidden[0], [n - 1 for n in lengths]
    )
    drafter = peagle(config, transformer.model(LLAMA, config.taps))
    params = {"head": head.params, "target": target.params}
    sampler = make_sampler(SamplerConfig(), 1, V)

    @jax.jit
    def propose(state, length):
        text = jnp.asarray(TEXT[None], jnp.int32)
        request = jnp.zeros(1, jnp.uint32)
        context = Context(text, length[None], sampler, request, False, False, True)
        return drafter.propose(params, state, context, K)

    @jax.jit
    def begin():
        state, first = drafter.init(params, 1, 24), jnp.asarray(TEXT[None, :n], jnp.int32)
        pending = jnp.asarray(TEXT[n : n + 1])
        return drafter.prefill(params, state, first, jnp.asarray([n]), pending, out.features[:, :n])

    state = begin()
    ids = IDS if config.layer.vocab_size < V else np.arange(V)
    for i, length in enumerate(lengths):
        proposal, state = propose(state, jnp.int32(length))
        bound = 1e-5 * np.abs(expected[i]).max()
        assert np.abs(expected[i]).max() > 0.5
        np.testing.assert_allclose(proposal.logits[0][:, ids], expected[i], rtol=0, atol=bound)
        if i + 1 < len(lengths):
            more = jnp.asarray([lengths[i + 1] - length])
            after = jnp.asarray(TEXT[None, length + 1 : length + 5])
            new = after, more, out.features[:, length : length + 4], None
            state = jax.jit(drafter.commit)(params, state, *new)


@pytest.mark.parametrize("format", ["speculators", "SpecForge"])
@pytest.mark.parametrize("name", HEADS)
def test_what_they_save_again_is_the_same_parallel_head_here(tmp_path, target, name, format):
    """In their own format by their own loader, in SpecForge's by ours."""
    config = HEADS[name]
    if format == "SpecForge":
        norms = {"fc_norm": False, "norm_before_fc": False}
        layer = dataclasses.replace(config.layer, model_type="llama")
        config = dataclasses.replace(config, layer=layer, **norms)
    head = head_of(config)
    head.save(tmp_path / "ours", target, format=format)
    again = tmp_path / "ours"
    if format == "speculators":
        again = tmp_path / "theirs"
        load_theirs(tmp_path / "ours", "peagle").save_pretrained(again)
    read = load_draft(again, target)
    assert read.config == config and read.format == format
    jax.tree.map(np.testing.assert_array_equal, read.params, head.params)
