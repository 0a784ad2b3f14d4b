"""Speculative decoding in JAX: lossless by proof, for TPU, GPU and CPU.

import spec_jax

target = spec_jax.load_model("zoo/target")
draft = spec_jax.load_model("zoo/draft")
config = spec_jax.SpeculativeConfig(num_speculative_tokens=4)
decoder = spec_jax.SpeculativeDecoder(target, draft, config)
print(decoder.generate("def binary_search(", max_new_tokens=64).text)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from spec_jax.compilation import enable_compilation_cache
from spec_jax.config import AsyncSpecConfig, SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Observer, Processor
from spec_jax.drafters.host import host_drafter
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.generation import Generation
from spec_jax.engine.queue import DecodeQueue
from spec_jax.engine.stats import Stats
from spec_jax.engine.stream import Stream
from spec_jax.errors import Cancelled, ModelNotLoaded
from spec_jax.loading import LoadedHead, LoadedModel, load_draft, load_head, load_model, load_mtp
from spec_jax.meshes import make_mesh
from spec_jax.models.wrapped import Tappable, wrap
from spec_jax.rollouts import Rollout, rollout
from spec_jax.version import __version__

if TYPE_CHECKING:
    from spec_jax.evaluation.compare import compare
    from spec_jax.fitting import Fitted, fit_head, new_head
    from spec_jax.testing.certificate.certify import certify

__all__ = [
    "AsyncSpecConfig",
    "CancellationToken",
    "Cancelled",
    "DecodeQueue",
    "Fitted",
    "Generation",
    "LoadedHead",
    "LoadedModel",
    "ModelNotLoaded",
    "Observer",
    "Processor",
    "Rollout",
    "SamplerConfig",
    "SpeculativeConfig",
    "SpeculativeDecoder",
    "Stats",
    "Stream",
    "Tappable",
    "__version__",
    "certify",
    "compare",
    "enable_compilation_cache",
    "fit_head",
    "host_drafter",
    "load_draft",
    "load_head",
    "load_model",
    "load_mtp",
    "make_mesh",
    "new_head",
    "rollout",
    "wrap",
]


# Imported when they are first used: they need scipy and optax, which are slow to import.
_LATE = {
    "certify": "spec_jax.testing.certificate.certify",
    "compare": "spec_jax.evaluation.compare",
    "Fitted": "spec_jax.fitting",
    "fit_head": "spec_jax.fitting",
    "new_head": "spec_jax.fitting",
}


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("spec_jax.testing")
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LATE[name]), name)
    return found


def __dir__() -> list[str]:
    """The public names and the package's own modules, without what this file imports."""
    names = [name for name in globals() if name.startswith("__")]
    modules = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*names, *modules, *__all__, "testing"})
