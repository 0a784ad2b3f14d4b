"""Training of EAGLE heads and MTP modules in plain torch, an oracle of losses and of steps.

The target is transformers' own model; heads and modules are written out here from the papers'
definitions, over whole windows, every mask explicit. Weights go by the names of ``head_table``
and ``mtp_table`` and are stored ``[in, out]``.

Each ``*_losses`` function takes one step a batch, and returns the losses before each step and the
weights after the last. All of them have

  directory: of the target.
  head_params: ``{name: array}``, of MTP ``{"0": {name: array}, "1": ...}``, a module each.
  layer_config: the ``ModelConfig`` of the head's or each module's layer.
  batches: pairs of tokens i64[B,W] and mask bool[B,W].
  lrs: a learning rate a batch.

Axis letters: B windows, W tokens of a window, R = W - 2 rows, D width, N query heads, G key-value
heads, H head dimension, V vocabulary, U draft vocabulary. Row t joins the target's state at token
t with a later token's embedding. ``mask[b, t]`` says that token t counts where it is predicted.

Source: EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840; DeepSeek-V3, arXiv 2412.19437.
"""

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

# EPS is not 1e-8, which would divide the rounding of a gradient near zero by the same rounding.
CLIP, BETAS, EPS = 0.5, (0.9, 0.95), 1e-5


class Target:
    """A frozen model of a Hugging Face directory."""

    def __init__(self, directory):
        options = dict(dtype=torch.float32, attn_implementation="eager")
        self.model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
        self.model.requires_grad_(False)
        self.embed = self.model.get_input_embeddings()  # [B,T] to [B,T,D]
        self.unembed = self.model.get_output_embeddings()  # [B,T,D] to [B,T,V]

    @torch.no_grad()
    def __call__(self, tokens):
        """States [B,W,D] and logits [B,W,V].

        State i < L is what enters layer i, state L what leaves the last layer, state L + 1 that
        under the final norm.
        """
        entering_norm = []
        hook = self.model.model.norm.register_forward_pre_hook(
            lambda module, args: entering_norm.append(args[0])
        )
        out = self.model(tokens, output_hidden_states=True, use_cache=False)
        hook.remove()
        *inputs, normed = out.hidden_states  # transformers lists no state between the two
        return [*inputs, *entering_norm, normed], out.logits


def linear(p, x, name):
    return x @ p[name] + p.get(f"{name}_bias", 0)


def rms_norm(x, weight, config):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight


def rope(x_BNRH, position, config):
    """Rotates the pairs (i, i + H/2) by ``position * theta^(-2i/H)``."""
    if config.rope.rope_type != "default":
        raise ValueError(f"rope_type {config.rope.rope_type!r} is not part of the oracle")
    half = config.head_dim // 2
    exponent = torch.arange(half, dtype=x_BNRH.dtype) / half
    angle = position[:, None].to(x_BNRH.dtype) / config.rope.rope_theta**exponent
    a, b = x_BNRH[..., :half], x_BNRH[..., half:]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def visible(num_rows, num_steps):
    """bool[R, num_steps * R]: whether a row of the last step sees the key of (step, row).

    Of step 0 a row sees itself and every row before, of a later step itself alone.
    """
    step = torch.arange(num_steps).repeat_interleave(num_rows)
    row = torch.arange(num_rows).repeat(num_steps)
    query = torch.arange(num_rows)[:, None]
    return torch.where(step == 0, row <= query, row == query)


