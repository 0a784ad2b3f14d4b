"""Records what the code does today as JSON, and says cell by cell what another record differs in.

    python tests/goldens/record.py --out FILE                     # all parts of this tree
    python tests/goldens/record.py --tree ../old --out FILE --parts decode,local
    python tests/goldens/record.py --against tests/goldens/tokens.json --parts decode
    python tests/goldens/record.py --tree ../old --out old.json && \\
        python tests/goldens/record.py --against old.json         # floats too, one machine

The recorder calls the package as users do and looks internals up by name (``find.py``), so that
the same files run on older and newer trees. It takes about eight minutes of one core, and two
where ``--cache`` names a folder with the compiled programs of an earlier run.

Parts:
  decode: tokens, finish reasons and counts of toys, every drafter with every rule on chains and
    trees, adaptive K, queue and overlap; and of the zoo at temperature 0, in few combinations.
    ``tokens.json`` holds this part.
  local: the zoo above temperature 0. Another processor rounds otherwise, and a token on an edge
    may differ: compare on one machine.
  losses: 20 steps of every training objective, as hexadecimal floats. One machine.
  exports: SHA-256 of every file of every layout. One machine.
  programs: instructions and copies of whole caches in compiled loops. One machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = ("decode", "local", "losses", "exports", "programs")
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


def record(parts, only: str = "") -> dict[str, dict]:
    """The parts asked for, as ``{part: {cell: value}}``.

    Args:
      parts: of ``PARTS``, and "overlap" in a process with three devices.
      only: cells whose name contains it.
    """
    found = {}
    for part in parts:
        cells = {name: cell for name, cell in _cells(part).items() if only in name}
        found[part] = {}
        for i, (name, cell) in enumerate(cells.items()):
            begin = time.perf_counter()
            found[part][name] = cell()
            _release_programs()
            seconds = time.perf_counter() - begin
            print(f"{part} {i + 1}/{len(cells)} {name}: {seconds:.1f} s", file=sys.stderr)
    return found


def _release_programs() -> None:
    """Frees compiled programs where they are many, since a process has 65,530 memory maps."""
    import jax

    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


def _cells(part: str) -> dict:
    if part == "decode":
        from goldens import toys, zoo

        return toys.cells() | zoo.cells(is_greedy=True)
    if part == "local":
        from goldens import zoo

        return zoo.cells(is_greedy=False)
    if part == "overlap":
        import jax
        from goldens import toys
        from goldens.find import find

        target, draft, _ = jax.devices()
        return toys.overlapped(find("Devices", room="overlap")(draft=draft, target=target))
    if part == "losses":
        from goldens import losses

        return losses.cells()
    if part == "exports":
        from goldens import exports

        return exports.cells()
    from goldens import programs

    return programs.cells()


def in_process(args, part: str, flags: str, cache: str | None) -> dict:
    """A part that needs XLA flags of its own, recorded by a process that has them."""
    command = [sys.executable, __file__, "--tree", args.tree, "--parts", part, "--out", "-"]
    command += ["--only", args.only] + (["--cache", cache] if cache else [])
    environment = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)[part]


def differences(old: dict, new: dict) -> list[str]:
    """What differs, a line each; parts that are not in both are left out."""
    found = []
    for part in (part for part in PARTS if part in old and part in new):
        for name in sorted({*old[part], *new[part]}):
            if name not in new[part] or name not in old[part]:
                found.append(f"{part} {name}: only in {'old' if name in old[part] else 'new'}")
            else:
                found += _of_values(f"{part} {name}", old[part][name], new[part][name])
    return found


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


def dump(found: dict[str, dict]) -> str:
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
        for part, cells in found.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", default=str(ROOT), help="the tree whose spec_jax is recorded")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    parser.add_argument("--out", help="a file to write; - for the standard output")
    parser.add_argument("--against", help="a record to compare with; exit status 1 if they differ")
    parser.add_argument("--cache", help="a folder of compiled programs to read and to fill")
    args = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", FLAGS)
    sys.path[:1] = [str(pathlib.Path(args.tree).resolve()), str(ROOT / "tests")]
    import jax

    jax.config.update("jax_platforms", "cpu")
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", args.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    parts, is_child = args.parts.split(","), args.out == "-"
    found = record([p for p in parts if p != "programs" or is_child], args.only)
    if "decode" in found:
        flags = f"{FLAGS} --xla_force_host_platform_device_count=3"
        found["decode"] |= in_process(args, "overlap", flags, args.cache)
    if "programs" in parts and not is_child:  # nothing cached: what is compiled is written down
        with tempfile.TemporaryDirectory() as folder:
            flags = f"{FLAGS} --xla_dump_to={folder} --xla_dump_hlo_as_text"
            found["programs"] = in_process(args, "programs", flags, None)
    if is_child:
        print(dump(found))
    elif args.out:
        pathlib.Path(args.out).write_text(dump(found), encoding="utf-8")
    if not args.against:
        return 0
    old = json.loads(pathlib.Path(args.against).read_text(encoding="utf-8"))
    if args.only:
        old = {p: {n: c for n, c in cells.items() if args.only in n} for p, cells in old.items()}
    lines = differences(old, found)
    print("\n".join(lines) or "no cell differs")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
