"""A model, or a head that drafts for one, by name or path, ready to decode."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from spec_jax import zoo
from spec_jax.contracts import Drafter, Model
from spec_jax.drafters.common.head import Head
from spec_jax.drafters.eagle.model import (
    EagleConfig,
    check_head,
    eagle,
    eagle_head,
    init_head,
)
from spec_jax.drafters.eagle.read import read_head
from spec_jax.drafters.mtp.model import MtpConfig, check_mtp, init_mtp, mtp, mtp_head
from spec_jax.drafters.mtp.read import read_mtp
from spec_jax.drafters.standalone import model as standalone
from spec_jax.errors import ConfigError, ModelNotLoaded, WeightsError
from spec_jax.models import checkpoint, layout, transformer
from spec_jax.models.families import AnyConfig, family_of
from spec_jax.models.params import Params, num_params
from spec_jax.models.tensors import draft_kind
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.tree import DynamicTree, Tree

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model's functions, its weights and its tokenizer.

    ``tokenizer`` may be None: prompts are then ids. ``config`` is None for a model of
    your own (see ``spec_jax.testing`` for small ones).
    """

    name: str
    model: Model
    params: Params
    tokenizer: Tokenizer | None = None
    config: AnyConfig | None = None
    stop_tokens: tuple[int, ...] = ()

    @property
    def max_length(self) -> int:
        """The most tokens a row may hold."""
        return self.model.max_length

    def decoding_params(self, num_rows: int | None = None) -> Params:
        """The weights laid out for passes over ``num_rows`` tokens in total; None: any number.

        They are ``params`` itself except on a CPU, see ``models/layout.py``.
        """
        return self._by_rows(num_rows)

    @functools.cached_property
    def _by_rows(self) -> Callable[[int | None], Params]:
        if self.config is None:
            return lambda num_rows: self.params
        is_tied = self.config.tie_word_embeddings
        has_panels = family_of(self.config).has_panels
        return layout.by_rows(self.params, is_tied=is_tied, has_panels=has_panels)

    def draft_params(
        self, target: Params, batch: int | None, num_draft: int,
        tree: Tree | DynamicTree | None = None,
    ) -> Params:
        """The parameters of the drafter that this model makes.

        Args:
          target: the target's parameters, for drafters that share some of them.
          batch: rows that are decoded together, for the layout that suits them; None: any.
          num_draft: K.
          tree: what is drafted; None: a chain.
        """  # fmt: skip
        del target, num_draft, tree
        return self.decoding_params(None if batch is None else batch * standalone.FIRST_TOKENS)

    @property
    def num_params(self) -> int | None:
        return None if self.config is None else num_params(self.config)


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """A head or MTP modules, and their weights.

    Attributes:
      name: where it was loaded from.
      config: its shape and meaning, its ``taps`` among them.
      params: what ``draft.eagle`` or ``draft.mtp`` takes as ``params["head"]``.
      notes: sentences on how an ambiguous checkpoint was read.
    """

    name: str
    config: EagleConfig | MtpConfig
    params: Params
    notes: tuple[str, ...] = ()

    def check_params(self) -> None:
        """Checks that the weights are those of the config.

        Raises:
          WeightsError: a weight that is missing or of another shape; it is named.
        """
        check = check_head if isinstance(self.config, EagleConfig) else check_mtp
        check(self.config, self.params, f"head {self.name}: ")

    @property
    def method(self) -> str:
        """The ``speculative_method`` that drafts with it."""
        return "eagle" if isinstance(self.config, EagleConfig) else "mtp"

    @property
    def max_length(self) -> int:
        """The most tokens a row may hold."""
        return self.config.layer.max_position_embeddings

    def decoding_params(self, num_rows: int | None = None) -> Params:
        """The weights laid out for passes over ``num_rows`` pairs, see ``LoadedModel``."""
        return self._by_rows(num_rows)

    @functools.cached_property
    def _by_rows(self) -> Callable[[int | None], Params]:
        return layout.by_rows(self.params, has_panels=family_of(self.config.layer).has_panels)

    def draft_params(
        self, target: Params, batch: int | None, num_draft: int,
        tree: Tree | DynamicTree | None = None,
    ) -> Params:  # fmt: skip
        """The parameters of the drafter that this head makes, see ``LoadedModel``."""
        width = 1 + (num_draft if tree is None else max(tree.depth, tree.widest))
        head = self.decoding_params(None if batch is None else batch * width)
        return {"head": head, "target": target}

    @property
    def num_params(self) -> int:
        """Of its own; what it shares with the target is left out."""
        return sum(w.size for w in jax.tree.leaves(self.params))

    def head(self, target: Model) -> Head | None:
        """Its functions for a target with its taps; None of modules that draft one step each."""
        if isinstance(self.config, EagleConfig):
            return eagle_head(self.config, target)
        return mtp_head(self.config, target) if self.config.protocol == "recycled" else None

    def drafter(self, target: Model, tree: Tree | DynamicTree | None = None) -> Drafter:
        """The ``Drafter`` for a target with this head's taps."""
        make = eagle if isinstance(self.config, EagleConfig) else mtp
        return make(self.config, target, tree)


