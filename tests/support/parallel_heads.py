"""P-EAGLE heads with random weights, for a tiny target."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from support.tiny_models import LLAMA, loaded, random_tensor

from spec_jax.drafters.eagle.formats import EAGLE_FORMATS
from spec_jax.drafters.eagle.model import PEagleConfig
from spec_jax.loading import LoadedHead
from spec_jax.models.params import nest

V, U = LLAMA.vocab_size, 20
TARGET = loaded(LLAMA)
IDS = np.sort(np.random.RandomState(0).permutation(V)[:U])  # of the target, that it drafts
SIZES = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=6, rms_norm_eps=1e-5)


def new(layer=None, **changes):
    """A head of two layers with sizes of its own, which reads three states."""
    config = PEagleConfig.of_target(
        LLAMA, num_layers=2, **dict(taps=(0, 1, 2), max_draft=5, mask_token_id=7) | changes
    )
    return dataclasses.replace(
        config, layer=dataclasses.replace(config.layer, **SIZES | (layer or {}))
    )


HEADS = {
    "p-eagle": new(draft_vocab_size=U, norm_before_residual=True),
    "norm over all states": new(norm_before_fc=True, own_embed=False),
    "norm of each state": new(layer=dict(model_type="qwen3"), fc_norm=True, draft_vocab_size=U),
    "one layer": new(layer=dict(num_hidden_layers=1)),
}


def tensors_of(config, seed=0):
    """Random published tensors by name, stored ``[out, in]``."""
    shape = lambda spec: spec.shape[::-1] if spec.is_linear else spec.shape
    specs = EAGLE_FORMATS.names(config, "speculators", 0).values()
    return {name: 1.5 * random_tensor(name, shape(spec), seed) for name, spec in specs}


def head_of(config, seed=0):
    """The head of ``tensors_of``."""
    tensors = tensors_of(config, seed)
    turned = lambda name, spec: tensors[name].T if spec.is_linear else tensors[name]
    names = EAGLE_FORMATS.names(config, "speculators", 0).items()
    params = nest({ours: jnp.asarray(turned(*stored)) for ours, stored in names})
    if (size := config.layer.vocab_size) < config.target_vocab_size:
        params["d2t"] = jnp.asarray(IDS - np.arange(size), jnp.int32)
    return LoadedHead(config.name, config, params)
