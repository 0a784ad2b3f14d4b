"""Records what decoding yields, to compare two trees on one machine.

    python tests/conformance/record.py --out before.json       # in one tree
    python tests/conformance/record.py --against before.json   # in the other; 1 if they differ

Tokens, accepted drafts and finish reasons of every cell of ``test_drafters.py``, some minutes of
one core. ``--only TEXT`` takes the cells whose name contains it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def record(only: str) -> dict[str, list]:
    """What each row of each cell yields."""
    from conformance import cells, test_drafters

    from spec_jax import SamplerConfig
    from spec_jax.drafters import registry

    prompts = [[1, 2, 3], [4, 5, 6, 7, 6], [2], [3, 1]]
    likely = {"logit_bias": ((1, 9.0), (2, 9.0), (3, 8.0))}
    warm = [{"temperature": 2.0, **likely}, {"temperature": 0.7, "top_p": 0.9}, likely, {}]
    for kind in cells.OWN_KINDS:
        registry.register(kind)
    found = {}
    for cell in (*test_drafters.BY_KIND, *test_drafters.BY_RULE):
        if only in cell:
            print(cell, file=sys.stderr)
            cold = {"temperature": 0.0} if cell.endswith("greedy") else {}
            samplers = [SamplerConfig(seed=i, **x | cold) for i, x in enumerate(warm)]
            rows = cells.decoder(*cell.split("-", 2)).generate(prompts, 24, sampler=samplers)
            found[cell] = [[row.finish_reason, *row.tokens, *row.stats.lengths] for row in rows]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="a file to write")
    parser.add_argument("--against", help="a record to compare with")
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    args = parser.parse_args()
    sys.path[:1] = [str(ROOT), str(ROOT / "tests")]
    new = record(args.only)
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(new, indent=1), encoding="utf-8")
    if not args.against:
        return 0
    old = json.loads(pathlib.Path(args.against).read_text(encoding="utf-8"))
    names = [name for name in {**old, **new} if args.only in name]
    lines = [
        f"{x}:\n  old {old.get(x)}\n  new {new.get(x)}" for x in names if old.get(x) != new.get(x)
    ]
    print("\n".join(lines) or "no cell differs")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