def check_loaded(role: str, model, kind: type) -> None:
    """Checks that what is to be a target or a draft is loaded.

    Raises:
      ModelNotLoaded: it is of another kind (a path, a config), or has no weights.
    """
    if not isinstance(model, kind):
        expected = getattr(kind, "__name__", "LoadedModel or LoadedHead")
        raise ModelNotLoaded(
            f"{role} is {model!r:.200}; expected a {expected}: load_model makes one of a path"
        )
    if model.params is None:
        raise ModelNotLoaded(f"{role} {model.name} has no weights: its params are None")


def load_model(
    name_or_path: str | pathlib.Path, dtype="float32", *, scan_layers: bool = False
) -> LoadedModel:
    """Loads a zoo model ("zoo/target", "zoo/draft") or a Hugging Face directory.

    Args:
      name_or_path: a zoo name, or a directory of a Llama, Qwen2, Qwen3, MiMo, Mamba-2 or Bamba
        model.
      dtype: of the weights in memory; the cache follows.
      scan_layers: stack the layers: compiles faster for an accelerator, runs slower on a CPU.

    Raises:
      WeightsError: no such model, or its files are not sound.
      ConfigError: a dtype that weights cannot have.
    """
    directory = _directory(name_or_path)
    dtype = _check_dtype(dtype)
    params, config = checkpoint.load_pretrained(directory, dtype, scan_layers=scan_layers)
    has_tokenizer = (directory / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_directory(directory) if has_tokenizer else None
    num_tokens = tokenizer and min(tokenizer.num_ids, config.vocab_size)
    return LoadedModel(
        name=str(name_or_path),
        model=transformer.model(config, num_tokens=num_tokens),
        params=params,
        tokenizer=tokenizer,
        config=config,
        stop_tokens=config.eos_token_id,
    )


def load_draft(
    name_or_path: str | pathlib.Path, target: LoadedModel, dtype=None
) -> LoadedModel | LoadedHead:
    """Loads whatever drafts for a target: a model, an EAGLE head, or MTP modules on their own.

    They are told apart by their tensors. A directory that holds a whole model and its modules
    is read as the model; ``load_mtp`` reads the modules.

    Args:
      name_or_path: a zoo name or a directory.
      target: the model that it drafts for.
      dtype: of the weights in memory; by default the target's.

    Raises:
      WeightsError: no such directory, or its files are not sound.
      ConfigError: it is for another target or of an unknown kind; a target without a config; a
        dtype that weights cannot have.
    """
    _check_has_config(target)
    kind = draft_kind(_directory(name_or_path))
    dtype = target.params["embed"].dtype if dtype is None else dtype
    if kind == "standalone":
        return load_model(name_or_path, dtype)
    return (load_head if kind == "eagle" else load_mtp)(name_or_path, target, dtype)


def load_head(
    path: str | pathlib.Path, target: LoadedModel, dtype=None, **overrides
) -> LoadedHead:
    """Loads an EAGLE head in the layout of EAGLE, SpecForge or vllm-project/speculators.

    Args:
      path: a zoo name, or a directory with the head's config.json and weights.
      target: the model that it drafts for.
      dtype: of the weights in memory; by default the target's.
      **overrides: what the checkpoint leaves open or says wrongly, such as
        ``taps=(2, 16, 29)`` or ``norm_output=True``; see ``EagleConfig``. What was decided
        without them is in the result's ``notes``.

    Raises:
      WeightsError: no such directory, or its files are not sound.
      ConfigError: the head is for another target or of an unknown kind; a target without a
        config; a dtype that weights cannot have.
    """
    _check_has_config(target)
    embed = target.params["embed"]
    dtype = _check_dtype(embed.dtype if dtype is None else dtype)
    head = read_head(_directory(path), target.config, dtype, target_embed=embed, **overrides)
    return LoadedHead(str(path), head.config, head.params, head.notes)


def load_mtp(
    path: str | pathlib.Path, target: LoadedModel, dtype=None, **overrides
) -> LoadedHead:
    """Loads the MTP modules of a DeepSeek-V3, Qwen3-Next or MiMo directory.

    Of these families ``load_model`` loads MiMo; the layers of the other two are known as modules
    alone, for targets of your own.

    Args:
      path: a zoo name, or the directory of the model or of its modules alone.
      target: the model that they draft for.
      dtype: of the weights in memory; by default the target's.
      **overrides: what the checkpoint leaves open, such as ``protocol="sequential"``; see
        ``MtpConfig``. What was decided without them is in the result's ``notes``.

    Raises:
      WeightsError: no such directory, or its files are not sound.
      ConfigError: the modules are for another target; a target without a config; a dtype that
        weights cannot have.
    """
    _check_has_config(target)
    dtype = _check_dtype(target.params["embed"].dtype if dtype is None else dtype)
    modules = read_mtp(_directory(path), target.config, dtype, **overrides)
    return LoadedHead(str(path), modules.config, modules.params, modules.notes)


def random_head(config: EagleConfig | MtpConfig, key: jax.Array, dtype="float32") -> LoadedHead:
    """A head, or MTP modules, with random weights: as exact as any other, and of no use.

    Args:
      config: the shape, such as ``EagleConfig.of_target(target.config)``.
      key: one PRNG key, consumed.
      dtype: of the weights.

    Raises:
      ConfigError: a dtype that weights cannot have.
    """
    init = init_head if isinstance(config, EagleConfig) else init_mtp
    kind = f"EAGLE-{config.version} head" if init is init_head else "MTP module"
    return LoadedHead(f"random {kind}", config, init(config, key, _check_dtype(dtype)))


def _directory(name_or_path: str | pathlib.Path) -> pathlib.Path:
    """Of a zoo name, or the path itself.

    Raises:
      WeightsError: it is neither a directory nor a zoo name.
    """
    directory = zoo.path(str(name_or_path)) or pathlib.Path(name_or_path)
    if not directory.is_dir():
        raise WeightsError(
            f"{name_or_path} is neither a directory nor a zoo name; "
            f"the zoo has {', '.join(zoo.NAMES)}"
        )
    return directory


def _check_has_config(target: LoadedModel) -> None:
    if not isinstance(target, LoadedModel):
        raise ConfigError(f"target is {target!r}; expected a LoadedModel, which load_model makes")
    if target.config is None:
        raise ConfigError(
            f"target {target.name} has no config, and so nothing to check a head against; "
            "load_model gives one"
        )


def _check_dtype(dtype) -> jnp.dtype:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; expected one of {', '.join(DTYPES)}")
    return jnp.dtype(name)
