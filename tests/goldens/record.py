"""Records what decoding yields as JSON, and says cell by cell what another record differs in.

    python tests/goldens/record.py --against tests/goldens/tokens.json --parts decode
    python tests/goldens/record.py --out FILE                     # both parts of this tree

It takes about eight minutes of one core, and two where ``--cache`` names a folder with the compiled
programs of an earlier run.

Parts:
  decode: tokens, finish reasons and counts of toys, every drafter with every rule on chains and
    trees, adaptive K, queue and overlap; and of the zoo at temperature 0, in few combinations.
    ``tokens.json`` holds this part.
  local: the zoo above temperature 0. Another processor rounds otherwise, and a token on an edge
    may differ: compare on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = ("decode", "local")
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_force_host_platform_device_count=3"  # drafts of overlapped cells have their own
)


def record(parts, only: str = "") -> dict[str, dict]:
    """The parts asked for, as ``{part: {cell: value}}``.

    Args:
      parts: of ``PARTS``.
      only: cells whose name contains it.
    """
    recorded = {}
    for part in parts:
        cells = {name: cell for name, cell in _cells(part).items() if only in name}
        recorded[part] = {}
        for i, (name, cell) in enumerate(cells.items()):
            begin = time.perf_counter()
            recorded[part][name] = cell()
            _release_programs()
            seconds = time.perf_counter() - begin
            print(f"{part} {i + 1}/{len(cells)} {name}: {seconds:.1f} s", file=sys.stderr)
    return recorded


def _release_programs() -> None:
    """Frees compiled programs where they are many, since a process has 65,530 memory maps."""
    import jax

    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


def _cells(part: str) -> dict:
    from goldens import toys, zoo

    if part == "local":
        return zoo.cells(is_greedy=False)
    return toys.cells() | zoo.cells(is_greedy=True) | toys.overlapped()


def differences(old: dict, new: dict) -> list[str]:
    """What differs, a line each; parts that are not in both are left out."""
    lines = []
    for part in (part for part in PARTS if part in old and part in new):
        for name in sorted({*old[part], *new[part]}):
            if name not in new[part] or name not in old[part]:
                lines.append(f"{part} {name}: only in {'old' if name in old[part] else 'new'}")
            else:
                lines += _of_values(f"{part} {name}", old[part][name], new[part][name])
    return lines


def _of_values(name: str, old, new) -> list[str]:
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        return [x for k in keys for x in _of_values(f"{name} {k}", old.get(k), new.get(k))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new))
        return [x for i, (a, b) in pairs for x in _of_values(f"{name}[{i}]", a, b)]
    return [f"{name}:\n  old {old}\n  new {new}"]


def dump(recorded: dict[str, dict]) -> str:
    """JSON with a line for every row of every cell."""
    line = lambda value: json.dumps(value, ensure_ascii=False, allow_nan=False)

    def cell(value):
        if not isinstance(value, list):
            return line(value)
        return "[\n   " + ",\n   ".join(map(line, value)) + "\n  ]"

    parts = [
        f' "{part}": {{\n'
        + ",\n".join(f"  {line(name)}: {cell(value)}" for name, value in cells.items())
        + "\n }"
        for part, cells in recorded.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    parser.add_argument("--out", help="a file to write")
    parser.add_argument("--against", help="a record to compare with; exit status 1 if they differ")
    parser.add_argument("--cache", help="a folder of compiled programs to read and to fill")
    args = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", FLAGS)
    sys.path[:1] = [str(ROOT), str(ROOT / "tests")]
    import jax

    jax.config.update("jax_platforms", "cpu")
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", args.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    new = record(args.parts.split(","), args.only)
    if args.out:
        pathlib.Path(args.out).write_text(dump(new), encoding="utf-8")
    if not args.against:
        return 0
    old = json.loads(pathlib.Path(args.against).read_text(encoding="utf-8"))
    if args.only:
        old = {p: {n: c for n, c in cells.items() if args.only in n} for p, cells in old.items()}
    lines = differences(old, new)
    print("\n".join(lines) or "no cell differs")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