def attend(p, x, step, seen, config):
    """Attention of the rows of one step over this step's keys and all earlier ones'.

    Args:
      p: the weights.
      x: [B,R,C], what q, k and v take.
      step: row t has position t + step.
      seen: keys and values [B,G,R,H] of steps 0..step-1; empty for plain causal attention.
      config: the layer's.

    Returns:
      [B,R,D] and ``seen`` with this step's.
    """
    B, R, _ = x.shape
    N, G, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    heads = lambda name, count: linear(p, x, name).view(B, R, count, H)
    q, k, v = heads("q", N), heads("k", G), heads("v", G)
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    position = torch.arange(R) + step
    q, k = rope(q, position, config), rope(k, position, config)
    seen = [*seen, (k, v)]
    keys = torch.cat([k for k, _ in seen], 2).repeat_interleave(N // G, 1)
    values = torch.cat([v for _, v in seen], 2).repeat_interleave(N // G, 1)
    scores = q @ keys.transpose(2, 3) / H**0.5
    scores = scores.masked_fill(~visible(R, len(seen)), -torch.inf)
    out = scores.softmax(-1) @ values
    return linear(p, out.transpose(1, 2).reshape(B, R, N * H), "o"), seen


def mlp(p, x, config):
    h = rms_norm(x, p["mlp_norm"], config)
    return x + linear(p, F.silu(linear(p, h, "gate")) * linear(p, h, "up"), "down")


def eagle3_input(p, states, config, norms):
    """The state [B,W,D] of step 0, of tapped states."""
    if norms.get("fc_norm"):
        states = [rms_norm(g, p[f"fc_norm_{i}"], config) for i, g in enumerate(states)]
    joined = torch.cat(states, -1)
    if norms.get("norm_before_fc"):
        joined = rms_norm(joined, p["input_norm"], config)
    return linear(p, joined, "fc")


def eagle3_step(p, e, state, step, seen, config, norms):
    """The residual stream [B,R,D] of one step, and ``seen`` with its keys."""
    normed = rms_norm(state, p["hidden_norm"], config)
    both = torch.cat([rms_norm(e, p["embed_norm"], config), normed], -1)
    h, seen = attend(p, both, step, seen, config)
    return mlp(p, (normed if norms.get("norm_before_residual") else state) + h, config), seen


def mtp_step(p, e, state, step, seen, config):
    """A module's output [B,R,D] under its norm, and ``seen`` with its keys."""
    parts = [rms_norm(e, p["embed_norm"], config), rms_norm(state, p["hidden_norm"], config)]
    x = linear(p, torch.cat(parts, -1), "fc")
    h, seen = attend(p, rms_norm(x, p["attention_norm"], config), step, seen, config)
    return rms_norm(mlp(p, x + h, config), p["norm"], config), seen


def weighted_mean(values, weight):
    return (values * weight).sum() / weight.sum().clamp(min=1)


def soft_cross_entropy(logits, target_logits):
    return -(target_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def hard_cross_entropy(logits, labels):
    return -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def extend(x, count):
    """[B,W,...] with as many zeros behind the window, so that each step has R rows to read."""
    return torch.cat([x, x.new_zeros(x.shape[0], count, *x.shape[2:])], 1)


def train(modules, loss_of, batches, lrs):
    """AdamW steps on every weight, gradients clipped by their global norm.

    Args:
      modules: ``{module: {name: array}}``; integer arrays are constants.
      loss_of: modules of tensors, tokens i64[B,W], weights [B,W] of them, index of the batch.
      batches: pairs of tokens and mask.
      lrs: a learning rate a batch.
    """

    def tensor(array):
        array = np.asarray(array)
        if np.issubdtype(array.dtype, np.integer):
            return torch.tensor(array, dtype=torch.int64)
        return torch.tensor(array, dtype=torch.float32, requires_grad=True)

    modules = {m: {name: tensor(x) for name, x in p.items()} for m, p in modules.items()}
    named = {(m, name): x for m, p in modules.items() for name, x in p.items()}
    leaves = {name: x for name, x in named.items() if x.requires_grad}
    optimizer = torch.optim.AdamW(leaves.values(), betas=BETAS, eps=EPS, weight_decay=0.0)
    losses = []
    for index, ((tokens, mask), lr) in enumerate(zip(batches, lrs, strict=True)):
        tokens = torch.tensor(np.asarray(tokens), dtype=torch.int64)
        loss = loss_of(modules, tokens, torch.tensor(np.asarray(mask)).float(), index)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((x.grad**2).sum() for x in leaves.values()))
        for x in leaves.values():
            x.grad *= torch.clamp(CLIP / norm, max=1.0)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        losses.append(loss.item())
    numpy = lambda x: x.detach().numpy()
    return losses, {m: {name: numpy(x) for name, x in p.items()} for m, p in modules.items()}


def eagle1_losses(directory, head_params, layer_config, batches, *, lrs):
    """EAGLE-1: regression of the next state and cross-entropy of the two distributions."""
    target = Target(directory)

    def loss_of(modules, tokens, weight, index):
        p, R = modules["head"], tokens.shape[1] - 2
        states, logits = target(tokens)
        f = states[-1]
        f_in, f_next = f[:, :R], f[:, 1 : R + 1]
        x = linear(p, torch.cat([target.embed(tokens[:, 1 : R + 1]), f_in], -1), "fc")
        h, _ = attend(p, x, 0, [], layer_config)
        predicted = mlp(p, x + h, layer_config)
        distance = F.smooth_l1_loss(predicted, f_next, reduction="none").mean(-1)
        entropy = soft_cross_entropy(target.unembed(predicted), logits[:, 1 : R + 1])
        m = weight[:, 2:]
        return weighted_mean(distance, m) + 0.1 * weighted_mean(entropy, m)

    losses, modules = train({"head": head_params}, loss_of, batches, lrs)
    return losses, modules["head"]


def eagle3_losses(
    directory, head_params, layer_config, batches, *, lrs, taps, num_steps, decay=0.8, **norms
):
    """EAGLE-3: cross-entropy of two distributions over steps that read the head's states.

    A token whose target peaks outside of the draft vocabulary adds no loss and counts in the
    mean.

    Args:
      taps: which states of ``Target`` the head reads.
      num_steps: unrolled steps.
      decay: step j weighs decay^j.
      **norms: True for ``norm_output``, the next step reads the state under ``norm``;
        ``norm_before_residual``, the residual stream starts from the normalised state; ``fc_norm``,
        a norm for each tapped state; ``norm_before_fc``, one norm over all tapped states.
    """
    target = Target(directory)

    def loss_of(modules, tokens, weight, index):
        p, R = modules["head"], tokens.shape[1] - 2
        states, logits = target(tokens)
        draft_ids = torch.arange(p["head"].shape[1]) + p.get("d2t", 0)
        is_in_draft = torch.isin(logits.argmax(-1), draft_ids).float()
        state = eagle3_input(p, [states[i] for i in taps], layer_config, norms)
        state, seen, total = state[:, :R], [], 0.0
        tokens, weight, logits, is_in_draft = (
            extend(x, num_steps) for x in (tokens, weight, logits, is_in_draft)
        )
        for j in range(num_steps):
            e = target.embed(tokens[:, 1 + j : 1 + j + R])
            x, seen = eagle3_step(p, e, state, j, seen, layer_config, norms)
            normed = rms_norm(x, p["norm"], layer_config)
            after = slice(1 + j, 1 + j + R)
            entropy = soft_cross_entropy(normed @ p["head"], logits[:, after][..., draft_ids])
            mask = weight[:, 2 + j : 2 + j + R]
            total = total + decay**j * weighted_mean(entropy * is_in_draft[:, after], mask)
            state = normed if norms.get("norm_output") else x
        return total

    losses, modules = train({"head": head_params}, loss_of, batches, lrs)
    return losses, modules["head"]


def mtp_recycled_losses(
    directory, head_params, layer_config, batches, *, lrs, num_steps=3, beta=0.6
):
    """One MTP module that reads its own normalised output: cross-entropy of the true tokens.

    Args:
      num_steps: unrolled steps.
      beta: step j weighs beta^j, divided by the sum of these.
    """
    target = Target(directory)

    def loss_of(modules, tokens, weight, index):
        p, R = modules["0"], tokens.shape[1] - 2
        state, seen, total = target(tokens)[0][-1][:, :R], [], 0.0
        tokens, weight = extend(tokens, num_steps), extend(weight, num_steps)
        for j in range(num_steps):
            e = target.embed(tokens[:, 1 + j : 1 + j + R])
            state, seen = mtp_step(p, e, state, j, seen, layer_config)
            predicted = slice(2 + j, 2 + j + R)
            entropy = hard_cross_entropy(target.unembed(state), tokens[:, predicted])
            total = total + beta**j * weighted_mean(entropy, weight[:, predicted])
        return total / sum(beta**j for j in range(num_steps))

    return train(head_params, loss_of, batches, lrs)


def mtp_sequential_losses(directory, head_params, layer_config, batches, *, lrs):
    """MTP modules that each read the one before: cross-entropy of the true tokens."""
    target = Target(directory)

    def loss_of(modules, tokens, weight, index):
        W, state, total = tokens.shape[1], target(tokens)[0][-1], 0.0
        for m in range(1, len(modules) + 1):
            p, R = modules[str(m - 1)], W - 1 - m
            e = target.embed(tokens[:, m : m + R])
            state, _ = mtp_step(p, e, state[:, :R], 0, [], layer_config)
            entropy = hard_cross_entropy(target.unembed(state), tokens[:, m + 1 :])
            total = total + weighted_mean(entropy, weight[:, m + 1 :])
        return total / len(modules)

    return train(head_params, loss_of, batches, lrs)
