"""Drafters that remember earlier outputs, with one memory a row, so that every row is a trial."""

import jax.numpy as jnp
import numpy as np
from oracles import markov

import spec_jax
from spec_jax import decoding, testing
from spec_jax.config import SamplerConfig, SpeculativeConfig, SuffixConfig
from spec_jax.contracts import UpdateCount
from spec_jax.drafters.common.chain import draft_chain
from spec_jax.drafters.model_free import model_free
from spec_jax.drafters.suffix import GAP, suffix
from spec_jax.engine.adaptive.policy import Plan
from spec_jax.rules import make_rule
from spec_jax.sampling import make_sampler
from spec_jax.testing.certificate.states import a_memory_each

DIST = np.array([0.45, 0.3, 0.2, 0.05])  # of the target after every text
TARGET = {"logits": jnp.log(jnp.asarray(DIST, jnp.float32))[None]}
V, K, NUM_TOKENS, MEMORY = len(DIST), 2, 5, 32
_FOLLOW = SuffixConfig(history_tokens=MEMORY)


class SuffixMemories:
    """A suffix drafter, and past outputs of each row."""

    def __init__(self, rows: int):
        self._texts = np.full((rows, MEMORY), GAP, np.int32)
        self._count, self.drafter = 0, a_memory_each(suffix(V, _FOLLOW))

    def prompts(self, rows: int) -> np.ndarray:
        return np.tile(np.arange(3, dtype=np.int32) % V, (rows, 1))

    @property
    def params(self):
        num_updates = jnp.full((len(self._texts),), self._count, jnp.uint32)
        return {"tokens": jnp.asarray(self._texts), "num_updates": num_updates}

    def add(self, outputs: np.ndarray) -> None:
        gap = np.full((len(outputs), 1), GAP, np.int32)
        self._texts = np.concatenate([self._texts, gap, outputs], axis=1)[:, -MEMORY:]
        self._count += 1


class SampledMemories:
    """A drafter that draws its drafts near what the row had at the same place in the last call."""

    def __init__(self, rows: int):
        self._last, self._count = np.zeros((rows, NUM_TOKENS + K), np.int32), 0
        drafter = model_free("sampled memory", self._propose, V)
        memory = UpdateCount(lambda params, state: params["num_updates"])
        self.drafter = drafter._replace(is_sampled=True, memory=memory)

    def prompts(self, rows: int) -> np.ndarray:
        return np.tile(np.arange(3, dtype=np.int32), (rows, 1))

    @property
    def params(self):
        return {"last": jnp.asarray(self._last), "num_updates": jnp.uint32(self._count)}

    def _propose(self, params, state, context, num_draft):
        def logits_at(node):
            at = context.length + node - 3  # of the output
            token = jnp.take_along_axis(params["last"], at[:, None], axis=1)
            return jnp.where(token == jnp.arange(V), 2.0, 0.0) * (params["num_updates"] > 0)

        advance = lambda carry, token, node: (logits_at(node), carry)
        return draft_chain(logits_at(1), None, advance, context, num_draft)[0], state

    def add(self, outputs: np.ndarray) -> None:
        self._last[:, :NUM_TOKENS] = outputs
        self._count += 1


class HostMemories:
    """A function that remembers every prefix it was given, of each prompt apart."""

    params = None

    def __init__(self, rows: int, V: int = V):
        self._seen: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._V, self._updates = V, 0
        self._width = max(1, int(np.ceil(np.log(rows) / np.log(V))))
        self.drafter = spec_jax.host_drafter(self._draft, num_updates=lambda: self._updates)

    def prompts(self, rows: int) -> np.ndarray:
        digits = self._V ** np.arange(self._width)
        return (np.arange(rows)[:, None] // digits % self._V).astype(np.int32)

    def _draft(self, prefix, k, seed):
        del seed
        texts = self._seen.setdefault(prefix[: self._width], [])
        known = [t for t in texts if len(t) > len(prefix) and t[: len(prefix)] == prefix]
        texts.append(prefix)
        self._updates += 1
        return list(known[0][len(prefix) :][:k]) if known else []

    def add(self, outputs: np.ndarray) -> None:
        """It has seen them already."""


def calls(memories, rule: str, rows: int, num_calls: int) -> list[np.ndarray]:
    """Decodes ``rows`` prompts again and again with the same seeds: i64[rows,NUM_TOKENS] a call."""
    rule = make_rule(SpeculativeConfig("suffix", rejection_sampling_strategy=rule))
    system = decoding.System(testing.toy_model(V), memories.drafter, rule, K)
    prompts = memories.prompts(rows)
    full = lambda value: jnp.full((rows,), value, jnp.int32)
    size, outputs = prompts.shape[1], []
    sampler = make_sampler(SamplerConfig(temperature=1.0), rows, V, range(rows))
    for _ in range(num_calls):
        params = {"target": TARGET, "draft": memories.params}
        request = jnp.asarray(prompts), full(size), full(size + NUM_TOKENS), full(-1)[:, None]
        slots = size + NUM_TOKENS + K + 1
        state = decoding.prefill(params, *request, sampler, sampler, system=system, slots=slots)
        state, _ = decoding.generate(params, state, full(0), jnp.int32(99), system=system)
        outputs.append(np.asarray(state.tokens)[:, size : size + NUM_TOKENS])
        memories.add(outputs[-1])
    return outputs


def p_value(output: np.ndarray, num_tokens: int = 4) -> float:
    """Chi-square of the first tokens jointly, against the product of their probabilities."""
    joint = DIST
    for _ in range(num_tokens - 1):
        joint = np.multiply.outer(joint, DIST)
    return markov.p_value(output[:, :num_tokens], joint, least=5)


class Counting:
    """In the place of a tuner: every round drafts, and every round is an update."""

    num_updates = 0

    def choose(self, costs, lag=0):
        del costs, lag
        return Plan(1, 1), self

    def observe(self, num_draft, rounds, reached_at, accepted_at, time_ms):
        self.num_updates += 1
        return self
