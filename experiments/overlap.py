r"""Shows that drafting overlaps with verification, by toy models of known cost.

    python -m experiments.overlap --workdir=DIR
    python -m experiments.overlap --draft_mesh=tensor:2 \
        --target_mesh=data:2,tensor:2

An overlapped tick should take as long as the longer of drafting and
verification, a round of the usual loop as long as their sum. The toy models
sleep on host devices, since two real programs would only compete for the
processor's cores. Either side may be a mesh. On a CPU jax runs one program of
several devices at a time: with a mesh on both sides a tick takes the sum, with
a mesh on one side the longer of the two. The run's folder gets config.json,
environment.json, report.json and report.md. Cost: a few seconds, and
compilation.
"""

from __future__ import annotations

import math
import pathlib
import time
from types import ModuleType

import jax
import jax.numpy as jnp
from absl import flags

from experiments.run import cli, report
from spec_jax import decoding
from spec_jax.config import SamplerConfig
from spec_jax.drafters.standalone.model import standalone
from spec_jax.engine.request import make_request
from spec_jax.errors import ConfigError
from spec_jax.meshes import make_mesh, parse_mesh
from spec_jax.overlap.overlap import Devices, Overlap
from spec_jax.rules import GREEDY
from spec_jax.sampling import make_sampler
from spec_jax.show.tables import Section, Table
from spec_jax.testing import slow_model, toy_model, toy_params

VOCAB_SIZE = 8


def run(
    workdir: str | pathlib.Path | None,
    draft_ms: float,
    verify_ms: float,
    k: int,
    tokens: int,
    draft_mesh: str = "",
    target_mesh: str = "",
) -> dict:
    """Decodes one row overlapped and as usual; returns the measurements.

    Args:
      workdir: The run's folder; by default runs/overlap/TIME.
      draft_ms: Milliseconds of one drafted token.
      verify_ms: Milliseconds of a verify pass.
      k: Drafted tokens per tick.
      tokens: Tokens that each of the two loops decodes.
      draft_mesh: The draft's devices, such as "tensor:2"; empty means one device.
      target_mesh: The target's devices, likewise.

    Raises:
      ConfigError: A cost is not positive, there is no such mesh, or jax sees too few devices.
    """
    if min(draft_ms, verify_ms) <= 0 or min(k, tokens) < 1:
        raise ConfigError(
            f"draft_ms {draft_ms:g}, verify_ms {verify_ms:g}, k {k}, tokens {tokens}: "
            "expected costs above 0, and one token at least"
        )
    devices = make_sides(draft_mesh, target_mesh)
    toy = toy_model(VOCAB_SIZE)
    system = decoding.System(
        slow_model(toy, verify_ms / 1e3), standalone(slow_model(toy, draft_ms / 1e3)), GREEDY, k
    )
    overlapped = _ticks_ms(Overlap(devices), system, tokens)
    usual = _ticks_ms(decoding, system, tokens)
    both = k * draft_ms + verify_ms
    longer = max(k * draft_ms, verify_ms)
    record = {
        "k": k,
        "draft_ms": k * draft_ms,
        "verify_ms": verify_ms,
        "longer_ms": longer,
        "sum_ms": both,
        "tick_ms": overlapped,
        "round_ms": usual,
        "tick_over_longer": overlapped / longer,
        "round_over_sum": usual / both,
        "draft_devices": num_devices(draft_mesh),
        "target_devices": num_devices(target_mesh),
    }
    config = {"draft_ms": draft_ms, "verify_ms": verify_ms, "k": k, "tokens": tokens}
    config |= {"draft_mesh": draft_mesh, "target_mesh": target_mesh}
    folder = cli.open_workdir("overlap", workdir)
    head = report.begin("overlap", folder, config)
    shown = Section(
        "Drafting beside verification",
        table=Table(("measured", "value"), [(name, f"{x:.3g}") for name, x in record.items()]),
    )
    report.finish(folder, head | record, "Overlap", [shown])
    report.show([shown])
    return record


def num_devices(mesh: str) -> int:
    """Returns how many devices a side has."""
    return math.prod(parse_mesh(mesh).values()) if mesh else 1


def make_sides(draft_mesh: str, target_mesh: str) -> Devices:
    """Returns the first devices as the target's, and those after them as the draft's.

    Raises:
      ConfigError: There is no such mesh, or jax sees too few devices.
    """
    devices = jax.devices()
    target, draft = map(num_devices, (target_mesh, draft_mesh))
    if len(devices) < target + draft:
        raise ConfigError(
            f"the two sides have {target} and {draft} devices; jax sees {len(devices)}: XLA_FLAGS "
            "has forced their number, or they had started"
        )
    sides = (target_mesh, devices[:target]), (draft_mesh, devices[target : target + draft])
    target, draft = (make_mesh(mesh, own) if mesh else own[0] for mesh, own in sides)
    return Devices(draft=draft, target=target)


def _ticks_ms(loop: ModuleType | Overlap, system: decoding.System, num_tokens: int) -> float:
    """Returns milliseconds per round of a compiled loop in which every draft is accepted."""
    params = dict.fromkeys(("target", "draft"), toy_params(VOCAB_SIZE, 0))
    sampler = make_sampler(SamplerConfig(), 1, VOCAB_SIZE)
    *arrays, slots, _ = make_request(system, [[1, 1]], 1 + num_tokens, sampler, sampler)
    state = loop.prefill(params, *arrays, system=system, slots=slots)
    go_on = jnp.zeros_like(state.finish)
    state, _ = loop.generate(params, state, go_on, jnp.int32(1), system=system)
    begin = time.perf_counter()
    state, chunk = loop.generate(params, state, go_on, jnp.int32(2**30), system=system)
    rounds = int(chunk.rounds)
    if rounds == 0:
        raise ConfigError(f"tokens is {num_tokens}: all of them came in the first round")
    return (time.perf_counter() - begin) * 1e3 / rounds


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    values = {flag.name: flag.value for flag in _FLAGS}
    number = num_devices(values["draft_mesh"]) + num_devices(values["target_mesh"])
    jax.config.update("jax_num_cpu_devices", number)
    run(**values)


if __name__ == "__main__":
    _FLAGS = (
        flags.DEFINE_string("workdir", None, "Folder of this run; by default runs/overlap/TIME."),
        flags.DEFINE_float("draft_ms", 20.0, "Milliseconds of one drafted token."),
        flags.DEFINE_float("verify_ms", 100.0, "Milliseconds of a verify pass."),
        flags.DEFINE_integer("k", 4, "Drafted tokens per tick."),
        flags.DEFINE_integer("tokens", 80, "Tokens to decode, by each of the two loops."),
        flags.DEFINE_string("draft_mesh", "", "The draft's devices, such as tensor:2; empty: one."),
        flags.DEFINE_string("target_mesh", "", "The target's devices, likewise."),
    )
    cli.run(main)
