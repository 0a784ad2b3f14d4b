"""What a checkpoint is, according to its small files and the headers of its weights."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from spec_jax.drafters import registry
from spec_jax.drafters.mtp.kind import holds_modules
from spec_jax.errors import SpecJaxError
from spec_jax.loading import find_directory
from spec_jax.models import gguf
from spec_jax.models.checks import is_integer, shown
from spec_jax.models.families import AnyConfig, family_of, read_config
from spec_jax.models.files import exists, foreign_files, read_json
from spec_jax.models.float8 import SCALE
from spec_jax.models.params import declared, num_params
from spec_jax.models.parts import Tensor
from spec_jax.models.shards import INDEX, SINGLE
from spec_jax.models.specs import tensor_names
from spec_jax.models.tensors import check_layers, open_tensors, renamed, unfused, unread_index
from spec_jax.models.tokenizer import Tokenizer

_SHAPE = {  # keys of a config.json that say what a model is, and what they are called here
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "query heads",
    "num_heads": "heads",
    "num_key_value_heads": "key-value heads",
    "num_nextn_predict_layers": "MTP modules",
    "mtp_num_hidden_layers": "MTP modules",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "experts a token",
    "draft_vocab_size": "draft vocabulary",
    "target_hidden_size": "target's width",
    "block_size": "tokens of a block",
    "max_position_embeddings": "maximum length",
}


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint's directory; ``str`` of it is a table.

    Attributes:
      name: the given name.
      directory: the directory of the files.
      kind: "model", a head's ``speculative_method``, "weights", "tokenizer" or "no checkpoint".
      num_params: counted from the headers of the weights; None without weights.
      dtypes: tensors by dtype.
      num_bytes: of all files.
      facts: other properties, by name.
      notes: sentences on what a user should know.
      refused: why ``load_model`` refuses it; None if it does not, or if it is not a model.
    """

    name: str
    directory: pathlib.Path
    kind: str
    num_params: int | None
    dtypes: Mapping[str, int]
    num_bytes: int
    facts: Mapping[str, Any]
    notes: tuple[str, ...]
    refused: str | None = None

    def __str__(self) -> str:
        known: dict[str, Any] = {"kind": self.kind, **self.facts}
        if self.num_params is not None:
            known["parameters"] = f"{self.num_params:,}"
            known["tensors"] = ", ".join(f"{n} {dtype}" for dtype, n in self.dtypes.items())
        known["bytes"] = f"{self.num_bytes:,} in {self.directory}"
        width = max(map(len, known))
        lines = [f"{name:{width}}  {value}" for name, value in known.items()]
        first = [] if self.refused is None else [f"load_model refuses it: {self.refused}"]
        return "\n".join([self.name, *first, *lines, *(f"note: {note}" for note in self.notes)])


def inspect(name_or_path: str | pathlib.Path) -> Inspection:
    """Describes a checkpoint's directory without reading its weights.

    Args:
      name_or_path: a zoo name, a directory, a GGUF file or an id of the hub, see ``load_model``.

    Raises:
      WeightsError: there is no such directory, or a file in it is damaged.
    """
    directory = find_directory(name_or_path)
    tensors, dtypes, notes = _headers(directory)
    is_gguf = gguf.is_gguf(directory)
    hf = {}
    config = refused = None
    if is_gguf:
        hf, refused = _attempt(read_json, directory / "config.json")
    elif exists(directory / "config.json"):
        hf = read_json(directory / "config.json")
    kind = "weights" if tensors else "no checkpoint"
    if hf and tensors:
        found, error = _attempt(registry.detect, directory)
        if error is not None:
            notes.append(error)
        elif found.head is not None:
            kind = found.name
            notes.append("load_draft(…, target) reads it, for a target of its width and vocabulary")
        else:
            kind = "model"
            config, refused = _attempt(_config, directory, len(tensors))
    elif hf:
        _, refused = _attempt(_config, directory, 0)
        notes.append(f"config.json says model_type {hf.get('model_type')!r}; no weights to read")
    facts = _shape(hf or {}, config)
    if is_gguf:
        facts["source"] = gguf.source_text(gguf.read_header(directory))
    if exists(directory / "tokenizer.json"):
        tokenizer, error = _attempt(Tokenizer.from_directory, directory)
        notes += [] if error is None else [error]
        if tokenizer is not None:
            kind = "tokenizer" if kind == "no checkpoint" else kind
            facts |= _tokens(tokenizer, config)
    if config is not None:
        facts["tied embeddings"] = "yes" if config.tie_word_embeddings else "no"
        if holds_modules(hf, tensors.keys()):
            notes.append("it holds MTP modules; load_mtp(…, target) reads them")
        notes += _compare(config, tensors)
    counted = sum(
        math.prod(x.shape)
        for name, x in tensors.items()
        if not dtypes[name].startswith(("int", "uint", "bool")) and not name.endswith(SCALE)
    )
    files = [directory] if is_gguf else directory.iterdir()
    return Inspection(
        name=str(name_or_path),
        directory=directory,
        kind=kind,
        num_params=counted if tensors else None,
        dtypes=dict(collections.Counter(dtypes[name] for name in sorted(dtypes))),
        num_bytes=sum(path.stat().st_size for path in files if path.is_file()),
        facts=facts,
        notes=tuple(notes),
        refused=refused,
    )


