"""P-EAGLE: what it computes, the law of its cache, its text, and its rounds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import parallel_heads
from safetensors.numpy import load_file, save_file
from support.block_drafts import exact
from support.parallel_heads import HEADS, IDS, SIZES, TARGET, V, head_of, tensors_of
from support.prefix_rounds import TEXT, N, Rounds, check_two_rounds
from support.tiny_models import LLAMA

from spec_jax import load_draft
from spec_jax.drafters.eagle.parallel import peagle
from spec_jax.errors import ConfigError
from spec_jax.inspection import inspect
from spec_jax.planning import roofline
from spec_jax.planning.work import Setting

K = 4


@pytest.mark.representatives("p-eagle")
@pytest.mark.parametrize("name", HEADS)
def test_two_rounds_draft_what_a_pass_of_true_and_masked_pairs_defines(name):
    config = HEADS[name]
    rounds = Rounds(peagle, head_of(config))
    tensors, embed = exact(tensors_of(config)), exact(TARGET.params["embed"])
    features = exact(rounds.features[0])
    ids = np.arange(V) if config.layer.vocab_size == V else IDS

    def expected(n):
        logits = np.full((K, V), -np.inf)
        prefix = features[:n], TEXT[1 : n + 1]
        logits[:, ids] = parallel_heads.scores(tensors, config, *prefix, embed, K)
        return logits

    check_two_rounds(rounds, K, expected)


@pytest.mark.exhaustive
def test_marginals_do_not_depend_on_k():
    rounds = Rounds(peagle, head_of(HEADS["p-eagle"]))
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
