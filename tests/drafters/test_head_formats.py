"""Heads of every kind in every format: read back bit for bit, and what is not written."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from support import block_drafts, parallel_heads
from support.any_head import any_head
from support.published_heads import LAYER, MODEL, SMALL, TAPS, D, L, V
from support.tiny_models import DEEPSEEK, LLAMA, QWEN2, QWEN3, QWEN3_NEXT, QWEN35, QWEN35_MOE

from spec_jax import load_draft
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError
from spec_jax.models.config import RopeConfig
from spec_jax.models.families import module_layer

# ------------------------------------------------------------------------------- EAGLE

EAGLE_1 = EagleConfig(1, LAYER, D, V, (L + 1,))
EAGLE_3 = EagleConfig(3, SMALL, D, V, TAPS)
BIASED = dataclasses.replace(SMALL, attention_bias=True, mlp_bias=True, eos_token_id=(2, 7))
NARROW = dict(layer=dataclasses.replace(SMALL, hidden_size=10), own_embed=True)
YARN = RopeConfig("yarn", 5e5, factor=4.0, original_max_position_embeddings=16, truncate=False)
OF_QWEN2, OF_QWEN3, SCALED = (
    dataclasses.replace(SMALL, **change)
    for change in (dict(model_type="qwen2"), dict(model_type="qwen3"), dict(rope=YARN))
)
NORMS = [
    dict(norm_before_residual=residual, norm_output=output, **joined)
    for residual, output, joined in itertools.product(
        (False, True), (False, True), ({}, {"fc_norm": True}, {"norm_before_fc": True})
    )
]
SHARED = [*NORMS, dict(layer=LAYER), NARROW, dict(layer=SCALED)]
SHARED += [dict(taps=(0, 3)), dict(taps=(2, 4, 7, L))]
FREE = [dict(layer=BIASED), dict(taps=(1, 3, 7))]  # of formats without SGLang's limits
EXPRESSIBLE = {
    "EAGLE-1": [
        {},
        dict(fc_bias=True),
        dict(own_embed=True),
        dict(layer=dataclasses.replace(LAYER, model_type="qwen2")),
        dict(layer=dataclasses.replace(LAYER, rope=YARN, attention_bias=True)),
    ],
    "EAGLE-3": [*SHARED, *FREE, dict(own_embed=True, fc_bias=True), dict(layer=OF_QWEN2)],
    "SpecForge": [*SHARED, dict(fc_bias=True), dict(taps=(3, 5))],
    "speculators": [*SHARED, *FREE, dict(own_embed=True), dict(layer=OF_QWEN3)],
}


def eagle(**change):
    return dataclasses.replace(EAGLE_3, **change)


CASES = [
    (format, dataclasses.replace(EAGLE_1 if format == "EAGLE-1" else EAGLE_3, **change), MODEL)
    for format, changes in EXPRESSIBLE.items()
    for change in changes
]
CASES += [
    ("speculators", config, parallel_heads.TARGET) for config in parallel_heads.HEADS.values()
]
CASES += [("SpecForge", parallel_heads.HEADS["one layer"], parallel_heads.TARGET)]

# --------------------------------------------------------------------------------- MTP

DENSE = dataclasses.replace(DEEPSEEK, n_routed_experts=None, intermediate_size=24, q_lora_rank=None)
FAR = RopeConfig("yarn", 5e5, factor=4.0, original_max_position_embeddings=16, mscale_all_dim=0.5)
CENTRED = dict(has_zero_centred_norms=True)
HIDDEN_FIRST = dict(order="hidden-first")
SEVERAL = dict(num_modules=2, protocol="sequential")
ALL_OTHER = dict(taps=(2,), recycles_normed=False, protocol="sequential")
OWN_ENDS = dict(has_own_embed=True, has_own_head=True)
NEXT_OTHER = dataclasses.replace(QWEN3_NEXT, norm_topk_prob=False)


def mtp(layer, **changes):
    layer = dataclasses.replace(layer, num_hidden_layers=1)
    return MtpConfig.of_target(LLAMA, layer=layer, **changes)


TARGET = block_drafts.TARGET
MODULES = [
    ("MiMo", mtp(QWEN2, **HIDDEN_FIRST)),
    ("MiMo", mtp(LLAMA, **HIDDEN_FIRST)),
    ("MiMo", mtp(QWEN3, **HIDDEN_FIRST, **ALL_OTHER)),
    ("MiMo", mtp(LLAMA, **HIDDEN_FIRST, **SEVERAL)),
    ("DeepSeek", mtp(LLAMA)),
    ("DeepSeek", mtp(QWEN2, **OWN_ENDS)),
    ("DeepSeek", mtp(DEEPSEEK)),
    ("DeepSeek", mtp(dataclasses.replace(DEEPSEEK, rope=FAR), **ALL_OTHER)),
    ("DeepSeek", mtp(DENSE, **OWN_ENDS, **SEVERAL)),
    ("Qwen3-Next", mtp(QWEN3_NEXT, **CENTRED)),
    ("Qwen3-Next", mtp(module_layer(QWEN35), **CENTRED)),
    ("Qwen3-Next", mtp(module_layer(QWEN35_MOE), **CENTRED)),
    ("Qwen3-Next", mtp(NEXT_OTHER, **CENTRED, **ALL_OTHER)),
]
CASES += [(format, config, TARGET) for format, config in MODULES]

# -------------------------------------------------------------------------------- blocks

BLOCKS = block_drafts.HEADS
FORMATS_OF_BLOCKS = {
    "dflash": ("z-lab", "speculators"),
    "dflash2": ("z-lab", "speculators"),
    "dspark": ("DeepSpec", "speculators"),
    "treeflash": ("TreeFlash",),
}
CASES += [(x, BLOCKS[name], TARGET) for name, known in FORMATS_OF_BLOCKS.items() for x in known]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("format", "config", "target"), CASES, ids=lambda x: str(x)[:40])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, format, config, target, dtype):
    head = any_head(config, dtype)
    head.save(tmp_path, target, format=format)
    read = load_draft(tmp_path, target, dtype)
    assert (read.format, read.method, read.config) == (format, head.method, config)
    dtypes = lambda params: jax.tree.map(lambda w: w.dtype.name, params)
    assert dtypes(read.params) == dtypes(head.params)
    jax.tree.map(np.testing.assert_array_equal, read.params, head.params)
    assert {f.name for f in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


DEFAULTS = [
    ("EAGLE-1", EAGLE_1, MODEL),
    ("SpecForge", EAGLE_3, MODEL),
    ("EAGLE-3", eagle(taps=(1, 3, 7)), MODEL),
    ("speculators", eagle(layer=OF_QWEN3), MODEL),
    *((format, config, TARGET) for format, config in MODULES[:5:2]),
    ("z-lab", BLOCKS["dflash"], TARGET),
]


@pytest.mark.parametrize(("format", "config", "target"), DEFAULTS, ids=lambda x: str(x)[:40])
def test_the_default_format_is_the_first_that_can_express_the_head(
    tmp_path, format, config, target
):
    any_head(config).save(tmp_path, target)
    assert load_draft(tmp_path, target).format == format


INVALID = [
    ("eagle", EAGLE_3, "'eagle'; known for eagle-3 .*: SpecForge, EAGLE-3, speculators"),
    ("EAGLE-3", EAGLE_1, "format is 'EAGLE-3'; known for eagle-1 with a layer of llama: EAGLE-1"),
    ("EAGLE-1", dataclasses.replace(EAGLE_1, taps=(4,)), r"taps is \(4,\); in .* as \(9,\)"),
    ("EAGLE-3", eagle(taps=(2, L + 1)), r"\(2, 9\) hold 9, the state after the"),
    ("EAGLE-3", eagle(taps=(2, L + 2)), r"taps \(2, 10\) do not exist"),
    ("EAGLE-3", eagle(layer=OF_QWEN3), "layer.model_type is 'qwen3'; .* as 'llama'"),
    ("speculators", eagle(layer=OF_QWEN2), "llama and qwen3, not 'qwen2'"),
    ("speculators", eagle(fc_bias=True), "fc_bias is True; .* as False"),
    ("SpecForge", eagle(taps=(1, 3, 7)), r"is \(1, 3, 7\); .* as \(2, 4, 8\)"),
    ("SpecForge", eagle(layer=BIASED), "biases, which SGLang leaves out"),
    ("SpecForge", eagle(layer=OF_QWEN2), "biases, which SGLang leaves out"),
    ("SpecForge", eagle(own_embed=True), "own_embed is True, which SGLang ignores"),
    ("EAGLE-3", eagle(target_vocab_size=40), "vocabulary 40; this one has 31"),
    (
        None,
        eagle(layer=OF_QWEN3, fc_bias=True),
        "no format can express this config: SpecForge: .*'qwen3'.*; speculators: fc_bias is",
    ),
    ("mimo", mtp(LLAMA), "format is 'mimo'; known for .*: DeepSeek, MiMo"),
    ("MiMo", mtp(DEEPSEEK), "format is 'MiMo'; known for .* a layer of deepseek: DeepSeek"),
    ("Qwen3-Next", mtp(LLAMA), "'Qwen3-Next'; known for .* of llama: DeepSeek, MiMo"),
    (None, mtp(QWEN3_NEXT), "norms is False; in the format Qwen3-Next it would be read as True"),
    (None, mtp(LLAMA, **CENTRED), "norms is True; in the format DeepSeek it would be read as"),
    (None, mtp(QWEN3_NEXT, **SEVERAL, **CENTRED), "num_modules is 2; the format Qwen3-Next hold"),
    ("MiMo", mtp(QWEN2, has_own_head=True), "modules in the format MiMo share both"),
    ("z-lab", BLOCKS["dspark"], "'z-lab'; known for dspark .*: DeepSpec, speculators"),
    (
        "z-lab",
        dataclasses.replace(BLOCKS["dflash"], is_anchor_first=True),
        "is_anchor_first is True; in the format z-lab it would",
    ),
    (None, BLOCKS["blocks of slots"], r"windows are \(3, 2\); a file states one size"),
]


@pytest.mark.parametrize(("format", "config", "words"), INVALID, ids=[row[-1] for row in INVALID])
def test_what_a_format_cannot_express_is_refused(tmp_path, format, config, words):
    target = MODEL if isinstance(config, EagleConfig) else TARGET
    with pytest.raises(ConfigError, match=words):
        any_head(config).save(tmp_path, target, format=format)
    assert not list(tmp_path.iterdir())
