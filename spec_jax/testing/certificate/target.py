"""A certificate for a target: that its cache, masks and positions do what decoding relies on."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.compilation import usual_flags
from spec_jax.decoding.calls import call_forward, call_unembed
from spec_jax.engine.request import check_transfers
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel
from spec_jax.models.params import is_float
from spec_jax.progress import Progress
from spec_jax.sharding import take_rows
from spec_jax.testing.certificate.records import CertificateError, Check, TargetCertificate

TOKENS = 8  # N, of each row
ROWS = TOKENS  # B; row i of a probe differs in token i
_SLOTS = 24
_TOLERANCE = {4: 1e-4, 2: 0.1}  # of the largest logit, by bytes of the states' dtype
_TREE = ((0,), (0, 1), (0, 2), (0, 2, 3))  # the nodes that each node of a tree sees
_RAGGED = " where rows have different lengths: one slot, or one position, serves all rows"
_REWIND = "it cannot rewind, so drafts are never forgotten, and there are no trees"


def certify_target(
    target: LoadedModel,
    logits: Callable[[Any, jax.Array], jax.Array] | None = None,
    *,
    seed: int = 0,
    tolerance: float | None = None,
) -> TargetCertificate:
    """Certifies that a model, with its weights, can be decoded with drafts.

    Its logits in one pass over random tokens are compared with those of every other way in which
    the decoder feeds it: token by token, in chunks, with drafts that are forgotten, rows of
    different lengths, paths of trees, windows of several passes, replaced rows.

    Example:
      ```python
      import spec_jax

      print(spec_jax.certify(target=spec_jax.load_model("zoo/target")))
      ```

    Args:
      target: the model.
      logits: ``(params, tokens i32[B,T]) -> [B,T,V]``, computed without a cache; None: the model's
        own pass over all tokens is the reference.
      seed: of the tokens.
      tolerance: on the largest difference of a logit, over the largest logit; by default 1e-4, and
        0.1 where the states have 16 bits, of which float32 is the sharper test.

    Returns:
      The certificate; print it.

    Raises:
      CertificateError: a check fails. The message names the row and the first position, and the
        cause where it can be told: length, mask, position.
      ShapeError, ConfigError: what the model returns breaks the contract.
    """
    if logits is not None:
        try:
            inspect.signature(logits).bind(target.params, None)
        except TypeError as error:
            raise ConfigError(
                f"logits is {logits!r} ({error}); expected a function (params, tokens i32[B,T]) "
                "-> logits [B,T,V]"
            ) from error
        except ValueError:  # a builtin without a signature
            pass
    check_transfers()
    with usual_flags(), jax.default_matmul_precision("highest"):
        return _Run(target, logits, seed, tolerance).certify()


class _Run:
    """The checks of one certificate, in the order in which a failure explains most."""

    def __init__(self, target, logits, seed, tolerance):
        self.target = target
        self.model = model = target.model
        self.logits = logits
        self.tolerance = tolerance
        self.slots = min(_SLOTS, model.max_length)
        if model.max_length < 2 * TOKENS or model.last_id < 1:
            raise ConfigError(
                f"{target.name} has {model.last_id + 1} ids and max_length {model.max_length}; a "
                f"certificate needs 2 ids and {2 * TOKENS} tokens"
            )
        rng = np.random.default_rng(seed)
        shape = (3, ROWS, TOKENS)
        ids = rng.integers(0, model.last_id + 1, shape, dtype=np.int32)
        self.tokens, self.other, self.garbage = ids
        # Every token of the others differs.
        self.other = (self.tokens + 1 + self.other % model.last_id) % (model.last_id + 1)
        self.checks: list[Check] = []
        self.not_proved: list[str] = []
        self.steps = [
            ("shapes and dtypes", self._contract),
            ("no row reads its neighbours", self._neighbours),
            ("no token sees a later one", self._causal),
            ("one pass over all tokens", self._all_at_once),
            ("one token a pass", self._one_by_one),
            ("several tokens a pass", self._chunks),
            ("forgotten drafts", self._forgotten),
            ("rows of which some commit nothing", self._idle),
            ("rows of different lengths", self._ragged),
            ("several passes in one window, as a draft makes them", self._window),
            ("paths of a tree", self._tree),
            ("a row that is replaced", self._insert),
            ("a cache that is full", self._full),
            ("committed tokens that are forgotten", self._rewind),
            ("rows in another order", self._take_rows),
            ("a snapshot", self._snapshot),
        ]

    def certificate(self, failure: str | None) -> TargetCertificate:
        open_ends = (
            f"texts of more than {TOKENS} tokens, tokens past max_length, other batches, several "
            "devices",
            "positions of blocks, states that heads tap",
            *(["the logits themselves: no function was given"] if self.logits is None else []),
        )
        model = self.model
        named = (self.target.name, model.vocab_size, model.max_length)
        return TargetCertificate(
            *named, tuple(self.checks), (*self.not_proved, *open_ends), failure
        )

    def certify(self) -> TargetCertificate:
        with Progress(len(self.steps), "certify", every_s=5.0) as progress:
            for what, step in self.steps:
                progress.now(what)
                since = time.perf_counter()
                try:
                    error = step()
                except CertificateError as failure:
                    failure.certificate = self.certificate(f"{what}: {failure}")
                    failure.args = (f"target {self.target.name!r}: {what}: {failure}",)
                    raise
                if error is not None:
                    seconds = time.perf_counter() - since
                    self.checks.append(Check(what, "equality", error, trials=ROWS, seconds=seconds))
                progress.step(what)
        return self.certificate(None)

    # What the checks share.

    def fresh(self, slots=None):
        return self._init(self.target.params, slots=slots or self.slots)

    @functools.cached_property
    def _init(self):
        init = functools.partial(self.model.init_cache, batch=ROWS)
        return jax.jit(init, static_argnames="slots")

    @functools.cached_property
    def _pass(self):
        @functools.partial(jax.jit, static_argnames=("width", "is_closed"))
        def run(params, cache, tokens, n, offset, mask, path, *, width, is_closed):
            more = {} if mask is None else {"window_mask": mask}
            if offset is not None:
                more["window_offset"] = offset
            opened = cache if width is None else self.model.open_window(cache, width)
            output = call_forward(self.model, params, tokens, opened, **more)
            logits = call_unembed(self.model, params, output.hidden)
            after = output.cache
            if is_closed:
                after = after.commit(n) if path is None else after.commit(n, path)
            return logits, output.cache.length, after

        return run

    def feed(
        self,
        cache,
        tokens,
        n=None,
        *,
        offset=None,
        mask=None,
        path=None,
        width=None,
        is_closed=True,
    ):
        """Feeds tokens i32[B,T] and commits n (i32[B], by default all); logits and the cache."""
        tokens = jnp.asarray(tokens)
        n = np.full(ROWS, tokens.shape[1], np.int32) if n is None else np.asarray(n, np.int32)
        before = np.asarray(cache.length)
        window = offset, mask, path
        options = dict(width=width, is_closed=is_closed)
        logits, length, after = self._pass(self.target.params, cache, tokens, n, *window, **options)
        if (np.asarray(length) != before).any():
            raise CertificateError(
                f"forward moved cache.length from {before[0]} to {int(length[0])}; only commit may"
            )
        if is_closed and (np.asarray(after.length) != before + n).any():
            raise CertificateError(
                f"commit({int(n[0])}) moved cache.length from {before[0]} to {int(after.length[0])}"
            )
        return np.asarray(logits), after

    def half(self):
        """The cache after the first four tokens."""
        return self.feed(self.fresh(), self.tokens[:, :4])[1]

    def rest(self, cache):
        """Feeds the other four."""
        return self.feed(cache, self.tokens[:, 4:])

    def whole(self, tokens):
        """f32[B,N,V], the logits of one pass over all tokens."""
        return self.feed(self.fresh(), tokens)[0]

    def right(self, tokens):
        """f32[B,N,V], the logits that are the reference."""
        if self.logits is None:
            return self.checked(self.whole(tokens), "logits")
        logits = np.array(self.logits(self.target.params, jnp.asarray(tokens)), np.float32)
        shape = (*tokens.shape, self.model.vocab_size)
        if logits.shape != shape:
            raise CertificateError(
                f"the function returned logits {list(logits.shape)}; expected {list(shape)}"
            )
        logits[..., self.model.last_id + 1 :] = -np.inf  # ids that are no tokens
        return self.checked(logits, "the function's logits")

    def checked(self, logits, name):
        """Returns logits that a token can be drawn from; ids may be forbidden, with -inf."""
        is_wrong = np.isnan(logits) | np.isposinf(logits)
        if is_wrong.any() or not np.isfinite(logits.max(axis=-1)).all():
            raise CertificateError(f"{name} are not finite")
        return logits

    def compare(self, found, expected, explain: str | Callable[[int, int], str]) -> float:
        """Returns the largest difference, over the largest logit.

        Args:
          found: f32[B,T,V].
          expected: f32[B,T,V], where it matters; NaN elsewhere.
          explain: the cause, or ``(row, index) -> str`` of the first logits that differ.
        """
        error = self.errors(found, expected)
        wrong = np.argwhere(error > self.limit)
        if len(wrong):
            index = wrong[:, 1].min()
            row = wrong[wrong[:, 1] == index][0, 0]
            cause = explain if isinstance(explain, str) else explain(int(row), int(index))
            raise CertificateError(
                f"row {row}, token {index}: logits differ by {error[row, index]:.1e} of the "
                f"largest (at most {self.limit:.0e} is rounding){cause}"
            )
        return float(error.max())

    def errors(self, found, expected):
        """f64[B,T], the largest difference of each position's logits, over the largest logit."""
        found, expected = (np.asarray(x, np.float64) for x in (found, expected))
        is_same = (found == expected) | np.isnan(expected)
        with np.errstate(invalid="ignore"):
            error = np.where(is_same, 0.0, np.abs(found - expected)).max(axis=-1)
        return np.nan_to_num(error, nan=np.inf) / self.scale

    # The checks, each of which returns the largest difference, or None if there was nothing to do.

    def _contract(self):
        model = self.model
        call = functools.partial(call_forward, model)
        output = jax.eval_shape(call, self.target.params, self.tokens, self.fresh())
        floats = [x for x in jax.tree.leaves(self.target.params) if is_float(x)]
        narrow = min(x.dtype.itemsize for x in (*floats, output.hidden))
        self.limit = self.tolerance or _TOLERANCE[4 if narrow >= 4 else 2]
        self.own = found = self.checked(self.whole(self.tokens), "logits")
        V = model.vocab_size
        last = model.last_id
        if last + 1 < V and not np.isneginf(found[..., last + 1 :]).all():
            raise CertificateError(
                f"logits of ids {last + 1} to {V - 1}, which are no tokens, must be -inf"
            )
        self.scale = max(float(np.abs(found[np.isfinite(found)]).max()), 1e-30)
        one = jax.ShapeDtypeStruct((ROWS, output.hidden.shape[-1]), output.hidden.dtype)
        try:
            is_fit = jax.eval_shape(model.unembed, self.target.params, one).shape == (ROWS, V)
        except Exception:
            is_fit = False
        if not is_fit:
            self.not_proved.append(
                "drafting: unembed takes no hidden dtype[B,D], as drafts call it"
            )

    def _neighbours(self):
        error = 0.0
        for is_kept in (np.arange(ROWS) % 2 == 0, np.arange(ROWS) % 2 == 1):
            changed = np.where(is_kept[:, None], self.tokens, self.other)
            expected = np.where(is_kept[:, None, None], self.own, np.nan)
            error = max(
                error,
                self.compare(
                    self.whole(changed),
                    expected,
                    " where only the other rows' tokens differ: rows are mixed",
                ),
            )
        return error

    def _causal(self):
        # Row i differs from its token i on.
        is_later = np.arange(TOKENS) >= np.arange(ROWS)[:, None]
        changed = np.where(is_later, self.other, self.tokens)
        expected = np.where(is_later[..., None], np.nan, self.own)

        def explain(row, index):
            return f" where only tokens from {row} on differ: the mask lets token {index} see ahead"

        return self.compare(self.whole(changed), expected, explain)

    def _step_by_step(self, tokens):
        cache = self.fresh()
        logits = []
        for i in range(TOKENS):
            one, cache = self.feed(cache, tokens[:, i : i + 1])
            logits.append(one)
        return np.concatenate(logits, axis=1)

    def _all_at_once(self):
        found = self.own
        self.expected = self.right(self.tokens)
        if self.errors(self.expected, self.right(self.other)).max() <= self.limit:
            self.not_proved.append("anything: the logits are the same whatever the tokens are")

        def explain(row, index):
            later = (slice(None, -1), slice(1, None), "later")
            for ours, theirs, where in (later, (later[1], later[0], "earlier")):
                if self.errors(found[:, ours], self.expected[:, theirs]).max() <= self.limit:
                    return f": the model's logits are those of the function one token {where}"
            return self.probe(row, index, self.whole)

        return self.compare(found, self.expected, explain)

    def _one_by_one(self):
        def explain(row, index):
            return self.probe(row, index, self._step_by_step)

        return self.compare(self._step_by_step(self.tokens), self.expected, explain)

    def probe(self, row, index, logits_of):
        """Says which tokens a wrong one sees or misses: row i changes token i of the wrong row."""
        base = np.repeat(self.tokens[row : row + 1], ROWS, axis=0)
        changed = np.where(np.eye(TOKENS, dtype=bool), self.other, base)

        def seen(logits_of):
            at = slice(index, index + 1)
            return self.errors(logits_of(changed)[:, at], logits_of(base)[:, at])[:, 0] > self.limit

        right = seen(self.right)
        ours = seen(logits_of)
        if (right & ~ours).any():
            missed = np.flatnonzero(right & ~ours)[-1]
            return (
                f": token {index} does not see token {missed}: the mask hides its slot, or it was "
                "written elsewhere"
            )
        if (ours & ~right).any():
            return f": token {index} sees token {np.flatnonzero(ours & ~right)[0]}, and should not"
        return ": it sees the right tokens, so weights, positions or what is stored of them differ"

    def _chunks(self):
        cache = self.fresh()
        found = []
        for begin in range(0, TOKENS, 4):
            logits, cache = self.feed(cache, self.tokens[:, begin : begin + 4])
            found.append(logits)
        return self.compare(
            np.concatenate(found, axis=1),
            self.expected,
            lambda row, index: (
                f", in the second pass of four tokens (token {index % 4} of it)"
                if index >= 4
                else ", in a pass of four tokens"
            ),
        )

    def _in_turns(self, widths, garbage):
        """Feeds rows at different speeds, after each pass of ``widths`` as many are committed.

        Args:
          widths: ``(pass) -> i32[B]``, how many tokens are committed.
          garbage: i32[B,N], what follows them in the window.

        Returns:
          f32[B,N,V], the logits at the committed tokens.
        """
        cache = self.fresh()
        found = np.full(self.expected.shape, np.nan, np.float32)
        length = np.zeros(ROWS, np.int32)
        T = 4
        turn = 0
        while (length < TOKENS).any():
            n = np.minimum(widths(turn), TOKENS - length)
            at = np.minimum(length[:, None] + np.arange(T), TOKENS - 1)
            is_kept = np.arange(T) < n[:, None]
            window = np.where(is_kept, np.take_along_axis(self.tokens, at, 1), garbage[:, :T])
            logits, cache = self.feed(cache, window, n)
            for b in range(ROWS):
                found[b, length[b] : length[b] + n[b]] = logits[b, : n[b]]
            length += n
            turn += 1
        return found

    def _forgotten(self):
        if not self.model.can_rewind:
            self.not_proved.append(_REWIND)
            return None

        def widths(i):
            return np.full(ROWS, 1 + i % 3)

        found = self._in_turns(widths, self.garbage)
        again = self._in_turns(widths, (self.garbage + 1) % (self.model.last_id + 1))
        is_stale = (self.errors(again, found) > self.limit).any()

        def explain(row, index):
            if is_stale:
                return (
                    ": it depends on drafts that were forgotten: the mask shows their slots, or a "
                    "state cannot forget (then it is a Model(can_rewind=False))"
                )
            return ": positions or slots go on after the drafts that were forgotten"

        return self.compare(found, self.expected, explain)

    def _ragged(self):
        if not self.model.can_rewind:
            return None
        rows = np.arange(ROWS)
        found = self._in_turns(lambda i: 1 + (i + rows) % 3, self.garbage)
        return self.compare(found, self.expected, _RAGGED)

    def _idle(self):
        cache = self.fresh()
        found = np.full(self.expected.shape, np.nan, np.float32)
        length = np.zeros(ROWS, np.int32)
        for i in range(2 * TOKENS):
            n = ((np.arange(ROWS) + i) % 2 == 0).astype(np.int32) * (length < TOKENS)
            at = np.minimum(length, TOKENS - 1)[:, None]
            logits, cache = self.feed(cache, np.take_along_axis(self.tokens, at, 1), n)
            for b in np.flatnonzero(n):
                found[b, length[b]] = logits[b, 0]
            length += n
        return self.compare(found, self.expected, f"{_RAGGED}, or commit(0) changes a row")

    def _window(self):
        if not (self.model.can_rewind and self.model.takes("window_offset")):
            if not self.model.takes("window_offset"):
                self.not_proved.append("forward takes no window_offset, so it cannot draft")
            return None
        cache = self.half()
        none = np.zeros(ROWS)
        first, cache = self.feed(
            cache, self.tokens[:, 4:6], none, offset=np.int32(0), width=4, is_closed=False
        )
        second, cache = self.feed(cache, self.tokens[:, 6:], none + 4, offset=np.int32(2))
        return self.compare(
            np.concatenate([self.expected[:, :4], first, second], axis=1),
            self.expected,
            lambda row, index: f": window_offset={index // 2 * 2 - 4} is not where its pass begins",
        )

    def _tree(self):
        if not self.model.can_rewind:
            return None
        if not self.model.takes("window_mask"):
            self.not_proved.append("trees: forward takes no window_mask")
            return None
        nodes = len(_TREE)
        mask = np.zeros((1, nodes, nodes), bool)
        for node, seen in enumerate(_TREE):
            mask[0, node, list(seen)] = True
        mask = np.repeat(mask, ROWS, axis=0)
        begin = 4
        window = self.other[:, begin : begin + nodes].copy()  # node 1: a branch that is not taken
        sequence = self.tokens
        window[:, [0, 2, 3]] = sequence[:, begin : begin + 3]
        branch = sequence.copy()
        branch[:, begin + 1] = window[:, 1]
        right = self.right(sequence)
        other = self.right(branch)
        expected = np.stack(
            [right[:, begin], other[:, begin + 1], right[:, begin + 1], right[:, begin + 2]], axis=1
        )
        cache = self.feed(self.fresh(), sequence[:, :begin])[1]
        path = np.repeat(np.array([[0, 2, 3, 0]], np.int32), ROWS, axis=0)
        n = np.full(ROWS, 3)
        logits, cache = self.feed(cache, window, n, mask=mask, path=path)

        def explain(row, node):
            return (
                f" (node {node} of a tree, which sees nodes {_TREE[node]}): window_mask, or the "
                "position by depth, is not followed"
            )

        error = self.compare(logits, expected, explain)
        logits, _ = self.feed(cache, sequence[:, begin + 3 :])
        return max(
            error,
            self.compare(
                logits,
                right[:, begin + 3 :],
                " after a path of a tree was committed: commit(n, path) does not move its tokens "
                "to the front",
            ),
        )

    def _insert(self):
        half = TOKENS // 2
        cache = self.half()

        @jax.jit
        def replaced(params, cache, tokens):
            one = self.model.init_cache(params, 1, self.slots)
            one = self.model.forward(params, tokens, one).cache
            return cache.insert_row(jnp.int32(2), one.commit(jnp.full(1, half - 1, jnp.int32)))

        cache = replaced(self.target.params, cache, jnp.asarray(self.other[:1, : half - 1]))
        tokens = self.tokens.copy()
        tokens[2] = self.other[0]
        expected = self.right(tokens)
        at = np.full((ROWS, 1), half)
        at[2] = half - 1
        logits, _ = self.feed(cache, np.take_along_axis(tokens, at, 1))
        expected = np.take_along_axis(expected, at[..., None], 1)
        return self.compare(
            logits,
            expected,
            lambda row, index: f" after insert_row replaced row 2: row {row} is not what was put",
        )

    def _full(self):
        found, _ = self.rest(self.feed(self.fresh(TOKENS), self.tokens[:, :4])[1])
        return self.compare(
            found, self.expected[:, 4:], f": in a cache of {TOKENS} slots the last ones are lost"
        )

    def _rewind(self):
        cache = self.feed(self.half(), self.garbage[:, :4])[1]
        if not hasattr(cache, "rewind"):
            self.not_proved.append("drafting on other devices: the cache has no `rewind`")
            return None
        n = np.arange(ROWS, dtype=np.int32) % 5
        cache = jax.jit(type(cache).rewind)(cache, n)
        if (np.asarray(cache.length) != 8 - n).any():
            raise CertificateError(f"rewind(n) left lengths {np.asarray(cache.length)}, not 8 - n")
        cache = jax.jit(type(cache).rewind)(cache, 4 - n)
        found, _ = self.rest(cache)
        return self.compare(
            found, self.expected[:, 4:], " after rewind: it depends on tokens that were forgotten"
        )

    def _take_rows(self):
        order = np.roll(np.arange(ROWS, dtype=np.int32)[::-1], 1)
        cache = jax.jit(take_rows)(self.half(), order)
        logits, _ = self.feed(cache, self.tokens[order, 4:])
        return self.compare(
            logits,
            self.expected[order, 4:],
            " after take_rows: arrays that do not begin with the batch need a method `take_rows`",
        )

    def _snapshot(self):
        cache = self.half()
        if not hasattr(cache, "snapshot"):
            return None
        taken = cache.snapshot()
        cache = self.feed(cache, self.garbage[:, :4])[1]
        found, _ = self.rest(cache.restore_from_snapshot(taken))
        return self.compare(
            found, self.expected[:, 4:], " after restore_from_snapshot: it is another state"
        )
