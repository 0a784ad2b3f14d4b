"""Trains a head in a few lines: ``new_head`` and ``fit_head``, for notebooks and scripts.

``experiments.train_head`` does the same with checkpoints, exact resuming, meshes and several texts,
and begins EAGLE heads with a map of least squares.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spec_jax.config.checks import check, check_integer, check_name
from spec_jax.data.batches import Corpus, count_tokens, draft_vocabulary, window_batches
from spec_jax.drafters import registry
from spec_jax.drafters.common.vocabulary import draft_ids
from spec_jax.drafters.common.warm_start import from_target
from spec_jax.drafters.loaded import LoadedHead, tapped_model
from spec_jax.errors import ConfigError
from spec_jax.meshes import mesh_of
from spec_jax.models.loaded import LoadedModel
from spec_jax.progress import Progress, is_watched
from spec_jax.show import plots
from spec_jax.train.log import Lines
from spec_jax.train.loop import train_loop
from spec_jax.train.means import report
from spec_jax.train.objective import Batch, Objective, target_view
from spec_jax.train.optimizer import make_optimizer
from spec_jax.train.step import TrainState, train_step

_COUNTED = 1 << 24  # tokens of a text without end
LOSS = {"num_steps": 3}  # options of the loss that differ from its own defaults


class Fitted(NamedTuple):
    """What ``fit_head`` returns.

    Attributes:
      head: the trained head.
      log: of each step ``step``, ``loss``, ``tok_s`` and the objective's other figures, among them
        ``teacher_forced_accept``, the share of drafts by position that were the text's own token;
        and what ``evaluate`` returned after that step.
    """

    head: LoadedHead
    log: list[dict[str, Any]]

    def __repr__(self) -> str:
        return f"Fitted({self.head!r}, loss {self.log[-1]['loss']:.3g} at step {len(self.log) - 1})"

    def plot(self, axes: Any = None) -> Any:
        """Draws the loss by step, and each number that evaluations returned.

        Args:
          axes: matplotlib axes to draw on, one a panel; None: a new figure.

        Returns:
          The matplotlib figure.
        """

        def is_number(name):
            return isinstance(self.log[0][name], int | float)

        names = ["loss", *(n for n in self.log[0] if n not in ("step", "loss") and is_number(n))]
        points = {n: [(line["step"], line[n]) for line in self.log if n in line] for n in names}
        return plots.plot_lines(points, "step", axes)


def new_head(
    target: LoadedModel,
    objective: str = "eagle3",
    text: Corpus | Any = None,
    *,
    is_warm_start: bool = True,
    seed: int = 0,
    **options: Any,
) -> LoadedHead:
    """Returns an untrained head for a target.

    Example:
      ```python
      import spec_jax

      target = spec_jax.load_model("zoo/target")
      head = spec_jax.new_head(target, "eagle3", taps=(2, 5, 8))
      print(head)
      ```

    Args:
      target: the model that it will draft for.
      objective: the training objective: "eagle1", "eagle3", "peagle", "mtp", "dflash", "dflash2",
        "dspark", "treeflash", or a registered one.
      text: the training text, see ``fit_head``, but no iterator, which would be used up; only
        needed with ``draft_vocab_size``, which keeps the most frequent tokens of the text. Of an
        iterable without a length the first 2^24 tokens are counted.
      is_warm_start: begin with the target's last layer, final norm and output head where their
        shapes fit; otherwise all weights are random.
      seed: of the random weights.
      **options: of the head's shape, such as ``taps`` or ``draft_vocab_size``; see ``of_target``
        of its config.

    Raises:
      ConfigError: the objective is unknown, an option does not fit, or the target cannot be tapped.
    """
    known = registry.objectives()
    check_name("objective", objective, known)
    kind, training = known[objective]
    size = options.get("draft_vocab_size")
    if size is not None:
        check_integer("draft_vocab_size", size, 1)
    config = training.new(target.sizes, **options)
    constants = {}
    if size is not None:
        if text is None:
            raise ConfigError(f"draft_vocab_size is {size}; text= says which tokens to keep")
        if isinstance(text, Iterator):
            raise ConfigError(
                f"text is a {type(text).__name__}, which counting uses up; expected a Corpus, an "
                "array, or a list or another iterable that can be read again"
            )
        limit = None if isinstance(text, Sized) else _COUNTED
        counts = count_tokens(Corpus.of_tokens("text", text, limit), target.model.vocab_size)
        constants = {"d2t": jnp.asarray(draft_vocabulary(counts, size))}
    init = initializer(kind, training.objective(), config, target, constants, is_warm_start)
    params = init(jax.random.key(seed), target.params)
    return LoadedHead(f"new {objective}", config, {**params, **constants})


def initializer(
    kind: registry.DrafterKind,
    objective: Objective,
    config: registry.HeadConfig,
    target: LoadedModel,
    constants: Mapping[str, jax.Array],
    is_warm_start: bool,
) -> Callable[[jax.Array, Any], dict]:
    """Returns ``(key, target's params) -> params``, a new head's trained parameters in float32.

    Args:
      kind: of the head.
      objective: that trains it.
      config: the head's shape.
      target: the model that it drafts for.
      constants: the head's parameters that are not trained.
      is_warm_start: copy the target's last layer, final norm and output head.
    """

    def init(key, target_params):
        params, _ = objective.split(kind.head.init_params(config, key, "float32"))
        if not is_warm_start:
            return params
        shape = target.model if target.config is None else target.config
        return from_target(params, target_params, shape, draft_ids(constants))

    return init


def fit_head(
    target: LoadedModel,
    head: LoadedHead,
    text: Corpus | Any,
    steps: int,
    *,
    batch: int = 4,
    length: int = 130,
    has_document_masks: bool = False,
    objective: str | None = None,
    loss: Mapping[str, Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    seed: int = 0,
    evaluate: Callable[[LoadedHead], Mapping[str, Any]] | None = None,
    eval_every: int = 0,
    has_progress: bool | None = None,
) -> Fitted:
    """Trains a head for a target on a text; neither head nor target is changed.

    Example:
      ```python
      import spec_jax
      from spec_jax.data.batches import Corpus

      target = spec_jax.load_model("zoo/target")
      head = spec_jax.new_head(target, "mtp")
      documents = [("add", "def add(a, b): return a + b; " * 9)]  # names and texts
      text = Corpus.of_documents("functions", target.tokenizer, documents)
      fitted = spec_jax.fit_head(target, head, text, steps=2, batch=1, length=16)
      print(fitted.log[-1]["loss"])
      ```

    Args:
      target: the model that it drafts for; its weights do not change.
      head: from ``new_head``, or a loaded one to continue from.
      text: tokens of the target's tokenizer: a corpus, see ``spec_jax.data``, an array i32[T], or
        an iterable of arrays i32[T] or i32[N,T], whose rows are documents. Of an iterator only as
        much is read as the steps use.
      steps: how many updates.
      batch: windows a step.
      length: tokens of a window, of which all but two are trained on.
      has_document_masks: a token attends only to its own document, whose positions begin at 0, as
        in decoding; by default it attends to all tokens before it in its window.
      objective: the training objective; by default the first one for heads of this kind.
      loss: options of the objective's loss, such as ``num_steps``, the number of drafts that
        are unrolled (3 by default).
      optimizer: of the updates; by default Muon with a warm-up and a decay over ``steps``.
      seed: of the order of the windows.
      evaluate: called with the current head; the figures that it returns are added to the log.
      eval_every: steps between two evaluations; the first is before the first step, the last after
        the last step.
      has_progress: show the completed steps and the time left. None: only on a terminal or in a
        notebook.

    Returns:
      The trained head and a dict for each step.

    Raises:
      ConfigError: parts that do not fit each other, or a text that is shorter than a window.
      TrainingError: a loss or a gradient is not finite.
    """
    if mesh_of(target.params) is not None:
        raise ConfigError("the target lies on a mesh: train with python -m experiments.train_head")
    check_integer("steps", steps, 1)
    check_integer("batch", batch, 1)
    tapped_model(target, head)  # refuses a head of another target
    check(3 <= length <= target.max_length, "length", length, f"3 to {target.max_length}")
    text = Corpus.of_tokens("text", text, steps * batch * length)
    if has_document_masks and text.starts is None:
        raise ConfigError(f"where the documents of {text.name} begin is not known: set its starts")
    count_tokens(text, target.model.vocab_size)  # refuses ids of another vocabulary
    objective = registry.objective_of(head.config, objective)
    batches = window_batches([text], [1.0], seed=seed, batch=batch, length=length)
    if optimizer is None:
        optimizer = make_optimizer(
            "muon",
            steps=steps,
            warmup=max(1, min(20, steps // 40)),
            decay_share=0.6,
            lr=3e-3,
            matrix_lr=0.03,
            weight_decay=0.0,
            clip=0.5,
        )
    trained, constants = objective.split(head.params)
    # Copies: a step donates what it is given.
    trained = jax.tree.map(lambda w: jnp.array(w, jnp.float32), trained)
    options = {**objective.known(LOSS), **(loss or {})}
    bound = objective.bind(head.config, target.model, options, constants)
    step = functools.partial(train_step, objective=bound, optimizer=optimizer)
    step = jax.jit(step, donate_argnums=0)
    view = jax.jit(functools.partial(target_view, model=target.model, taps=head.config.taps))
    key = jax.random.key(seed)
    state = TrainState.create(trained, optimizer)

    def batch_at(done: int) -> Batch:
        given = {name: jnp.asarray(x) for name, x in batches[done].items()}
        begins = given["begins"] if has_document_masks else None
        states = view(target.params, given["tokens"], begins)
        return Batch(given["tokens"], given["mask"], jax.random.fold_in(key, done), states, begins)

    def evaluated(state: TrainState) -> Mapping[str, Any]:
        params = {**jax.tree.map(jnp.array, state.params), **constants}
        return evaluate(dataclasses.replace(head, params=params))

    def plain(figures: Mapping[str, jax.Array]) -> dict[str, Any]:
        return {name: np.asarray(x, float).tolist() for name, x in report(figures).items()}

    is_shown = is_watched() if has_progress is None else has_progress
    with Progress(steps, "training", every_s=5.0) if is_shown else nullcontext() as bar:
        log = Lines(bar)
        log.write(0, **({} if evaluate is None else evaluated(state)))
        state, _ = train_loop(
            state,
            step_fn=lambda state, window: step(state, window, target.params),
            batch_at=batch_at,
            num_steps=steps,
            checkpoints=None,
            log=log,
            log_every=1,
            tokens_per_step=lambda window: window.tokens.size,
            summarise=plain,
            evaluate=evaluate and evaluated,
            eval_every=eval_every,
        )
    params = {**state.params, **constants}
    return Fitted(dataclasses.replace(head, name="trained head", params=params), log.lines)
