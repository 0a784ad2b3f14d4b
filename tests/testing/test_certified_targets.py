"""``certify(target=...)``: models that are right pass, and defects are refused by their cause."""

from __future__ import annotations

import dataclasses
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest
from support.tiny_models import (
    DEEPSEEK_TARGET,
    LLAMA,
    QWEN3_NEXT_TARGET,
    STATE_FAMILIES,
    large_weights,
)

import spec_jax
from docs.examples import my_model
from spec_jax import testing
from spec_jax.contracts import ForwardOutput
from spec_jax.errors import ConfigError, ShapeError
from spec_jax.models import transformer

SOURCE = pathlib.Path(my_model.__file__).read_text(encoding="utf-8")
START = "(cache.length + window_offset)[:, None]"
POSITIONS = "positions = sees.sum(axis=2, dtype=jnp.int32) - 1"
RESULT = "cache.replace(keys=keys,"
LAYER = "x = layer(params, i, x, attend)"
# What is planted in the documents' example: edits, and words of the message.
DEFECTS = {
    "keys one slot late": ({"keys.at[i, rows, slots]": "keys.at[i, rows, slots + 1]"}, "token 1"),
    "a mask one too wide": ({"<= slots[:, :, None]": "<= slots[:, :, None] + 1"}, "the mask"),
    "a position forgotten after a rejection": (
        {
            "    length: jax.Array": "    fed: jax.Array\n    length: jax.Array",
            "zeros, jnp.zeros((batch,), jnp.int32)": "zeros, *2 * [jnp.zeros(batch, jnp.int32)]",
            POSITIONS: "positions = cache.fed[:, None] + jnp.arange(T)",
            RESULT: "cache.replace(fed=cache.fed + T, keys=keys,",
        },
        "positions or slots go on after the drafts that were forgotten",
    ),
    "a length that forward moves": (
        {RESULT: "cache.replace(length=cache.length + T, keys=keys,"},
        "forward moved cache.length from 0 to 8",
    ),
    "a tree that is ignored": ({"if window_mask is None:": "if True:"}, "window_mask"),
    "one write index for all rows": (
        {START: "(cache.length[:1] + window_offset)[:, None] + 0 * cache.length[:, None]"},
        "different lengths",
    ),
    "a row that reads its neighbour": (
        {f"        {LAYER}\n    s": f"        {LAYER} + jnp.roll(x, 1, 0)\n    s"},
        "rows are mixed",
    ),
    "a position by slot in a tree": ({POSITIONS: "positions = slots"}, "position by depth"),
    "a path that commit ignores": ({"path is not None": "False"}, "commit(n, path) does not move"),
    "drafts that commit keeps": (
        {"length=self.length + n": "length=self.length + n.max()"},
        "moved cache.length",
    ),
    "a row inserted at its neighbour's length": (
        {"self.length.at[row].set(other.length[0])": "self.length"},
        "insert_row",
    ),
    "a window's offset that is ignored": ({START: "cache.length[:, None]"}, "window_offset"),
    "a last slot that is lost": (
        {"values.at[i, rows, slots]": "values.at[i, rows, jnp.minimum(slots, len(every) - 2)]"},
        "a cache of 8 slots the last ones are lost",
    ),
    "a rewind that keeps a token": (
        {"length=self.length - n": "length=self.length - jnp.maximum(n - 1, 0)"},
        "rewind(n) left lengths",
    ),
    "a rewind that forgets a whole window": (
        {
            "return self.replace(length=self.length - n)": "length = self.length - n\n"
            "        kept = jnp.arange(self.keys.shape[2]) < length[:, None] - 3\n"
            "        return self.replace(keys=self.keys * kept[..., None], length=length)"
        },
        "after rewind",
    ),
    "rows taken of the wrong axis": (
        {"Cache(self.keys[:, rows]": "Cache(self.keys[:, jnp.sort(rows)]"},
        "after take_rows",
    ),
    "a snapshot without its length": (
        {
            "    def rewind(self, n):": "    def snapshot(self):\n        return self\n\n"
            "    def restore_from_snapshot(self, old):\n"
            "        return self.replace(keys=old.keys, values=old.values)\n\n"
            "    def rewind(self, n):"
        },
        "after restore_from_snapshot",
    ),
    "values that the next token overwrites": (
        {"values.at[i, rows, slots]": "values.at[i, rows, jnp.minimum(slots, 4)]"},
        "differ",
    ),
}


