"""What sampling parameters mean, one token at a time, in NumPy and float64."""

import numpy as np


def processed_row(logits, config, prompt, output):
    """Log-probabilities of one position, and how far the nearest decision is from turning.

    Args:
      logits: f32[V].
      config: a ``SamplerConfig``.
      prompt: the prompt's ids.
      output: ids of the output up to this position, drafts among them.

    Returns:
      f64[V], -inf where a token is dropped, and a margin in nats or probability.
    """
    x = np.array(logits, np.float64)
    for token, value in config.logit_bias:
        x[token] += value
    for token in set(prompt) | set(output):
        r = config.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= config.presence_penalty
    for token in output:
        x[token] -= config.frequency_penalty
    if config.temperature < 1e-5:
        second, first = np.sort(x)[-2:]
        return np.where(np.arange(len(x)) == np.argmax(x), 0.0, -np.inf), first - second
    x = x / config.temperature
    margins = [np.inf]
    if config.top_k:
        order = np.sort(x)[::-1]
        k = min(config.top_k, len(x))
        if k < len(x):
            margins.append(np.inf if order[k] == order[k - 1] else order[k - 1] - order[k])
        x = np.where(x < order[k - 1], -np.inf, x)
    if config.top_p < 1:
        order = np.lexsort((np.arange(len(x)), -x))  # ties by their ids
        mass = np.cumsum(np.exp(x[order] - x.max()) / np.exp(x - x.max()).sum())
        n = int(np.argmax(mass >= config.top_p)) + 1  # the fewest that reach p
        margins += list(np.abs(mass - config.top_p))
        x[order[n:]] = -np.inf
    if config.min_p > 0:
        above = x - x.max() - np.log(config.min_p)
        margins += list(np.abs(above[np.isfinite(above)]))
        x = np.where(above < 0, -np.inf, x)
    return x, min(margins)


def processed(logits, configs, prompts, outputs, drafted):
    """``processed_row`` of every row and node; node i has seen the first i drafts."""
    B, T, V = logits.shape
    x, margin = np.zeros((B, T, V)), np.inf
    for b in range(B):
        for t in range(T):
            history = [*outputs[b], *drafted[b][:t]]
            x[b, t], own = processed_row(logits[b, t], configs[b], prompts[b], history)
            margin = min(margin, own)
    return x, margin
