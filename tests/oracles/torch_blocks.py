"""Training of DFlash, DFlash 2, DSpark and TreeFlash heads in plain torch: of losses and of steps.

Every window is one sequence of keys, the target's states and then all blocks, under one dense mask;
the loss is a loop over anchors and slots. Weights go by our names and are stored ``[in, out]``.

Axis letters as in ``torch_training``, and S tokens of a block.

Source: DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147; TreeFlash, arXiv 2606.03819; DFlash 2
and D-PACE as in SpecForge.
"""

from __future__ import annotations

import collections

import numpy as np
import torch
import torch.nn.functional as F
from oracles.torch_training import Target, hard_cross_entropy, linear, rms_norm, rope, train


def dense_mask(anchors, num_tokens, size, window, is_causal):
    """bool[A*S,W+A*S]: the window's tokens before a block's anchor, and the block's own."""
    owner = torch.arange(len(anchors)).repeat_interleave(size)
    offset = torch.arange(size).repeat(len(anchors))
    begin = torch.tensor(anchors)[owner]
    position = begin + offset
    token = torch.arange(num_tokens)
    context = token < begin[:, None]
    own = owner[:, None] == owner
    if is_causal:
        own &= offset <= offset[:, None]
    mask = torch.cat([context, own], 1)
    if window is not None:
        keys = torch.cat([token, position])
        mask &= (position[:, None] - keys).abs() < window
    return mask