def edited(edits) -> types.ModuleType:
    source = SOURCE
    for old, new in edits.items():
        assert old in source
        source = source.replace(old, new)
    module = types.ModuleType("edited")
    exec(compile(source, "edited", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.representatives("keys one slot late")
def test_a_defect_is_refused_by_its_cause(name):
    edits, words = DEFECTS[name]
    with pytest.raises(testing.CertificateError, match="target 'my_model'") as caught:
        spec_jax.certify(target=edited(edits).make(), logits=my_model.logits)
    assert words in str(caught.value)
    assert caught.value.certificate.failure


def test_a_right_model_gets_a_certificate_and_what_it_lacks_is_said():
    found = spec_jax.certify(target=my_model.make(), logits=my_model.logits)
    assert len(found.checks) == 14 and max(c.error for c in found.checks) < 1e-4
    assert found.failure is None and "Certificate of target 'my_model'" in str(found)

    def plain(params, tokens, cache):
        return my_model.forward(params, tokens, cache)

    target = my_model.make()
    model = target.model._replace(forward=plain)
    found = testing.certify(target=spec_jax.LoadedModel("plain", model, target.params))
    for words in ("trees", "forward takes no window_offset", "no function was given"):
        assert any(words in text for text in found.not_proved)


# One of each cache and each way to run layers.
KINDS = {
    "llama": LLAMA,
    **{type(c).__name__: c for c in (*STATE_FAMILIES, QWEN3_NEXT_TARGET, DEEPSEEK_TARGET)},
    "scanned": dataclasses.replace(LLAMA, scan_layers=True),
    "filled slots": dataclasses.replace(LLAMA, attention="xla"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_cache_gets_a_certificate(kind):
    config = KINDS[kind]

    def logits(params, tokens):
        return transformer.logits(params, tokens, config=config)

    found = spec_jax.certify(target=large_weights(kind, config, 3), logits=logits)
    lacks = [text for text in found.not_proved if "rewind" in text]
    assert bool(lacks) == (config in STATE_FAMILIES or "Next" in kind or "Qwen35" in kind)
    assert len(found.checks) == 15 - len(lacks) and len(found.not_proved) == 2 + len(lacks)


def test_logits_that_are_not_the_functions_are_refused():
    def shifted(params, tokens):
        return jnp.roll(my_model.logits(params, tokens), 1, axis=1)

    with pytest.raises(testing.CertificateError, match="those of the function one token later"):
        spec_jax.certify(target=my_model.make(), logits=shifted)
    with pytest.raises(ConfigError, match="target is given"):
        spec_jax.certify("match", target=my_model.make())


def _tuple(*args, **options):
    return tuple(my_model.forward(*args, **options))


def _misshapen(params, tokens, cache, **options):
    return ForwardOutput(jnp.zeros((1, 2)), cache)


def _rounded(params, hidden):
    return my_model.unembed(params, hidden).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"vocab_size": 40}, ShapeError, r"unembed .*,48\]; expected .*V=40"),
        ({"forward": _tuple}, ConfigError, "returned a tuple; expected a ForwardOutput"),
        ({"forward": _misshapen}, ShapeError, r"hidden f32\[1,2\]; expected \[B="),
        ({"unembed": _rounded}, ShapeError, r"unembed .* bf16\["),
    ],
    ids=["vocabulary", "tuple", "hidden", "dtype"],
)
def test_a_broken_contract_is_refused_while_tracing(change, error, words):
    target = my_model.make()
    target = spec_jax.LoadedModel("broken", target.model._replace(**change), target.params)
    decoder = spec_jax.SpeculativeDecoder(target)
    for call in (lambda: spec_jax.certify(target=target), lambda: decoder.generate([1, 2], 4)):
        with pytest.raises(error, match=words):
            call()


def test_a_wrapped_function_decodes_as_the_model_with_a_cache():
    own = my_model.make()
    sizes = dict(vocab_size=my_model.VOCABULARY, max_length=my_model.MAX_LENGTH)
    wrapped = spec_jax.wrap(my_model.logits, own.params, **sizes)
    assert spec_jax.certify(target=wrapped, logits=my_model.logits).failure is None
    draft = spec_jax.wrap(my_model.logits, my_model.make(1).params, **sizes)
    expected = spec_jax.SpeculativeDecoder(own).generate([3, 1, 4], 20).tokens
    for config in (
        spec_jax.SpeculativeConfig(num_speculative_tokens=3),
        spec_jax.SpeculativeConfig("standalone", tree=(2, 2)),
    ):
        decoder = spec_jax.SpeculativeDecoder(wrapped, draft, config)
        assert decoder.generate([3, 1, 4], 20).tokens == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [None, "tensor:2"])
