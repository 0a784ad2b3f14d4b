"""The files that every run leaves, and what its report holds: environment, models, machine."""

from __future__ import annotations

import datetime
import math
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

import spec_jax
from experiments.run import cli
from spec_jax import processes
from spec_jax.drafters.registry import layer_of
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.models import files
from spec_jax.show.tables import Section

FILES = ("config.json", "environment.json", "report.json", "report.md")  # of every run
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "safetensors")


def begin(experiment: str, folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Writes config.json and environment.json of a run that begins.

    Args:
      experiment: The experiment's name.
      folder: The folder of the run.
      config: The resolved config, or the values of the flags.

    Returns:
      What every report.json begins with: "command", "config", "environment".
    """
    if processes.is_writer():
        folder.mkdir(parents=True, exist_ok=True)
    found = {"experiment": experiment, **environment()}  # cli.make_workdir reads whose folder it is
    head = {"command": cli.command(experiment), "config": config, "environment": found}
    write_json(folder / "environment.json", found)
    write_json(folder / "config.json", config)
    return head


def finish(
    folder: pathlib.Path, rep: Mapping[str, Any], title: str, sections: Sequence[Section]
) -> None:
    """Writes report.json and report.md; also of a run that goes on, after each of its parts.

    Args:
      folder: The folder of the run.
      rep: What ``begin`` returned, and what the experiment has found.
      title: The heading of report.md, which has the command, the sections and the machine.
      sections: What was found, in the order of reading.
    """
    write_json(folder / "report.json", rep)
    env = rep["environment"]
    blocks = [f"# {title}", f"`{rep['command']}`, {env['time']}"]
    blocks += [s.markdown() for s in (*sections, Section("", terms=about_machine(env)))]
    write_text(folder / "report.md", "\n\n".join(filter(None, blocks)) + "\n")


def show(sections: Sequence[Section]) -> None:
    """Prints sections, each after an empty line."""
    for text in filter(None, (section.console() for section in sections)):
        print(f"\n{text}")


def about_machine(env: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a run was made on, by name."""
    versions = (f"{name} {env[name]}" for name in ("spec_jax", "python", *PACKAGES))
    return {"machine": describe_machine(env), "versions": ", ".join(versions)}


def environment() -> dict[str, Any]:
    """Returns versions, devices and machine, as this process sees them."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "spec_jax": spec_jax.__version__,
        **{name: metadata.version(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "devices": [str(device.device_kind) for device in jax.devices()],
        "cpu_model": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        return next(named)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_json(path: pathlib.Path, value: Any) -> None:
    """Replaces the whole file at once; NaN is written as null. Of several processes one writes."""
    if processes.is_writer():
        files.write_json(path, plain(value))


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces the whole file at once. Of several processes one writes."""
    if processes.is_writer():
        files.write_text(path, text)


def plain(value: Any) -> Any:
    """Returns a value as JSON holds it: keys are strings, NaN and infinities are None."""
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def facts(model: LoadedModel | LoadedHead, dtype: str) -> dict[str, Any]:
    """Returns a model or a head for ``report["models"]``."""
    known = {
        "name": model.name,
        "parameters": model.num_params,
        "dtype": dtype,
        "notes": list(getattr(model, "notes", ())),  # how an ambiguous checkpoint was read
    }
    if isinstance(model, LoadedModel):
        config = model.config
        layers = model.config.num_hidden_layers
        known["max_length"] = model.model.max_length
        known |= {"source": model.source} if model.source else {}
    else:
        config = layer_of(model.config)
        known["taps"] = list(model.config.taps)
        if config is None:  # a head without attention
            return known
        layers = len(model.kind.head.parts_of(model.config)) * config.num_hidden_layers
    return known | {"layers": layers, "width": config.hidden_size, "vocabulary": config.vocab_size}


def load_note(env: dict) -> list[str]:
    """Returns a sentence for the notes if the machine was busy when the run began."""
    if not env["load_1min"] or env["load_1min"] <= env["cores"] / 2:
        return []
    return [
        f"the machine was busy at the start (load {env['load_1min']:g} on {env['cores']} cores): "
        "trust ratios more than times, and measure again on a quiet one"
    ]


def names_of(paths: Sequence[str]) -> list[str]:
    """Returns a short name of each draft, another one for each: of runs/mine/export, "mine"."""
    parts = [[x for x in pathlib.PurePath(path).parts if x != "/"] for path in paths]
    parts = [p[:-1] if len(p) > 1 and p[-1] == "export" else p for p in parts]
    whole = [p[:1] == ["zoo"] for p in parts]
    for length in range(1, 1 + max(map(len, parts), default=0)):
        found = ["/".join(p if is_zoo else p[-length:]) for p, is_zoo in zip(parts, whole)]
        if len(set(found)) == len(set(paths)):
            return found
    return list(paths)


def describe_machine(env: dict) -> str:
    """Returns one line: devices, processor, cores, operating system."""
    host = f"{env['cpu_model']}, {env['cores']} cores, {env['platform']}"
    if env["backend"] == "cpu":
        return host
    return f"{len(env['devices'])} x {', '.join(sorted(set(env['devices'])))} on {host}"
