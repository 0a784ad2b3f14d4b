"""Plans: the planned program is the one that decodes, and its counts are those of known sizes."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest

from spec_jax import decoding
from spec_jax import planning as plan
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.request import make_request
from spec_jax.meshes import make_mesh
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.models.loaded import LoadedModel
from spec_jax.models.params import num_params
from spec_jax.planning.chips import CHIPS
from spec_jax.sampling import make_sampler
from spec_jax.train.placement import device_bytes

MESH = "data:2,tensor:4"
L, B, S, G, H = 3, 4, 128, 4, 8
_TARGET = dict(num_hidden_layers=L, num_attention_heads=8, num_key_value_heads=G, head_dim=H)
_TARGET |= dict(hidden_size=32, intermediate_size=64, vocab_size=64, scan_layers=True)
TARGET = ModelConfig(**_TARGET)
JOB = plan.Job(target=TARGET, batch=B, slots=S, mesh=MESH, dtype="float32")


@pytest.fixture(scope="module")
def compiled() -> plan.Compiled:
    return plan.compile_and_count(lambda: plan.trace_decode(JOB, make_mesh(MESH)))


def test_the_planned_program_is_the_one_that_decodes():
    mesh = make_mesh(MESH)
    params = transformer.init_params(TARGET, jax.random.key(0))
    target = LoadedModel("target", transformer.model(TARGET), params, config=TARGET)
    engine = SpeculativeDecoder(target, mesh=mesh).engine()
    sampler = make_sampler(JOB.sampler, B, TARGET.vocab_size)
    ids = [[1, 2, 3]] * B
    request = make_request(engine.system, ids, 20, sampler, sampler, stop_tokens=[7], slots=S)
    state = engine.prefill(request)
    args = (engine.params(B), state, jnp.zeros(B, jnp.int32), jnp.int32(4), jnp.int32(1))
    with jax.set_mesh(mesh):
        lowered = decoding.generate.lower(*args, system=engine.system)
    planned = plan.trace_decode(JOB, mesh).lowered
    shapes = lambda lowered: [(x.shape, x.dtype) for x in jax.tree.leaves(lowered.in_avals)]
    assert shapes(planned) == shapes(lowered)
    # From the loop to the end of the main function; helpers are numbered by what jax has traced.
    main = lambda lowered: lowered.as_text().split("stablehlo.while", 1)[1].split("func.func")[0]
    loop = lambda lowered: re.sub(r"@(\w+?)_\d+", r"@\1", main(lowered))
    assert loop(planned) == loop(lowered)


def test_bytes_on_a_device_are_those_of_its_parts(compiled):
    cache = 2 * L * (B // 2) * (G // 4) * S * H * 4
    split = 3 * 32 * 64 + 2 * 32 * 8 * H + 2 * 32 * G * H  # mlp, q and o, k and v
    whole = 2 * 32  # norms
    params = 4 * (L * (split // 4 + whole) + 2 * 64 * 32 // 4 + 32)
    needs = compiled.needs
    assert (needs.cache, needs.params) == (cache, params)
    assert needs.aliased == needs.state > cache
    assert needs.arguments > cache + params
    assert needs.total >= needs.arguments + needs.temporaries


def test_a_round_of_plain_decoding_has_two_reductions_a_layer_and_few_beside(compiled):
    counted = compiled.counted
    assert set(counted.collectives) == {"all-reduce"}
    assert 2 * L < counted.num_collectives <= 2 * L + 6
    assert (counted.in_branches, counted.unknown_loops) == (0, [])
    # A CPU slices each layer's keys and values out of the stack; nothing else copies them.
    assert [(times, size) for _, times, size, _ in counted.copies] == [(L, B // 2 * S * H * 4)] * 2
    assert counted.hbm_bytes > compiled.needs.params


def test_a_program_that_the_compiler_refuses_is_reported_with_what_it_lacks():
    def traced(message):
        def refuse():
            raise jax.errors.JaxRuntimeError(message)

        return plan.Traced(types.SimpleNamespace(compile=refuse), {}, {}, [], {})

    # Both wordings of TPU compilers.
    for message in (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (33.48G) exceeds available HBM (15.75G). HLO module: jit_f.",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 33.48G of 15.75G hbm.",
    ):
        refused = plan.compile_and_count(lambda: traced(message))
        assert "33.48G" in refused.refusal and refused.counted is None
        assert refused.needs.total == int(33.48 * 2**30)
        assert refused.shortfall(CHIPS["v5e"]) == int(33.48 * 2**30 - 16e9)
        assert refused.shortfall(CHIPS["v5p"]) == 0
    with pytest.raises(jax.errors.JaxRuntimeError, match="another"):
        plan.compile_and_count(lambda: traced("another failure"))


def test_a_training_step_is_planned_with_the_states_of_its_optimizer():
    mesh = make_mesh("data:8")
    job = plan.TrainJob(target=TARGET, batch=8, length=16, mesh="data:8", is_fully_sharded=True)
    one = plan.trace_train(job, mesh)
    # AdamW: weights and two moments of each, with the width split over all devices.
    params, state = (device_bytes(part) for part in (one.params, one.state))
    assert 3 * params <= state <= 3 * params + 64
    whole = 4 * num_params(TARGET)
    assert whole / 8 <= params <= whole / 8 + 4 * L * 2 * 32
    head = EagleConfig.of_target(TARGET, draft_vocab_size=16)
    by_step = lambda job: (
        plan.trace_train(job, mesh).lowered.out_info[1]["loss_by_step"].count.shape
    )
    of_head = dataclasses.replace(job, head=head)
    assert by_step(of_head) == (7,)
    assert by_step(dataclasses.replace(of_head, num_steps=2, is_remat=True)) == (2,)


@pytest.mark.exhaustive
def test_a_head_is_trained_in_place():
    mesh = make_mesh("data:8")
    head = EagleConfig.of_target(TARGET, draft_vocab_size=16)
    job = plan.TrainJob(target=TARGET, head=head, batch=8, length=16, dtype="float32")
    compiled = plan.compile_and_count(lambda: plan.trace_train(job, mesh))
    assert compiled.needs.aliased == compiled.needs.state
    assert compiled.counted.num_collectives > 0 and compiled.counted.hbm_bytes > 0