def _attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """Calls a function; returns (result, None), or (None, message) where it raises our error."""
    try:
        return call(*args), None
    except SpecJaxError as error:
        return None, str(error)


def _config(directory: pathlib.Path, num_tensors: int) -> AnyConfig:
    config = read_config(directory)
    if num_tensors:
        check_layers(directory, config.num_hidden_layers, num_tensors)
    return config


def _headers(directory: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Returns every tensor and the dtype that it is stored in, by name, and notes."""
    if gguf.is_gguf(directory):
        header = gguf.read_header(directory)
        places = gguf.places(header).items()
        dtypes = {name: header.tensors[stored].type.name for name, (stored, _) in places}
        return gguf.tensors_of(header, {}), dtypes, []
    if not any((directory / name).exists() for name in (SINGLE, INDEX)):
        pickles = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
        note = f"the weights are files of torch ({', '.join(pickles[:3])}), which are loaded where "
        note += "torch is, and not counted here"
        why = foreign_files(directory).removeprefix(": ") or "there are no weights"
        return {}, {}, [note if pickles else why]
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(directory, stack)
    dtypes = {name: x.dtype.name for name, x in tensors.items()}
    unknown = [
        f"tensor {n} has a dtype that is not known" for n, x in dtypes.items() if x == "void"
    ]
    return tensors, dtypes, [*unread_index(directory), *unknown[:1]]


def _shape(hf: Mapping[str, Any], config: AnyConfig | None) -> dict[str, Any]:
    parts = ("transformer_layer_config", "text_config", "dflash_config")
    inner = next((hf[name] for name in parts if hf.get(name)), {})
    said = {**hf, **(inner if isinstance(inner, Mapping) else {})}

    def plain(value):
        return value if is_integer(value) or isinstance(value, str) else shown(value)

    facts = {"family": plain(said["model_type"])} if "model_type" in said else {}
    facts |= {text: plain(said[key]) for key, text in _SHAPE.items() if said.get(key) is not None}
    if config is not None:
        facts["stop tokens"] = ", ".join(map(str, config.eos_token_id)) or "none"
    if "vocab_size" in said:
        size = said["vocab_size"]
        facts["vocabulary"] = f"{f'{size:,}' if is_integer(size) else shown(size)} ids"
    return facts


def _tokens(tokenizer: Tokenizer, config: AnyConfig | None) -> dict[str, str]:
    ids = tokenizer.num_ids
    templates = ", ".join(tokenizer.chat_templates)
    size = ids if config is None else config.vocab_size
    padding = f", {size - ids:,} of them padding" if size > ids else ""
    return {
        "vocabulary": f"{size:,} ids{padding}",
        "tokenizer": f"yes, {ids:,} ids",
        "chat template": f"yes ({templates})" if templates else "no",
    }


def _compare(config: AnyConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns notes on tensors that the config does not ask for, or that are missing."""
    names = set(renamed(unfused(tensors), family_of(config).prefixes))
    names -= {f"{name}{SCALE}" for name in names}
    asked = {name for _, spec, layer in declared(config) for name in tensor_names(spec, layer)}
    if config.tie_word_embeddings:
        asked.discard("lm_head.weight")
    others = f"tensors beside the {num_params(config):,} parameters that config.json asks for"
    lists = {"tensors are missing": asked - names, others: names - asked}
    return [
        f"{what}, {len(found)}: {', '.join(sorted(found)[:3])}{', …' if len(found) > 3 else ''}"
        for what, found in lists.items()
        if found
    ]
