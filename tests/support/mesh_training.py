"""Training runs of every objective in seconds, on a mesh or without one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import registry
from spec_jax.drafters.standalone import objective
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.models.params import head_counts, param_shardings
from spec_jax.sharding import shardings
from spec_jax.train.objective import Batch, row_keys, target_view
from spec_jax.train.optimizer import make_optimizer
from spec_jax.train.placement import Placement
from spec_jax.train.step import TrainState, train_step

# Four key-value heads: on a tensor axis of eight each lies on two devices.
_MODEL = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
_MODEL |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=4, tie_word_embeddings=True)
MODEL = ModelConfig(**_MODEL)
_DRAFT = dict(vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
_DRAFT |= dict(num_attention_heads=8, num_key_value_heads=8, head_dim=2)
DRAFT = ModelConfig(**_DRAFT)
FEW = {"num_anchors": 4}
_HEADS = {  # objective, sizes of a new head, options
    "eagle1": ("eagle1", {}, {}),
    "eagle3": ("eagle3", dict(draft_vocab_size=64), {"num_steps": 3}),
    "peagle": ("peagle", dict(num_layers=2, max_draft=4), FEW),
    "mtp": ("mtp", {}, {"num_steps": 3, "labels": "target"}),
    "dflash": ("dflash", {}, FEW),
    "dspark": ("dspark", dict(markov_rank=8), FEW),
    "treeflash": ("treeflash", {}, FEW),
    "dflash2": ("dflash2", dict(selector_rank=8), FEW),
    "sequential": ("mtp", dict(num_modules=2, protocol="sequential"), {}),
}
WAYS = {name: way for name, (_, way) in registry.objectives().items()}
HEADS = {
    name: (WAYS[way].objective(), WAYS[way].new(MODEL, **sizes), options)
    for name, (way, sizes, options) in _HEADS.items()
}
OBJECTIVES = ("lm", "scanned", "distill", *HEADS)
MESHES = {  # and whether it is fully sharded
    "data": ("data:8,tensor:1", False),
    "tensor": ("data:1,tensor:8", False),
    "both": ("data:2,tensor:4", False),
    "full": ("data:8,tensor:1", True),
    "full and tensor": ("data:2,tensor:4", True),
    "full and tensor:2": ("data:4,tensor:2", True),
}
STEPS = 20


def adamw(**changes):
    usual = dict(
        steps=STEPS, warmup=3, decay_share=0.5, lr=1e-2, matrix_lr=0.02, weight_decay=0.1, clip=1.0
    )
    return make_optimizer(changes.pop("name", "adamw"), **usual | changes)


def windows(step, rows=8, length=19):
    """The windows of a step, in which some tokens follow from those before them."""
    draw = np.random.default_rng(step).integers(0, 96, (rows, length)).astype(np.int32)
    draw[:, 1::2] = (3 * draw[:, ::2][:, : length // 2] + 1) % 96
    return draw


class Run:
    """One training run: ``state`` before the first step, and ``step``.

    Args:
      name: One of ``OBJECTIVES``.
      mesh: As text, or None.
      is_fully_sharded: See ``Placement``.
      **optimizer: What differs from ``adamw``, or ``accumulate`` of ``train_step``.
    """

    def __init__(self, name, mesh=None, is_fully_sharded=False, /, **optimizer):
        self.placement = Placement.of(mesh, is_fully_sharded)
        parts = optimizer.pop("accumulate", 1)
        self.optimizer = adamw(**optimizer)
        self.frozen, self._view = None, None
        self.config, self.constants = MODEL, {}
        where = None
        if name in HEADS:
            loss, init = self._head(name)
            counts, table = head_counts(self.config.layer), registry.kind_of(self.config).head.table
            if mesh:
                on = (self.placement.mesh, self.placement.axis_rules)
                where = shardings(table(self.config), *on, counts)
        else:
            loss, init = self._model(name)
            if mesh:
                where = param_shardings(self.config, self.placement.mesh, self.placement.axis_rules)
        self.loss, self.init = loss, init
        self.make = lambda: TrainState.create(init(), self.optimizer)
        self.where = self.placement.state_shardings(where, self.make)
        self.state = self.placement.create(self.make, self.where)
        step = functools.partial(
            train_step, objective=loss, optimizer=self.optimizer, accumulate=parts
        )
        self.step = self.placement.jit_step(step, self.where)

    def _freeze(self, config, seed):
        self.frozen = transformer.init_params(config, jax.random.key(seed))
        if self.placement.mesh is not None:
            where = param_shardings(config, self.placement.mesh, self.placement.axis_rules)
            self.frozen = jax.device_put(self.frozen, where)

    def _model(self, name):
        if name == "distill":
            self._freeze(MODEL, 1)
            self.config, teacher = DRAFT, dict(teacher_config=MODEL, ce_weight=0.1)
            loss = functools.partial(objective.distill_loss, config=DRAFT, **teacher)
        else:
            if name == "scanned":
                self.config = MODEL.__class__(**{**MODEL.__dict__, "scan_layers": True})
            loss = functools.partial(objective.lm_loss, config=self.config)
        return loss, lambda: transformer.init_params(self.config, jax.random.key(0))

    def _head(self, name):
        self._freeze(MODEL, 1)
        kind, self.config, options = HEADS[name]
        if name == "eagle3":
            self.constants = {"d2t": jnp.arange(64, dtype=jnp.int32) // 4}
        model = transformer.model(MODEL)
        view = functools.partial(target_view, model=model, taps=self.config.taps)
        self._view = self.placement.jit(view)
        fresh = functools.partial(registry.kind_of(self.config).head.init_params, self.config)
        init = lambda: kind.split(fresh(jax.random.key(2), "float32"))[0]
        return kind.bind(self.config, model, options, self.constants), init

    def batch(self, step, rows=8):
        """What the objective reads at a step."""
        tokens = self.placement.place(windows(step, rows))
        if self._view is None:
            return tokens
        mask = np.arange(tokens.shape[1]) >= 4 + np.arange(rows)[:, None]  # of unequal lengths
        view = self._view(self.frozen, tokens)
        keys = row_keys(jax.random.key(step), rows)
        return self.placement.place(Batch(tokens, mask, keys, view))

    def train(self, begin=0, end=STEPS):
        """Trains from step to step, and returns the losses."""
        found = []
        for i in range(begin, end):
            self.state, figures = self.step(self.state, self.batch(i), self.frozen)
            found.append(figures["loss"])
        return np.asarray(found)


@functools.cache
def losses(name, /, **optimizer):
    """The losses of a run without a mesh."""
    return Run(name, **optimizer).train()
