"""The weights of a model in an orbax checkpoint, under the package's names."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from spec_jax.errors import WeightsError
from spec_jax.models.families import AnyConfig
from spec_jax.models.params import declared

_MARK = "_METADATA"  # the tree of a checkpoint


def find(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder of the only orbax checkpoint in a model's directory, or None.

    It is the directory itself or a folder in it, such as "params".

    Raises:
      WeightsError: there are several.
    """
    found = sorted(mark.parent for mark in (*directory.glob(_MARK), *directory.glob(f"*/{_MARK}")))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise WeightsError(
            f"{directory} has {len(found)} orbax checkpoints ({names}); expected one"
        )
    return found[0] if found else None


def leaves(folder: pathlib.Path, config: AnyConfig) -> Callable[[str, int | None], Any]:
    """Reads a checkpoint of ``LoadedModel.params``, with layers apart or stacked, to the host.

    Args:
      folder: the checkpoint's. Its tree is the parameters', or has them as "params".
      config: the model's shape.

    Returns:
      ``(name, layer) -> array``, see ``LoadedModel.from_params``.

    Raises:
      WeightsError: it cannot be read, or holds a weight that such a model does not have.
    """
    import orbax.checkpoint as ocp

    try:
        with ocp.PyTreeCheckpointer() as reader:
            tree = reader.metadata(folder.absolute()).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            params = reader.restore(folder.absolute(), restore_args=as_numpy)
    except Exception as error:  # orbax and tensorstore raise of many kinds
        brief = " ".join(str(error).split())[:300]
        raise WeightsError(f"{folder} cannot be read as an orbax checkpoint: {brief}") from error
    while "params" in params:
        params = params["params"]
    found = {(name, None): x for name, x in params.items() if name != "layers"}
    for key, weights in params.get("layers", {}).items():
        numbers = [int(x) for x in key.split(":")]
        if len(numbers) == 1:
            found |= {(name, numbers[0]): x for name, x in weights.items()}
            continue
        for place, layer in enumerate(range(*numbers)):
            found |= {(name, layer): x[place] for name, x in weights.items()}
    known = {(name, layer) for name, _, layer in declared(config)}
    for name, layer in found:
        where = name if layer is None else f"{name} of layer {layer}"
        if (name, layer) not in known:
            raise WeightsError(f"{folder} holds {where}, which its config.json does not ask for")
    return lambda name, layer: found[name, layer]
