"""A kind from outside of the package that drafts a block in one pass goes where any kind goes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import block_kind
from support.block_heads import make_head, new
from support.tiny_models import LLAMA, random_weights

import spec_jax
from spec_jax import SpeculativeConfig, SpeculativeDecoder
from spec_jax.drafters import register, registry
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.evaluation import costs
from spec_jax.loading import LoadedModel
from spec_jax.meshes import make_mesh
from spec_jax.models import transformer
from spec_jax.planning import programs, roofline
from spec_jax.planning.work import Setting

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5]]
TARGET = LoadedModel("tiny", transformer.model(LLAMA), random_weights(LLAMA), config=LLAMA)


@pytest.fixture(scope="module", autouse=True)
def registered():
    yield register(block_kind.KIND)
    registry.unregister("block")


@pytest.fixture(scope="module")
def head(registered):
    return make_head(new(LLAMA.hidden_size, LLAMA.vocab_size, taps=(1, 3)))


K = 4


def test_its_passes_are_planned():
    config, setting = new(LLAMA.hidden_size, LLAMA.vocab_size, taps=(1, 3)), Setting(2, 100)
    verify, refresh, draft = roofline.decode_round(LLAMA, config, K, setting).passes
    assert [(x.name, x.count) for x in (verify, refresh, draft)] == [
        ("verify", 1),
        ("refresh", 1),
        ("draft", 1),
    ]
    size = lambda names: sum(
        w.size
        for path, w in jax.tree_util.tree_leaves_with_path(make_head(config).params)
        if path[-1].key in names
    )
    own, B = 2 * LLAMA.hidden_size * LLAMA.vocab_size, setting.batch  # the target's output head
    kv, ctx, heads = 2 * 2 * 4, setting.context, 2  # key-value numbers of a token, query heads
    assert refresh.work.flops == 2 * B * (K + 1) * size({"fc", "k", "v"})
    maps = size({"q", "k", "v", "o", "gate", "up", "down"})
    assert draft.work.flops == B * K * (2 * maps + own + 2 * heads * kv * ctx)
    one = (
        roofline.memory(LLAMA, config, setting).params
        - roofline.memory(LLAMA, None, setting).params
    )
    assert one == setting.itemsize * make_head(config).num_params
    job = programs.Job(target=LLAMA, draft=config, num_draft=K, slots=64, dtype="float32")
    traced = programs.trace_decode(job, make_mesh(job.mesh))
    assert "stablehlo.while" in traced.lowered.as_text()
    assert {x.shape for x in jax.tree.leaves(traced.params["draft"])} == {
        w.shape for w in jax.tree.leaves(make_head(config).params)
    }


@pytest.mark.exhaustive
def test_it_is_compared_and_its_speed_up_predicted(head):
    found = spec_jax.compare(
        TARGET, {"block": head}, PROMPTS, ks=K, temperatures=1.0, max_new_tokens=8
    )
    plain, drafted = found.results
    assert plain.cell.is_plain and drafted.cell.rule == "residual"
    assert drafted.predicted_speedup > 0 and drafted.round_time.draft_cost >= 0
    assert [*found.costs.first_ms] == ["block"] and not found.costs.draft_ms


def test_all_its_passes_are_timed_together(head):
    wanted = costs.timer_makers(TARGET, {"block": head}, {"block": {2, 5}}, 64, 1)
    passes = [costs.TimedLoop("target", k) for k in (0, 2, 5)]
    assert [*wanted] == [*passes, costs.TimedLoop("block", 2, 2), costs.TimedLoop("block", 5, 2)]
    times = {what: np.full(4, 2.0 + what.num_passes * what.num_draft) for what in wanted}
    found = costs.Costs.of_times(times, slots=64, batch=1)
    assert found.first_ms == {"block": {2: 4.0, 5: 10.0}}
    assert found.draft_cost("block", 5) == 10 / 5 / 2 and found.is_significant("block")


def test_without_a_format_it_is_neither_loaded_nor_saved(head, tmp_path):
    with pytest.raises(ConfigError, match="method 'block' has no weights to load: the format of"):
        spec_jax.load_draft("zoo/draft", TARGET, method="block")
    with pytest.raises(ConfigError, match="its kind 'block' has no `write`"):
        head.save(tmp_path, TARGET)


def test_weights_of_nested_tables_are_named_where_they_are_wrong(head):
    params = {**head.params, "layers": {**head.params["layers"]}}
    params["layers"]["1"] = {**params["layers"]["1"], "q": jnp.zeros((1, 1))}
    wrong = dataclasses.replace(head, params=params)
    with pytest.raises(WeightsError, match=r"layers\.1\.q has shape \[1, 1\]; its config asks for"):
        SpeculativeDecoder(TARGET, wrong, SpeculativeConfig("block", K))