def block_states(m, features, tokens, anchors, config, embed):
    """The states [A,S,D] of the blocks of one window under the last layer."""
    layer, S, A, W = config.layer, config.block_size, len(anchors), len(tokens)
    N, G, H = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    c = rms_norm(linear(m["head"], features, "fc"), m["head"]["context_norm"], layer)
    ids = torch.full((A, S), config.mask_token_id)
    ids[:, 0] = tokens[anchors]
    at = (torch.tensor(anchors)[:, None] + torch.arange(S)).reshape(-1)
    x = embed(ids).reshape(A * S, -1)
    for i in range(layer.num_hidden_layers):
        p = m[f"layers.{i}"]

        def heads(y, name, count, position=None):
            y = linear(p, y, name).view(len(y), count, H).transpose(0, 1)
            return (
                y
                if position is None
                else rope(rms_norm(y, p[f"{name}_norm"], layer), position, layer)
            )

        y = rms_norm(x, p["attention_norm"], layer)
        a = convolve(p, "attention_conv", y, y, 0, config)
        k = torch.cat([heads(c, "k", G, torch.arange(W)), heads(a, "k", G, at)], 1)
        v = torch.cat([heads(c, "v", G), heads(a, "v", G)], 1)
        k, v = (y.repeat_interleave(N // G, 0) for y in (k, v))
        scores = heads(a, "q", N, at) @ k.transpose(1, 2) / H**0.5
        mask = dense_mask(anchors, W, S, config.windows[i], config.is_causal[i])
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        out = linear(p, out.transpose(0, 1).reshape(A * S, N * H), "o")
        x = x + convolve(p, "attention_conv", y, out, 1, config)
        y = rms_norm(x, p["mlp_norm"], layer)
        h = convolve(p, "mlp_conv", y, y, 0, config)
        out = linear(p, F.silu(linear(p, h, "gate")) * linear(p, h, "up"), "down")
        x = x + convolve(p, "mlp_conv", y, out, 1, config)
    return x.view(A, S, -1)


def convolve(p, name, y, z, side, config):
    """DFlash 2: the rows z [A*S,D] of blocks, each by a matrix over its block that y adds to."""
    if f"{name}_base" not in p:
        return z
    S, D = config.block_size, z.shape[1]
    taps, group = config.conv_kernel_size, config.conv_group_size
    added = linear(p, y, name).view(-1, S, 2, taps, D // group)[:, :, side]
    kernel = p[f"{name}_base"][side] + added.repeat_interleave(group, -1)  # [A,S,taps,D]
    rows = []
    for i in range(S):  # the row as a sum over those of its block
        reach = range(min(taps, i + 1))
        rows.append(sum(kernel[:, i, tap] * z.view(-1, S, D)[:, i - tap] for tap in reach))
    return torch.stack(rows, 1).reshape(len(z), D)


def candidate_loss(m, base, h, before, label, config):
    """DFlash 2: nats of labels among the C likeliest tokens, the last of which a label replaces."""
    nats = torch.zeros(label.shape, dtype=base.dtype)
    read = m["step"]["predecessor"][before] * linear(m["step"], h, "state")
    for place in np.ndindex(*label.shape):
        order = base[place].argsort(descending=True).tolist()[: config.selector_top_k]
        right = int(label[place])
        chosen = order if right in order else [*order[:-1], right]
        score = base[place][chosen] + m["step"]["successor"][chosen] @ read[place]
        nats[place] = score.logsumexp(0) - score[chosen.index(right)]
    return nats


def scores(m, x, tokens, config, target, kind):
    """Base logits [...,V], those after the tokens [...] before, and of the confidence [...]."""
    h = rms_norm(x, m["head"]["norm"], config.layer)
    base = target.unembed(h)
    if kind == "dspark":
        e = m["step"]["embed"][tokens]
        confidence = linear(m["head"], torch.cat([h, e], -1), "confidence")[..., 0]
        return base, base + linear(m["step"], e, "out"), confidence
    if kind == "treeflash":
        e = target.embed(tokens)
        e = e / torch.sqrt((e * e).mean(-1, keepdim=True) + 1e-6) * m["step"]["norm"]
        u, g = linear(m["step"], torch.cat([e, h], -1), "ug").chunk(2, -1)
        x = x + linear(m["step"], F.silu(g) * u, "down")
        return base, target.unembed(rms_norm(x, m["head"]["norm"], config.layer)), None
    return base, base, None


def block_losses(
    directory, modules, config, batches, *, anchors, lrs, decay=np.exp(-1 / 4), is_dpace=False, **of
):
    """One step a batch; the losses before each step, and the weights after the last.

    Args:
      directory: of the target.
      modules: ``{module: {name: array}}``: "head", "layers.0" and so on, "step".
      config: the head's.
      batches: pairs of tokens i64[B,W] and mask bool[B,W].
      anchors: of each batch and each of its windows, a list.
      lrs: a learning rate a batch.
      decay: slot k weighs decay^(k-1).
      is_dpace: slots weigh what D-PACE says instead.
      **of: weights, 0 if they are not given: ``text_weight`` (1) of the text's token,
        ``target_weight`` of the cross-entropy of the target's distribution, ``base_weight`` of the
        same by the base logits, ``l1_weight`` of the L1 distance of the two distributions,
        ``confidence_weight`` of the confidence.
    """
    target, K, kind = Target(directory), config.max_draft, config.name
    of = collections.defaultdict(float, {"text_weight": 1.0} | of)

    def loss_of(m, tokens, mask, index):
        states, logits = target(tokens)
        features = torch.cat([states[tap] for tap in config.taps], -1)
        terms, weights = [], []
        for b, row in enumerate(tokens):
            if not (begin := anchors[index][b]):
                continue
            x = block_states(m, features[b], row, begin, config, target.embed)[:, -K:]
            at = torch.tensor(begin)[:, None] + torch.arange(K)
            row = torch.cat([row, row.new_zeros(K)])  # what lies past the end counts nowhere
            base, q, c = scores(m, x, row[at], config, target, kind)
            label, p = row[at + 1], logits[b][at.clamp(max=tokens.shape[1] - 1)].softmax(-1)
            nats, distance = hard_cross_entropy(q, label), (q.softmax(-1) - p).abs().sum(-1)
            if kind == "dflash2":
                h = rms_norm(x, m["head"]["norm"], config.layer)
                nats = candidate_loss(m, base, h, row[at], label, config)
            term = of["text_weight"] * nats + of["l1_weight"] * distance
            term = term + of["base_weight"] * hard_cross_entropy(base, label)
            term = term - of["target_weight"] * (p * q.log_softmax(-1)).sum(-1)
            if c is not None:
                accepted = (1 - distance / 2).detach()
                entropy = F.binary_cross_entropy_with_logits(c, accepted, reduction="none")
                term = term + of["confidence_weight"] * entropy
            survives = 0.5 * (-nats.detach()).exp() + 0.5
            for j, a in enumerate(begin):
                count = 0
                while count < K and a + count + 1 < tokens.shape[1] and mask[b, a + count + 1]:
                    count += 1
                reach = survives[j].cumprod(0)
                for k in range(count):
                    terms.append(term[j, k])
                    weights.append(reach[k:count].sum() if is_dpace else decay**k)
        return sum(w * term for w, term in zip(weights, terms)) / sum(weights)

    return train(modules, loss_of, batches, lrs)
