"""The experiment of ``experiments.train_head``: from a config to a head, its data and loss."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from configs import train_head_default
from experiments.run import cli
from experiments.training import text as texts
from experiments.training.choice import Evaluations, describe
from experiments.training.run import Exported
from spec_jax.config import SpeculativeConfig
from spec_jax.data.batches import Corpus, count_tokens, draft_vocabulary, window_batches
from spec_jax.drafters import registry
from spec_jax.drafters.common.vocabulary import draft_ids
from spec_jax.drafters.mtp.replace import check_replaces, replace_modules
from spec_jax.engine.build import make_drafter
from spec_jax.errors import ConfigError, TrainingError
from spec_jax.evaluation import teacher_forced
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.fitting import initializer
from spec_jax.loading import DTYPES, LoadedHead, LoadedModel, find_directory, load_draft, load_model
from spec_jax.meshes import platform_of
from spec_jax.models.params import table_placement
from spec_jax.models.tensors import on_host
from spec_jax.progress import Notice
from spec_jax.sharding import AxisRules, replicate
from spec_jax.show.summary import count_text
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.least_squares import Start
from spec_jax.train.log import Log, read_metrics
from spec_jax.train.means import merge, report
from spec_jax.train.objective import Batch, row_keys, target_view, with_view
from spec_jax.train.optimizer import make_optimizer, with_end, with_input_scales
from spec_jax.train.placement import Placement
from spec_jax.train.step import TrainState, cast, train_step
from spec_jax.train.view_cache import ViewCache

_ROWS_PER_INPUT = 16  # of the least squares that a head begins with
_ENDLESS = 1 << 30  # steps of a run whose end is not known when its step is compiled


class NewHead(NamedTuple):
    """A head to train.

    Attributes:
      name: The name of the objective.
      config: The shape of the head.
      init: ``(key, target's params, given) -> params``, the trained parameters.
      given: The parameters to continue from, on the devices that train them; None for a new head.
      constants: The parameters that are not trained: ``d2t``, or none.
      objective: ``(params, batch, (target's params, constants)) -> (loss, figures)``, the training
        loss.
      measure: The same without noise and at fixed anchors, for evaluation.
      start: How a new head begins with a map of least squares; None if it does not.
      num_params: The number of trained parameters.
    """

    name: str
    config: registry.HeadConfig
    init: Callable[[jax.Array, Any, Any], Any]
    given: Any | None
    constants: dict[str, jax.Array]
    objective: Callable[..., tuple[jax.Array, dict]]
    measure: Callable[..., tuple[jax.Array, dict]]
    start: Start | None
    num_params: int

    def shardings(self, mesh: Mesh, axis_rules: AxisRules) -> Any:
        """Returns where the trained parameters lie on a mesh, nested as they are.

        Args:
          mesh: The devices.
          axis_rules: Which dimensions are split.

        Raises:
          ConfigError: The mesh does not divide the heads of the layer.
        """
        table = registry.kind_of(self.config).head.table(self.config)
        layer = registry.layer_of(self.config)
        return table_placement(self.name, layer, table, mesh, axis_rules)

    def loaded(self, params) -> LoadedHead:
        """Returns the head as the decoder takes it."""
        return LoadedHead(self.name, self.config, {**params, **self.constants})


def _check_options(
    objective: str, section: str, given: Mapping[str, Any], known: Mapping[str, Collection[str]]
) -> None:
    """Checks that no option of a section is set which only other objectives take.

    Args:
      objective: The name of the one that trains.
      section: A section of ``configs/train_head_default.py``.
      given: The values of the section.
      known: The options of every objective by name.

    Raises:
      ConfigError: One is set.
    """
    usual = train_head_default.get_config()[section]
    for name, value in given.items():
        takers = [taker for taker, options in known.items() if name in options]
        if takers and objective not in takers and value != usual[name]:
            raise ConfigError(
                f"{section}.{name} is {value!r}; it is an option of {' and '.join(takers)}, not of "
                f"{objective}: leave it {usual[name]!r}"
            )


def _load_given(
    config: ConfigDict,
    target: LoadedModel,
    options: Mapping[str, Any],
    size: int,
    placement: Placement,
) -> LoadedHead:
    """Loads the head to continue from; each process reads what its own devices hold."""
    kind, training = registry.objectives()[config.objective]
    given = load_draft(
        config.head.init_from,
        target,
        "float32",
        method=kind.name,
        mesh=placement.mesh,
        axis_rules=placement.axis_rules,
        **{name: value for name, value in options.items() if name not in training.sizes},
    )
    if not training.trains(given.config):
        others = [name for name, way in kind.training.items() if way.trains(given.config)]
        raise ConfigError(
            f"head.init_from is {given.name}, a head of {' or '.join(others)}; the objective is "
            f"{config.objective}"
        )
    for name in training.sizes:
        if name in options and (found := getattr(given.config, name)) != options[name]:
            raise ConfigError(f"head.{name} is {options[name]}; that of {given.name} is {found}")
    found = len(given.params["d2t"]) if "d2t" in given.params else target.config.vocab_size
    if size not in (0, found):
        raise ConfigError(f"head.draft_vocab_size is {size}; {given.name} drafts {found} ids")
    return given


def make_head(
    config: ConfigDict,
    target: LoadedModel,
    texts: Sequence[Corpus],
    used: Sequence[Corpus],
    placement: Placement = Placement(),
) -> NewHead:
    """Returns the head that a config describes.

    Args:
      config: See ``configs/train_head_default.py``.
      target: The model that the head drafts for.
      texts: All texts, whose ids must be in the target's vocabulary.
      used: The texts that are trained on; a reduced vocabulary has their most frequent tokens.
      placement: Where the head to continue from is read to.

    Raises:
      ConfigError: Options that do not fit, or texts of another vocabulary.
      WeightsError: The head to continue from cannot be read.
    """
    found = [count_tokens(text, target.config.vocab_size) for text in texts]
    counts = sum(x for x, text in zip(found, texts) if any(text is one for one in used))
    kind, training = registry.objectives()[config.objective]
    objective = training.objective()
    ways = {name: way for name, (_, way) in registry.objectives().items()}
    asked = {**config.head}
    if asked["draft_vocab_size"] == target.config.vocab_size:
        asked["draft_vocab_size"] = 0
    takes = {name: way.options for name, way in ways.items()}
    _check_options(config.objective, "head", asked, takes)
    takes = {name: way.objective().options for name, way in ways.items()}
    _check_options(config.objective, "loss", config.loss, takes)
    options = {name: asked[name] for name in training.options if asked[name]}
    size = options.pop("draft_vocab_size", 0)
    given = None
    has_start = config.head.is_warm_start and not config.head.init_from
    constants = {}
    if config.head.init_from:
        head = _load_given(config, target, options, size, placement)
        shape = head.config
        given, constants = objective.split(head.params)
        constants = jax.tree.map(lambda x: jnp.asarray(on_host(x)), constants)
        old = draft_ids(constants)
        if config.head.has_new_ids:
            output = given.get("head")
            if old is None or output is None or len(output) != shape.target_hidden_size:
                raise ConfigError(
                    f"head.has_new_ids is True; {head.name} has no reduced vocabulary of the "
                    "target's width: leave it False"
                )
            scores = 2 * counts
            scores[np.asarray(old)] += 1  # of equal counts those that it drafts
            constants["d2t"] = jnp.asarray(draft_vocabulary(scores, len(old)))

        fresh = initializer(kind, objective, shape, target, constants, True)

        def init(key, target_params, given):
            params = jax.tree.map(jnp.array, given)  # copies: a training step donates
            if config.head.has_new_ids:
                ids = draft_ids(constants)
                places = jnp.minimum(jnp.searchsorted(old, ids), len(old) - 1)
                new = fresh(key, target_params)["head"]
                params["head"] = jnp.where(old[places] == ids, params["head"][:, places], new)
            return params
    else:
        reduced = {"draft_vocab_size": size} if size else {}
        shape = training.new(target.config, **reduced, **options)
        if reduced:
            constants = {"d2t": jnp.asarray(draft_vocabulary(counts, size))}
        fresh = initializer(kind, objective, shape, target, constants, config.head.is_warm_start)

        def init(key, target_params, given):
            return fresh(key, target_params)

    loss = {"is_remat": platform_of(placement.mesh) != "cpu"}
    loss |= {name: value for name, value in config.loss.items() if value is not None}

    def bind(options):
        known = objective.known(options)

        # The constants are arguments: a program does not depend on which ids are drafted.
        def loss(params, batch, frozen, counts=None):
            target_params, constants = frozen
            bound = objective.bind(shape, target.model, known, constants)
            return with_view(bound, target.model, shape.taps)(params, batch, target_params, counts)

        return loss

    sizes = jax.eval_shape(init, jax.random.key(0), target.params, given)
    num_params = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(sizes))
    spec = NewHead(
        config.objective,
        shape,
        init,
        given,
        constants,
        bind(loss),
        bind({**loss, "noise": 0.0, "has_every_anchor": True}),
        objective.start(shape) if objective.start and has_start else None,
        num_params,
    )
    # What could not be exported is refused before it is trained.
    kind.format.pick(shape, target, config.export_format or None, config.eval.num_draft)
    if config.export_with_target:
        source = find_directory(config.target)
        check_replaces(source, LoadedHead(config.target, shape, {}), target.config)
    return spec


def validate(config: ConfigDict) -> None:
    """Fills in ``data.text``; raises ConfigError if a key or a value cannot be trained with."""
    cli.check_keys(config, train_head_default.get_config())
    config.data.text = texts.sources(config)

    def check(ok, name, expected):
        return cli.require(ok, config, name, expected)

    cli.require_positive(config, "steps batch log_every")
    cli.require_positive(config, "accumulate", "optimizer")
    cli.require_positive(config, "num_draft prompt_tokens max_new_tokens batch windows", "eval")
    texts.validate(config)
    has_prompts = bool(config.data.responses) or not config.data.has_prompt_loss
    check(has_prompts, "data.has_prompt_loss", "False, unless there are data.responses")
    is_begun = bool(config.head.init_from) or not config.head.has_new_ids
    check(is_begun, "head.has_new_ids", "False, without head.init_from")
    check(config.minutes is None or config.minutes > 0, "minutes", "a number above 0, or none")
    check(config.eval.num_prompts >= 0, "eval.num_prompts", "0 (no evaluation) or more")
    check(config.eval.every >= 0, "eval.every", "0 (only at the end) or more")
    check(config.length >= 3, "length", "at least 3, a pair and what follows it")
    is_fit = 1 <= config.loss.num_steps <= config.length - 2
    check(is_fit, "loss.num_steps", f"1 to {config.length - 2}")
    known = registry.objectives()
    check(config.objective in known, "objective", f"one of {', '.join(known)}")
    _, training = known[config.objective]
    formats = training.formats
    is_mtp = config.objective == "mtp"
    is_known = config.export_format in ("", *formats)
    check(is_known, "export_format", f"one of {', '.join(formats)}, or ''")
    check(config.export_dtype in DTYPES, "export_dtype", f"one of {', '.join(DTYPES)}")
    check(is_mtp or not config.export_with_target, "export_with_target", "False, unless for mtp")
    check(config.export_from in ("best", "last"), "export_from", "best or last")
    dtypes = ("", "float32", "bfloat16")
    check(config.dtype in dtypes, "dtype", "float32, bfloat16, or '' for the device's own")


def even_loss(config: ConfigDict, shape: registry.HeadConfig) -> str:
    """Returns what the loss of EAGLE-3 is where a head finds all tokens equally likely; else "".

    Args:
      config: See ``configs/train_head_default.py``.
      shape: The head's.
    """
    loss = config.loss
    if config.objective != "eagle3" or loss.divergence != "cross-entropy":
        return ""
    weights = [loss.decay**step for step in range(loss.num_steps)]
    U = shape.layer.vocab_size
    text = ", ".join(f"{weight:.3g}" for weight in weights)
    is_warm = config.head.is_warm_start and not config.head.init_from
    more = "; a warm start begins below it" * is_warm
    return (
        f"; loss: the sum of {loss.num_steps} steps weighted {text}, "
        f"{sum(weights) * math.log(U):.1f} if all {U} tokens are equally likely{more}"
    )


class HeadExperiment:
    """Target, data, head, and the functions that the training loop calls.

    Args:
      config: See ``configs/train_head_default.py``.
      workdir: The run's folder, for packed documents.

    Raises:
      ConfigError: A value that does not fit the target or the data.
    """

    title = "A head"

    def __init__(self, config: ConfigDict, workdir: pathlib.Path):
        self.config = config
        self.placement = Placement.of(config.mesh, config.is_fully_sharded)
        self.placement.check_batch("batch", config.batch)
        mesh = self.placement.mesh
        axis_rules = self.placement.axis_rules
        self.dtype = config.dtype or ("float32" if platform_of(mesh) == "cpu" else "bfloat16")
        self.target: LoadedModel = load_model(
            config.target,
            self.dtype,
            scan_layers=config.scan_layers,
            attention=config.attention,
            mesh=mesh,
            axis_rules=axis_rules,
        )
        if config.length > self.target.max_length:
            raise ConfigError(
                f"length is {config.length}; the target holds {self.target.max_length} tokens"
            )
        tokenizer = cli.tokenizer_of(self.target)
        folder = workdir / "data"
        data = config.data
        enough = config.eval.windows * config.length
        text, self.held_out = texts.load(data, tokenizer, folder, config.eval.prompts, enough)
        self.texts = [text]
        if data.text and data.responses:
            self.texts.append(texts.load_responses(pathlib.Path(data.responses), tokenizer))
        if data.has_prompt_loss:
            self.texts[-1] = texts.with_prompts(self.texts[-1])
        texts.check_held_out(self.held_out, config.length, config.data)
        self._eval_windows = self.held_out.num_windows(config.length)
        shares = [data.text_share] * bool(data.text) + [data.responses_share] * bool(data.responses)
        windows = config.batch * config.optimizer.accumulate
        self._batches = window_batches(
            self.texts, shares, seed=config.seed, batch=windows, length=config.length
        )
        used = [text for text, share in zip(self.texts, shares) if share > 0]
        if config.data.has_document_masks:
            check_begins = functools.partial(target_view, model=self.target.model, taps=())
            window = jax.ShapeDtypeStruct((1, config.length), np.int32)
            jax.eval_shape(check_begins, self.target.params, window, window)
        self.spec = make_head(config, self.target, self.texts, used, self.placement)
        options = {name: x for name, x in config.optimizer.items() if name != "accumulate"}
        self.optimizer = make_optimizer(
            **options, steps=_ENDLESS if config.minutes else config.steps
        )
        if self.spec.start:
            self.optimizer = with_input_scales(self.optimizer, self.spec.start.names)
        if config.minutes:
            self.optimizer = with_end(self.optimizer, config.optimizer.decay_share)
        self.frozen = self.target.params
        self._key = jax.random.key(config.seed)
        taps = self.spec.config.taps
        view = functools.partial(target_view, model=self.target.model, taps=taps)
        self._view = self.placement.jit(view)
        self._views = None
        if config.data.view_cache:
            max_bytes = int(config.data.view_cache_gb * 1e9)
            of = self.frozen, self.target.config, taps, self.placement
            self._views = ViewCache(config.data.view_cache, max_bytes, *of)
        step = functools.partial(
            train_step,
            objective=self.spec.objective,
            optimizer=self.optimizer,
            dtype=None if self.dtype == "float32" else self.dtype,
            accumulate=config.optimizer.accumulate,
        )
        self._make = lambda *args: TrainState.create(self.spec.init(*args), self.optimizer)
        self._where = mesh and self.placement.state_shardings(
            self.spec.shardings(mesh, axis_rules),
            self._make,
            self._key,
            self.frozen,
            self.spec.given,
        )
        self._step = self.placement.jit_step(step, self._where)
        self._objective = self.placement.jit(lambda *args: replicate(self.spec.measure(*args)))
        head = self.spec.loaded({})
        options = config.eval
        self._prompts = []
        if options.num_prompts:
            self._prompts = texts.prompts(
                self.held_out,
                config.data,
                self.target,
                path=options.prompts,
                num_prompts=options.num_prompts,
                prompt_tokens=options.prompt_tokens,
                max_new_tokens=options.max_new_tokens,
            )
        setting = [self._prompts, options.num_draft, options.max_new_tokens]
        self.evaluations = Evaluations(workdir, setting)
        drafts = SpeculativeConfig(head.method, config.eval.num_draft)
        make_drafter(drafts, self.target.model, head)  # refuses more drafts than there can be
        self.trained = self.texts
        self.windows = [(text, config.length) for text in (*self.texts, self.held_out)]
        count = len(self._prompts)
        asked = options.num_prompts
        few = f" of {asked}: the held-out text has no more places" if count < asked else ""
        num_tokens = sum(len(text.tokens) for text in self.texts)
        self.summary = (
            f"{self.spec.num_params / 1e6:.2f}M parameters, {count_text(num_tokens)} training "
            f"tokens, tau on {count} prompts{few}{even_loss(config, self.spec.config)}"
        )
        self.loop = {
            "tokens_per_step": lambda batch: batch.tokens.size,
            "eval_every": options.every,
            "evaluate": self.evaluate if options.num_prompts else None,
            "best_by": "tau",
            "describe_batch": self._describe,
        }

    def init_state(self) -> TrainState:
        """Returns new parameters, the same for the same seed."""
        key = jax.random.fold_in(self._key, 1 << 30)
        return self.placement.create(self._make, self._where, key, self.frozen, self.spec.given)

    def begin(self, state: TrainState) -> TrainState:
        """Returns the state before the first step; its head is fitted to the run's first batches.

        These are the same after a kill, at most a quarter of the run's, and their target's states
        are kept if there is a cache.

        Raises:
          TrainingError: The target's states are not finite.
        """
        start = self.spec.start
        if start is None:
            return state
        shape = self.spec.config
        of = {"config": shape, "model": self.target.model}
        add = self.placement.jit(lambda *args: replicate(start.sums(*args, **of)))
        sums = None
        with Notice("fitting the first weights to the first batches", is_line=True):
            for step in range(max(1, self.config.steps // 4)):
                windows = self._batches[step]
                if self._views is None:  # of a step in parts the first one
                    windows = {name: x[: self.config.batch] for name, x in windows.items()}
                found = add(state.params, self._batch(windows, step), self.frozen)
                sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
                if sums.count >= _ROWS_PER_INPUT * len(sums.sizes):
                    break
        if not sums.count:  # no document has three tokens
            return state
        if not all(np.isfinite(x).all() for x in jax.device_get(jax.tree.leaves(sums))):
            raise TrainingError("the target's states of the first batches are not finite")

        def fitted(state, sums):
            params = start.weights(state.params, sums, config=shape)
            scales = start.scales(sums, config=shape)
            opt_state = optax.tree.set(state.opt_state, input_scales=scales)
            return state.replace(params=params, opt_state=opt_state)

        where = {} if self._where is None else {"out_shardings": self._where}
        return self.placement.jit(fitted, donate_argnums=0, **where)(state, sums)

    def batch_at(self, step: int) -> Batch:
        """Returns the batch of a step, a function of the seed and the step."""
        has_parts = self.config.optimizer.accumulate > 1  # whose views are computed with them
        return self._batch(self._batches[step], step, has_view=not has_parts)

    def _batch(self, windows: Mapping[str, np.ndarray], step: int, has_view: bool = True) -> Batch:
        place = self.placement.place
        tokens = windows["tokens"]
        keys = row_keys(jax.random.fold_in(self._key, step), len(tokens))
        begins = windows["begins"] if self.config.data.has_document_masks else None
        view = None

        def compute(*windows):
            return self._view(self.frozen, *place(windows))

        if self._views is not None:
            view = self._views.view(compute, tokens, begins)
        elif has_view:
            view = compute(tokens, begins)
        return place(Batch(tokens, windows["mask"], keys, view, begins))

    def _describe(self, step: int) -> str:
        """Returns a text that names the windows of a step."""
        found = [f"{self.texts[t].name}, {i}" for t, i in self._batches[step]["window"].tolist()]
        return f"windows of {self.config.length} tokens: {'; '.join(found)}"

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        """Trains one step."""
        return self._step(state, batch, (self.frozen, self.spec.constants))

    def evaluate(self, state: TrainState) -> dict:
        """Returns teacher-forced figures on held-out windows, and tau by real decoding."""
        options = self.config.eval
        params = cast(state.params, self.dtype)
        found: list[dict[str, Any]] = []
        count = min(options.windows, self._eval_windows)
        size = min(self.config.batch, count)
        for begin in range(0, count, size):
            number = np.arange(begin, begin + size)
            rows = [self.held_out.window(min(i, count - 1), self.config.length) for i in number]
            windows = {n: np.stack([row[n] for row in rows]) for n in rows[0]}
            windows["mask"] &= (number < count)[:, None]  # of the last batch some may be padding
            batch = self._batch(windows, 0)
            frozen = self.frozen, self.spec.constants
            loss, figures = self._objective(params, batch, frozen)
            found.append(jax.device_get({"loss": loss, **figures}))
        figures = report(merge(*found))
        rows, stats = teacher_forced.decode(
            self.target,
            self.spec.loaded(params),
            self._prompts,
            num_draft=options.num_draft,
            max_new_tokens=options.max_new_tokens,
            batch=options.batch,
            devices=MeshOptions(self.placement.mesh),
        )
        self.evaluations.append(int(state.step), [row.stats for row in rows])
        held_out = {f"held_out_{name}": value for name, value in figures.items()}
        return held_out | teacher_forced.acceptance_figures(stats)

    def export(
        self, folder: pathlib.Path, state: TrainState, saved: Checkpoints, log: Log
    ) -> Exported:
        """Exports the state with the highest tau, or the last one if the config says so."""
        step, tau = saved.best or (0, math.nan)
        is_last = self.config.export_from == "last" or not saved.best
        if not is_last:
            try:
                state = saved.restore_best(state)
            except TrainingError as error:
                log.say(f"{error}; the last state is exported instead")
                is_last = True
        metrics = read_metrics(folder / "metrics.jsonl")
        if is_last:
            step = int(state.step)
            taus = [row["tau"] for row in metrics if "tau" in row and row["step"] == step]
            tau = taus[-1] if taus else float("nan")
        from experiments.run import plots  # needs matplotlib, slow to import

        plots.plot_training(folder / "training.png", metrics)
        config = self.config
        head = self.spec.loaded(state.params)
        head.save(
            folder / "export",
            self.target,
            format=config.export_format or None,
            dtype=config.export_dtype,
            num_speculative_tokens=config.eval.num_draft,
        )
        if config.export_with_target:
            source = find_directory(config.target)
            replace_modules(folder / "model", head, source, self.target.config)
        choice = self.evaluations.choice(step)
        summary = f"tau {tau:.2f} at step {step}" if choice is None else describe(choice)
        summary = summary if self._prompts else f"step {step}, not evaluated"
        figures = {"tau": tau, "step": step}
        return Exported(figures, summary, ("training.png",), {"choice": choice})
