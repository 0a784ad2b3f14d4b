"""A drafter kind from outside of the package: a head whose one layer is a gate, no attention."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from spec_jax import LoadedHead
from spec_jax.contracts import Head
from spec_jax.drafters import DrafterKind, DraftFormat, HeadSpec, Training
from spec_jax.drafters.common.head import NoCache
from spec_jax.models.params import ParamSpec

GateConfig = dataclasses.make_dataclass(
    "GateConfig", ["taps", "target_hidden_size", "target_vocab_size", "max_length"], frozen=True
)


def new(target, taps=None):
    sizes = (target.hidden_size, target.vocab_size, target.max_position_embeddings)
    return GateConfig(taps or (target.num_hidden_layers + 1,), *sizes)


def head(config, target):
    def feed(params, state, tokens, cache, window_offset, window_mask):
        both = jnp.concatenate([state, params["target"]["embed"][tokens]], axis=-1)
        gate, value = (both @ params["head"][name] for name in ("gate", "value"))
        return state + jax.nn.sigmoid(gate) * value, cache

    return Head(
        "gate",
        config.target_vocab_size,
        config.max_length,
        config.taps,
        config.target_hidden_size,
        init_cache=lambda params, batch, slots: NoCache(jnp.zeros((batch, 0))),
        join=lambda params, features: features,
        feed=feed,
        recycle=lambda params, x: x,
        unembed=lambda params, x: target.unembed(params["target"], x),
    )


def read(directory, target, dtype):
    said = json.loads((directory / "config.json").read_text())["gate"]
    tensors = load_file(directory / "model.safetensors")
    params = {name: jnp.asarray(w, dtype) for name, w in tensors.items()}
    return LoadedHead(str(directory), GateConfig(tuple(said[0]), *said[1:]), params)


def write(head, directory, target, *, format, dtype, num_speculative_tokens):
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.asarray(w, dtype) for name, w in head.params.items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"gate": dataclasses.astuple(head.config)}))


def objective():
    from support import gate_loss  # imports this module

    return gate_loss.GATE


spec = lambda D, name: ParamSpec((2 * D, D), ("features", "embed"), name)
KIND = DrafterKind(
    name="gate",
    head=HeadSpec(
        config_class=GateConfig,
        table=lambda config: {n: spec(config.target_hidden_size, n) for n in ("gate", "value")},
        functions=head,
    ),
    format=DraftFormat(detect=lambda hf, names: "gate" in hf, read=read, write=write),
    training={"gate": Training(objective=objective, new=new, options=("taps",))},
)
