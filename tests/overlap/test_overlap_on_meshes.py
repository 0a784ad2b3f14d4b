"""Overlapped drafting with a mesh on each side: the tokens of plain decoding on one device."""

from __future__ import annotations

import jax
import pytest
from support.tiny_models import LLAMA, loaded, near

from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, make_mesh
from spec_jax.overlap.overlap import Devices

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 5], [9], [3, 1], [2, 2, 2], [30]]
SPLITS = {"2 and 6": ("tensor:2", "data:3,tensor:2"), "4 and 4": ("data:2,tensor:2", "tensor:4")}


TARGET = loaded(LLAMA)
DRAFT = near(TARGET)


def sides(split: str) -> Devices:
    draft, target = SPLITS[split]
    number = int(split[0])
    devices = jax.devices()[:8]
    return Devices(make_mesh(draft, devices[:number]), make_mesh(target, devices[number:]))


def decoders(split, method="standalone", **options):
    samplers = [SamplerConfig(0.0 if row % 2 else 0.6, seed=row) for row in range(len(PROMPTS))]
    config = SpeculativeConfig(method, 3, rejection_sampling_strategy="match")
    draft = DRAFT if method == "standalone" else None
    apart = SpeculativeDecoder(
        TARGET, draft, config, target_sampler=samplers, devices=sides(split), **options
    )
    return apart, SpeculativeDecoder(TARGET, target_sampler=samplers)


def tokens(decoder):
    return [row.tokens for row in decoder.generate(PROMPTS, 16)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("split, method", [*zip(SPLITS, ("standalone", "suffix"))])
def test_gives_plain_decodings_tokens(split, method):
    apart, plain = decoders(split, method)
    assert apart.is_overlapped and apart.mesh is None
    for _ in range(1 if method == "standalone" else 2):  # suffix copies the first call's output
        assert tokens(apart) == tokens(plain)
    assert apart.stats.accepted > 0


def test_weights_are_split_on_their_own_side_and_a_draft_may_lie_whole():
    apart, _ = decoders("4 and 4", is_draft_replicated=True)
    target, draft = (model.params["layers"]["0"]["q"] for model in (apart.target, apart.draft))
    assert target.sharding.device_set == set(jax.devices()[4:8])
    assert not target.sharding.is_fully_replicated
    assert draft.sharding.device_set == set(jax.devices()[:4])
    assert draft.sharding.is_fully_replicated


def test_sides_that_share_devices_take_turns_on_the_targets_mesh():
    mesh = make_mesh("tensor:2")
    with pytest.warns(UserWarning, match="only take turns there"):
        decoder = SpeculativeDecoder(TARGET, DRAFT, devices=Devices(make_mesh("data:4"), mesh))
    assert not decoder.is_overlapped and decoder.mesh is mesh
    assert decoder.draft.params["embed"].sharding.device_set == set(jax.devices()[:2])


def test_one_token_a_pass_runs_on_the_targets_mesh():
    decoder = SpeculativeDecoder.new_n1(TARGET, DRAFT, devices=sides("4 and 4"))
    assert decoder.mesh.shape == {"data": 1, "tensor": 4}
