"""Decoders with one defect each, planted into a part; the package's own code is as it is."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.models import transformer
from spec_jax.models.caches.kv import KVCache


def in_verify(decoder, change):
    """Changes the target's pass of K + 1 tokens: ``change(forward, params, tokens, cache, **)``."""
    model, width = decoder.system().target, decoder.num_draft + 1

    def forward(params, tokens, cache, **options):
        if tokens.shape[1] != width:
            return model.forward(params, tokens, cache, **options)
        return change(model.forward, params, tokens, cache, **options)

    return decoder.with_parts(model=model._replace(forward=forward))


def with_cache(decoder, kind):
    """Gives the target a cache of another class."""
    model = decoder.system().target

    def init_cache(*args):
        cache = model.init_cache(*args)
        return kind(cache.keys, cache.values, cache.length)

    return decoder.with_parts(model=model._replace(init_cache=init_cache))


def with_rule(decoder, accept):
    """Replaces the rule's ``accept``: ``accept(rule, scores, proposal, noise)``."""
    rule = decoder.system().rule
    return decoder.with_parts(
        rule=rule._replace(accept=lambda *args: accept(rule, *args), name="defective")
    )


def position_off_by_one(decoder):
    def change(forward, params, tokens, cache):
        positions = cache.length[:, None] + 1 + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        return forward(params, tokens, cache, positions=positions)

    return in_verify(decoder, change)


def window_sees_its_future(decoder):
    def change(forward, params, tokens, cache):
        W = tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(W, dtype=jnp.int32)
        mask = jnp.ones((tokens.shape[0], W, W), bool)
        return forward(params, tokens, cache, positions=positions, window_mask=mask)

    return in_verify(decoder, change)


def wrong_rotary_base(decoder):
    config = decoder.target.config
    rope = dataclasses.replace(config.rope, rope_theta=2 * config.rope.rope_theta)
    other = transformer.model(
        dataclasses.replace(config, rope=rope), decoder.system().drafter.shape.taps
    )
    change = lambda forward, params, tokens, cache: other.forward(params, tokens, cache)
    return in_verify(decoder, change)


def perturbed_layer(decoder, size=0.05):
    """One layer's weights are off by a few per cent where drafts are verified."""

    def change(forward, params, tokens, cache):
        layers = dict(params["layers"])
        noise = lambda w: w * (1 + size * jax.random.normal(jax.random.key(0), w.shape, w.dtype))
        layers["3"] = jax.tree.map(noise, layers["3"])
        return forward({**params, "layers": layers}, tokens, cache)

    return in_verify(decoder, change)


WIDTH = 6  # K + 1 of the decoders here


@flax.struct.dataclass
class _SkipsCommit(KVCache):
    def commit(self, n, path=None):
        """Loses what the last token of a round has written, where drafts were accepted."""
        del path
        last = self.length + n - 1
        B = len(n)
        has_drafts = (n > 1) & (n <= WIDTH)
        is_lost = (jnp.arange(self.slots) == last[:, None]) & has_drafts[:, None]

        def lose(x):
            rows = jnp.repeat(is_lost, x.shape[0] // B, axis=0)[..., None]
            return jnp.where(rows, 0, x)

        lost = jax.tree.map(lose, (self.keys, self.values))
        return self.replace(keys=lost[0], values=lost[1], length=self.length + n)


@flax.struct.dataclass
class _StaleSlot(KVCache):
    def write(self, layer, keys, values, start):
        """Leaves the second slot of a window as the rejected draft before has left it."""
        if keys.shape[2] != WIDTH:
            return super().write(layer, keys, values, start)
        first = super().write(layer, keys[:, :, :1], values[:, :, :1], start)
        return super(_StaleSlot, first).write(layer, keys[:, :, 2:], values[:, :, 2:], start + 2)


@flax.struct.dataclass
class _OtherRow(KVCache):
    def layer(self, index):
        """Reads the keys of the row before, of all slots but the first few."""
        keys, values = super().layer(index)
        G = keys.shape[0] // self.length.shape[0]
        is_late = (jnp.arange(keys.shape[-2]) >= 24)[:, None]
        return jnp.where(is_late, jnp.roll(keys, G, axis=0), keys), values


@flax.struct.dataclass
class _OtherLayer(KVCache):
    def layer(self, index):
        """Reads the values of the layer before in the third layer."""
        keys, values = super().layer(index)
        return keys, super().layer(index - 1)[1] if index == 2 else values


@flax.struct.dataclass
class _LowCache(KVCache):
    def write(self, layer, keys, values, start):
        """Stores keys and values in eight bits."""
        low = lambda x: x.astype(jnp.float8_e4m3fn).astype(x.dtype)
        return super().write(layer, low(keys), low(values), start)


def skipped_commit(decoder):
    return with_cache(decoder, _SkipsCommit)


def stale_slot(decoder):
    return with_cache(decoder, _StaleSlot)


def cache_of_another_row(decoder):
    return with_cache(decoder, _OtherRow)


def low_precision_cache(decoder):
    return with_cache(decoder, _LowCache)


def off_by_one_row(decoder):
    """Each draft is compared with the target's scores of the row after its own."""

    def accept(rule, scores, proposal, noise):
        roll = lambda x: jnp.roll(x, -1, axis=1)
        shifted = scores.replace(logits=roll(scores.logits), processed=roll(scores.processed))
        return rule.accept(shifted, proposal, noise)

    return with_rule(decoder, accept)


def cache_of_another_layer(decoder):
    return with_cache(decoder, _OtherLayer)


DEFECTS = {
    make.__name__: make
    for make in (
        position_off_by_one,
        window_sees_its_future,
        wrong_rotary_base,
        perturbed_layer,
        skipped_commit,
        stale_slot,
        cache_of_another_row,
        low_precision_cache,
        off_by_one_row,
        cache_of_another_layer,
    )
}
