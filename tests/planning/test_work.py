"""What a pass costs, against published sizes, real arrays, sums by hand and XLA's own count."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from support.published_configs import (
    DEEPSEEK_V3,
    GLM_45_AIR,
    QWEN_27B,
    QWEN_30B_A3B,
    QWEN_35B_A3B,
    QWEN_NEXT_80B,
)

from spec_jax.drafters.eagle.model import EagleConfig, head_table
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.meshes import make_mesh
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.models.families import family_of_type
from spec_jax.models.families.bamba import BambaConfig
from spec_jax.models.families.deepseek import DeepseekConfig
from spec_jax.models.families.qwen3_moe import Qwen3MoeConfig
from spec_jax.models.params import num_params, param_shardings
from spec_jax.planning import choose, roofline
from spec_jax.planning.chips import Topology
from spec_jax.planning.presets import PRESETS, find_config
from spec_jax.planning.work import Setting, Stack
from spec_jax.sharding import spec, state_axes

# 4 query heads, 2 key-value heads of 8.
_SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
_SMALL |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
SMALL = ModelConfig(**_SMALL)
MESH = "data:2,tensor:2"


NUM_PARAMS = [
    ("llama-3.1-8b", 8_030_261_248),
    ("llama-3.1-70b", 70_553_706_496),
    ("llama-3.1-405b", 405_853_388_800),
    ("llama-3.2-1b", 1_235_814_400),
    ("qwen3-8b", 8_190_735_360),
    ("qwen3-32b", 32_762_123_264),
    ("qwen3-14b", 14_768_307_200),
    ("vicuna-7b", 6_738_415_616),
    ("vicuna-13b", 13_015_864_320),
    ("vicuna-33b", 32_528_943_616),
    ("smollm2-135m", 134_515_008),
    ("qwen3-30b-a3b", 30_532_122_624),
]


@pytest.mark.parametrize("name, count", NUM_PARAMS)
def test_presets_have_the_published_numbers_of_parameters(name, count):
    config = find_config(name)
    assert num_params(config) == count
    # A tied embedding is the output head, so it is counted once here too.
    assert Stack.of(config, Setting()).num_params == count


@pytest.mark.parametrize("published", [QWEN_30B_A3B, QWEN_27B])
def test_presets_of_other_families_are_the_published_configs(published):
    config = family_of_type(published["model_type"]).config.from_hf(published)
    untold = dict(bos_token_id=None, eos_token_id=())
    assert dataclasses.replace(config, **untold) in PRESETS.values()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b", "llama-3.2-1b"])
def test_one_device_holds_what_the_shardings_of_the_weights_say(name):
    config, mesh = PRESETS[name], make_mesh(MESH)
    shapes = jax.eval_shape(lambda key: transformer.init_params(config, key), jax.random.key(0))
    parts = jax.tree.map(
        lambda x, s: math.prod(s.shard_shape(x.shape)), shapes, param_shardings(config, mesh)
    )
    assert Stack.of(config, Setting(mesh=MESH)).num_params == sum(jax.tree.leaves(parts))


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_one_device_holds_its_part_of_the_cache(tensor):
    # Of two key-value heads on four devices along "tensor" each holds one.
    setting = Setting(mesh=f"data:2,tensor:{tensor}", dtype="float32")
    mesh = make_mesh(setting.mesh)
    with jax.set_mesh(mesh):
        cache = transformer.init_cache(SMALL, 4, 16)
    parts = [
        x.nbytes // math.prod(mesh.shape[name] for name in spec(axes, x.shape, mesh) if name)
        for x, axes in zip(jax.tree.leaves(cache), jax.tree.leaves(state_axes(cache)))
        if x.dtype == jnp.float32
    ]
    stack = Stack.of(SMALL, setting)
    assert stack.slot_bytes * 16 * 2 + stack.fixed_bytes == sum(parts)  # 4 rows over data:2
    assert stack.slot_bytes == 2 * 2 * max(1, 2 / tensor) * 8 * 4


def test_pass_is_the_sum_written_by_hand():
    B, T, S, D, F, V, L = 3, 5, 16, 32, 48, 64, 2
    work = Stack.of(SMALL, Setting(batch=B, context=S)).run(Setting(batch=B, context=S), T, T)
    maps = L * (D * 32 + 2 * D * 16 + 32 * D + 3 * D * F)
    norms, entry = L * 2 * D + D, L * 2 * 16  # entry: keys and values of a slot
    attention = L * 2 * 2 * B * T * 32 * S  # scores and sums, over all query heads
    assert work.flops == 2 * B * T * (maps + D * V) + attention
    weights, rows, logits = 2 * (maps + norms + D * V), 2 * B * T * D, 2 * 4 * B * T * V
    assert work.hbm_bytes == weights + rows + 2 * entry * B * (S + T) + logits
    assert (work.link_bytes, work.collectives) == (0, 0)


def test_shards_are_summed_after_every_layer_and_logits_exchanged_where_they_are_sampled():
    setting = Setting(batch=4, context=16, mesh=MESH)
    one, rows, T, D, V = Stack.of(SMALL, setting), 2, 3, 32, 64
    greedy = one.run(setting, T, T)
    # Attention and feed-forward part of both layers, and the embedding whose rows are split.
    assert greedy.collectives == 2 * 2 + 1
    assert greedy.link_bytes == 5 * (2 * 1 / 2) * rows * T * D * 2
    # Four rows: each device samples one, and sends the other's half. Six: it samples all of its
    # group's three, and so reads and writes them whole.
    for batch, logits in ((4, rows * T * V / 2), (6, 3 * T * V)):
        greedy, sampled = (
            one.run(Setting(batch=batch, context=16, mesh=MESH, is_sampled=is_sampled), T, T)
            for is_sampled in (False, True)
        )
        assert sampled.collectives == greedy.collectives + 1
        assert sampled.link_bytes - greedy.link_bytes == 4 * logits / 2
        assert sampled.hbm_bytes - greedy.hbm_bytes == 2 * 4 * logits
    assert one.run(setting, T).hbm_bytes < greedy.hbm_bytes  # nothing is scored


@pytest.mark.parametrize("scored", [1, 4])
def test_arithmetic_is_what_xla_counts(scored):
    options = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    config = ModelConfig(vocab_size=512, hidden_size=128, intermediate_size=256, **options)
    B, T, S = 2, 4, 64

    def one_pass(params, tokens, cache):
        output = transformer.forward(params, tokens, cache, config=config)
        return transformer.unembed(params, output.hidden[:, -scored:])

    shapes = jax.eval_shape(
        lambda key: (
            transformer.init_params(config, key),
            jnp.zeros((B, T), jnp.int32),
            transformer.init_cache(config, B, S),
        ),
        jax.random.key(0),
    )
    counted = jax.jit(one_pass).lower(*shapes).cost_analysis()["flops"]
    setting = Setting(batch=B, context=S, dtype="float32")
    predicted = Stack.of(config, setting).run(setting, T, scored).flops
    # XLA also counts norms, softmax and masks, element by element.
    assert predicted <= counted <= 1.08 * predicted


def test_layers_without_a_cache_of_slots_keep_a_fixed_one():
    settings = dict(attn_layer_indices=(1,), mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8)
    bamba = BambaConfig(**{k: x for k, x in _SMALL.items() if k != "head_dim"}, **settings)
    stack = Stack.of(bamba, Setting())
    assert stack.num_params == num_params(bamba)
    assert stack.slot_bytes == 2 * 2 * 8 * 2  # one of its layers attends
    assert stack.fixed_bytes > 0 == Stack.of(SMALL, Setting()).fixed_bytes


def test_a_published_model_of_latents_and_experts_is_counted_on_its_mesh():
    config, setting = DeepseekConfig.from_hf(DEEPSEEK_V3), Setting(batch=8, mesh="data:1,tensor:32")
    stack = Stack.of(config, setting)
    assert stack.slot_bytes == 61 * (512 + 64) * 2  # on every device
    assert stack.queries == 2 * 128 / 32  # heads of a device; scores and sums take the same slot
    experts = 58 * 256 * 3 * 7168 * 2048
    assert experts / 32 < stack.num_params < 1.1 * num_params(config) / 32
    module = MtpConfig.of_target(config)
    work = roofline.round_work(config, module, 2, setting)
    assert [one.name for one in work.passes] == ["verify", "refresh", "draft"]
    assert roofline.memory(config, module, setting).cache == 62 * (512 + 64) * 2 * 8 * 1024


EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12)
SPARSE = Qwen3MoeConfig(**_SMALL, **EXPERTS)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_experts_are_read_that_any_token_is_expected_to_choose(tokens):
    """Against every choice of every token, all equally likely; a token computes its own alone."""
    stack, X, one = Stack.of(SPARSE, Setting()), 5, 3 * 32 * 12
    choices = itertools.product(itertools.combinations(range(X), 2), repeat=tokens)
    counts = [len({e for chosen in choice for e in chosen}) for choice in choices]
    assert stack.experts == 2 * X * one and stack.num_params == num_params(SPARSE)
    expected = 2 * one * sum(counts) / len(counts)
    assert stack.experts_read(tokens) == pytest.approx(expected)
    setting = Setting(context=0)
    plain = Stack.of(dataclasses.replace(SPARSE, num_experts_per_tok=1), setting)
    more = stack.run(setting, tokens).flops - plain.run(setting, tokens).flops
    assert more == pytest.approx(2 * tokens * 2 * one)  # one expert more, in two layers


PUBLISHED = {
    "30B-A3B": QWEN_30B_A3B,
    "35B-A3B": QWEN_35B_A3B,
    "Next-80B": QWEN_NEXT_80B,
    "GLM-4.5-Air": GLM_45_AIR,
    "DeepSeek-V3": DEEPSEEK_V3,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_of_experts_is_planned_with_them_split(name):
    published = PUBLISHED[name]
    config = family_of_type(published["model_type"]).config.from_hf(published)
    X = published.get("num_experts") or published["n_routed_experts"]
    topology = Topology.parse("v5e:4x4")
    sizes = {int(mesh.rpartition(":")[2]) for mesh in choose.meshes(config, topology, 16)}
    assert max(sizes) == 16 and X % 16 == 0
    whole, setting = Stack.of(config, Setting()), Setting(batch=16, mesh="data:1,tensor:16")
    stack = Stack.of(config, setting)
    assert whole.num_params == num_params(config) and stack.experts == whole.experts / 16
    assert whole.experts > 0.8 * whole.num_params
    draft = MtpConfig.of_target(config) if name != "30B-A3B" else "ngram"
    one, many = (roofline.round_work(config, draft, 2, Setting(batch=b)).work for b in (1, 999))
    active = whole.matrices + whole.head + whole.chosen * whole.experts
    assert 2 * active < one.hbm_bytes < 2 * whole.num_params / 3 < 2 * whole.num_params
    assert many.hbm_bytes > 2 * whole.num_params


def test_head_reads_the_targets_states_once_a_round():
    config = EagleConfig.of_target(PRESETS["llama-3.1-8b"], draft_vocab_size=32000)
    whole = Stack.of(config, Setting())
    sizes = {name: math.prod(p.shape) for name, p in head_table(config).items()}
    assert whole.num_params == sum(sizes.values())
    again = Stack.of(config, Setting(), skipped_weights=("fc", "input_norm"))
    assert whole.num_params - again.num_params == sizes["fc"] == 3 * 4096 * 4096
    module = MtpConfig.of_target(PRESETS["qwen3-8b"])
    assert Stack.of(module, Setting(), part="0") == Stack.of(module, Setting())
    assert Stack.of(module, Setting()).head == 0  # the target's


def test_replicated_draft_is_whole_on_every_device():
    draft = PRESETS["llama-3.2-1b"]
    setting = Setting(mesh="data:2,tensor:4", is_draft_replicated=True)
    stack = Stack.of(draft, setting, is_draft=True)
    assert (stack.num_params, stack.num_reduced) == (num_params(draft), 0)
    assert Stack.of(draft, setting).num_params < num_params(draft) / 3.9
