"""What planning refuses: calls, and the words that matter."""

import dataclasses

import pytest

from spec_jax import planning as plan
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.errors import ConfigError
from spec_jax.meshes import make_mesh
from spec_jax.models.config import ModelConfig
from spec_jax.planning import hlo
from spec_jax.planning.chips import CHIPS, Topology
from spec_jax.planning.presets import PRESETS, find_config
from spec_jax.planning.roofline import Setting, predict, prefill_work, round_work
from spec_jax.tree import Tree

TARGET = PRESETS["llama-3.1-8b"]
EAGLE = EagleConfig.of_target(TARGET, draft_vocab_size=32000)
SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=4,
)
NO_LOOP = "ENTRY %f (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}"


def decode(**changes):
    job = plan.Job(target=SMALL, batch=4, slots=128, mesh="data:2,tensor:4", dtype="float32")
    plan.trace_decode(dataclasses.replace(job, **changes), make_mesh(job.mesh))


def train(**changes):
    job = plan.TrainJob(target=SMALL, batch=8, length=16, mesh="data:8")
    plan.trace_train(dataclasses.replace(job, **changes), make_mesh("data:8"))


def change(**fields):
    return dataclasses.replace(SMALL, **fields)


REFUSED = [
    (lambda: Topology.parse("v9:2x2"), "known chips: v4, v5e"),
    (lambda: Topology.parse("v5e:3x3"), "'v5e:3x3'; shapes of v5e: 1x1, 2x2"),
    (lambda: Topology.parse("v5e"), "shapes of v5e"),
    (lambda: Topology.parse("2x4"), "such as v5e:2x4"),
    (lambda: Topology.parse("h100:3"), "shapes of h100: 1, 2, 4, 8, 2x8"),
    (lambda: Topology.parse("rtx3090:1").describe(), "only TPUs and a100, h100, h200, b200"),
    (lambda: find_config("llama-9b"), "'llama-9b'; expected one of llama-3.1-8b"),
    (lambda: Setting(batch=0), "batch is 0"),
    (lambda: Setting(context=-1), "context -1"),
    (lambda: Setting(mesh="data:0"), "data:0"),
    (lambda: Setting(mesh="model:2"), "model:2"),
    (lambda: prefill_work(TARGET, 0), "prompt_tokens is 0 and chunk 512"),
    (lambda: prefill_work(TARGET, 9, chunk=0), "prompt_tokens is 9 and chunk 0"),
    (lambda: round_work(TARGET, EAGLE, -1), "num_draft is -1"),
    (lambda: round_work(TARGET, EAGLE, 4, tree=Tree((0, 0))), "the tree's 2 nodes"),
    (lambda: round_work(TARGET, None, 4), "num_draft is 4 without a draft"),
    (lambda: round_work(TARGET, "eagle", 4), "draft is 'eagle'"),
    (lambda: round_work(TARGET, "nothing", 4), "no drafter kind 'nothing'"),
    (lambda: predict(TARGET, EAGLE, 2, 3.5, CHIPS["v5e"]), "tokens is 3.5; .* emits 1 to 3"),
    (lambda: decode(target=change(num_attention_heads=6, num_key_value_heads=3)), "6 heads"),
    (lambda: decode(draft=change(vocab_size=32), num_draft=2), "vocabularies differ"),
    (lambda: train(batch=6), "batch is 6.*data:8"),
    (lambda: hlo.read("module @jit_f {}"), "no entry"),
    (lambda: hlo.read(NO_LOOP).round(), "depends on its data"),
    (lambda: hlo.read(NO_LOOP.replace("parameter", "teleport")), "opcode teleport"),
]


@pytest.mark.parametrize("call, words", REFUSED)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