def test_a_wrapped_function_decodes_on_a_mesh_and_with_adaptive_k(mesh):
    own = my_model.make()
    sizes = dict(vocab_size=my_model.VOCABULARY, max_length=my_model.MAX_LENGTH)
    wrapped = spec_jax.wrap(my_model.logits, own.params, **sizes)
    draft = spec_jax.wrap(my_model.logits, my_model.make(1).params, **sizes)
    prompts = [[3, 1, 4], [7, 2]]
    expected = [row.tokens for row in spec_jax.SpeculativeDecoder(own).generate(prompts, 20)]
    for is_adaptive in (False, True):
        config = spec_jax.SpeculativeConfig(num_speculative_tokens=3, is_adaptive=is_adaptive)
        decoder = spec_jax.SpeculativeDecoder(wrapped, draft, config, mesh=mesh)
        assert [row.tokens for row in decoder.generate(prompts, 20)] == expected


def test_functions_that_cannot_be_wrapped_are_refused():
    params = my_model.init_params(jax.random.key(0))

    def in_a_tuple(params, tokens):
        return (my_model.logits(params, tokens),)

    for function, V, most, words in (
        (my_model.logits, 7, 64, r"float32\[2, 4, 48\].*vocab_size=7"),
        (my_model.logits, 48, 0, "max_length is 0"),
        (in_a_tuple, 48, 64, "returned tuple"),
    ):
        with pytest.raises(ConfigError, match=words):
            spec_jax.wrap(function, params, vocab_size=V, max_length=most)


def test_a_target_whose_forward_moves_length_is_refused_by_a_decoder():
    edits, _ = DEFECTS["a length that forward moves"]
    with pytest.raises(ShapeError, match="forward must not move cache.length"):
        spec_jax.SpeculativeDecoder(edited(edits).make()).generate([1, 2, 3], 4)


def test_a_reference_that_is_not_finite_is_refused():
    def nan(params, tokens):
        return my_model.logits(params, tokens).at[:, 1:].set(jnp.nan)

    with pytest.raises(testing.CertificateError, match="the function's logits are not finite"):
        spec_jax.certify(target=my_model.make(), logits=nan)


@pytest.mark.exhaustive
def test_rounding_of_weights_forbidden_ids_and_x64_are_no_defects():
    own = my_model.make()
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), own.params)

    def logits(params, tokens):
        found = my_model.logits(params, tokens).astype(jnp.float32)
        return jnp.where(jnp.arange(48) == 7, -jnp.inf, found)

    target = spec_jax.wrap(logits, rounded, vocab_size=48, max_length=64)
    assert spec_jax.certify(target=target, logits=logits).failure is None
    with jax.enable_x64(True):
        assert spec_jax.certify(target=own, logits=my_model.logits).failure is None
        turned = {**own.params, "freqs": jnp.ones(2, jnp.complex64)}
        target = spec_jax.wrap(my_model.logits, turned, vocab_size=48, max_length=64)
        assert spec_jax.SpeculativeDecoder(target).generate([1, 2], 3).tokens


def test_a_model_that_cannot_draft_or_take_trees_is_refused_in_one_line():
    target = my_model.make()

    def forward(params, tokens, cache):
        return my_model.forward(params, tokens, cache)

    plain = spec_jax.LoadedModel("plain", target.model._replace(forward=forward), target.params)
    with pytest.raises(ConfigError, match="takes no window_offset"):
        spec_jax.SpeculativeDecoder(target, plain)
    tree = spec_jax.SpeculativeConfig("standalone", tree=(2, 2))
    with pytest.raises(ConfigError, match="takes no window_mask, which trees need"):
        spec_jax.SpeculativeDecoder(plain, target, tree)


def test_a_function_of_other_arguments_is_no_reference():
    with pytest.raises(ConfigError, match=r"logits is .*; expected a function \(params, tokens"):
        spec_jax.certify(target=my_model.make(), logits=lambda tokens: tokens)
