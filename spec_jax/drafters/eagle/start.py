"""EAGLE heads that begin with the linear map which predicts the target's next state best.

Pair t joins the target's states at token t with the embedding of token t + 1; token t + 2 is
predicted by the target's state at token t + 1, after the final norm. The map from the former to
the latter has a closed form, and is what a new head computes, its layer adding nothing.

Version 1 holds the map as it is, in ``fc``. Version 3 joins states alone by ``fc``; embeddings
enter by the layer's attention. So queries and keys begin as one random map of the embedding, by
which a pair attends to itself and to pairs of the same token; values and ``o`` begin as the part
of the map that reads embeddings, reduced to the rank of the values. Reduced-rank regression:
Izenman 1975.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.contracts import Model
from spec_jax.drafters.eagle import model as eagle
from spec_jax.models.layers import embed_tokens, rms_norm
from spec_jax.train.least_squares import Start, Sums
from spec_jax.train.objective import Batch

_SCORE = 12.0  # of a pair's attention to itself; to another token's 0 on average


def start_of(config: eagle.EagleConfig) -> Start | None:
    """Returns how heads of this config begin.

    None of P-EAGLE, which has further layers, and of heads of another width than the target's,
    whose states are not theirs.
    """
    is_other = config.is_parallel or config.layer.hidden_size != config.target_hidden_size
    return None if is_other else Start(("fc",), _sums, _weights, _scales)


def _sums(
    head: dict, batch: Batch, target: dict, *, config: eagle.EagleConfig, model: Model
) -> Sums:
    T = batch.tokens.shape[1] - 2
    embed = eagle.embedding({"head": head, "target": target}, config, model)
    e = embed_tokens(embed, batch.tokens[:, 1 : 1 + T])
    features = batch.view.features[:, :T]
    after = batch.view.hidden[:, 1 : 1 + T]
    if config.version == 1:
        inputs = [e, features]
    else:
        eps = config.layer.rms_norm_eps
        inputs = [eagle.norm_features(head, features, config), rms_norm(e, head["embed_norm"], eps)]
        # What is scored is normalised, and then multiplied by these weights.
        after = jnp.where(jnp.abs(head["norm"]) > 1e-6, after / head["norm"], 0.0)
    is_counted = jnp.broadcast_to(batch.place(2, T) >= 2, after.shape[:2])
    return Sums.of(jnp.concatenate(inputs, axis=-1), after, is_counted)


@jax.default_matmul_precision("highest")
def _weights(head: dict, sums: Sums, *, config: eagle.EagleConfig) -> dict:
    best = sums.solve()
    new = {name: jnp.zeros_like(w) for name, w in head.items() if name.endswith("_bias")}
    new |= {name: jnp.zeros_like(head[name]) for name in ("o", "down")}
    if config.version == 1:
        return head | new | {"fc": best}
    layer = config.layer
    D, H, G = layer.hidden_size, layer.head_dim, layer.num_key_value_heads
    num_queries = layer.num_attention_heads // G  # of a head of keys and values
    fc, of_embed = jnp.split(best, [len(best) - D])
    products = sums.products[-D:, -D:]
    _, axes = jnp.linalg.eigh(of_embed.T @ products @ of_embed)
    axes = axes[:, ::-1][:, : G * H]  # D x R, what the embeddings' part varies most along
    R = axes.shape[1]
    back = jnp.pad(axes.T, [(0, G * H - R), (0, 0)]).reshape(G, H, D) / num_queries
    state = jnp.zeros((D, G * H))
    keys = head["k"][:D]
    score = _SCORE / jnp.sqrt(H)  # the variance of each of a query's H numbers
    keys = keys * jnp.sqrt(score / (D * jnp.mean(keys**2)))
    queries = jnp.repeat(keys.reshape(D, G, H), num_queries, axis=1).reshape(D, -1)
    values = head["v"][:D].at[:, :R].set(of_embed @ axes)

    def size(w):
        """Of the outputs of a map of the first inputs, the root of the mean square."""
        products = sums.products[: len(w), : len(w)]
        return jnp.sqrt(jnp.maximum(jnp.sum(w * (products @ w)), 0.0) / (sums.count * D))

    new |= {name: jnp.ones_like(w) for name, w in head.items() if name in ("q_norm", "k_norm")}
    if config.norm_before_residual:  # the stream begins with the normalised state
        new["hidden_norm"] = jnp.full_like(head["hidden_norm"], size(fc))
    return head | {
        **new,
        "fc": fc,
        "q": jnp.concatenate([queries, jnp.zeros_like(queries)]),
        "k": jnp.concatenate([keys, state]),
        "v": jnp.concatenate([values, state]),
        "o": jnp.repeat(back, num_queries, axis=0).reshape(-1, D),
        "norm": head["norm"] * size(best),  # a map that explains less is less certain
    }


def _scales(sums: Sums, *, config: eagle.EagleConfig) -> dict[str, jax.Array]:
    num_parts = 2 if config.version == 1 else len(config.taps)
    return {"fc": sums.mean_sizes(config.target_hidden_size, num_parts)}
