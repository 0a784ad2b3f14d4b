"""Every kind of drafter, in chains and trees and with every rule, conforms.

What that means is in ``spec_jax/testing/conformance.py``. A rule and a kind know nothing of each
other, so each kind is tested with one rule, and each rule with two kinds.
"""

from __future__ import annotations

import pytest
from conformance import cells

from spec_jax.config import METHODS
from spec_jax.testing import conformance
from spec_jax.testing.conformance import check_conformance

BLOCKS = ("peagle", "dflash", "dflash2", "dspark", "treeflash")
FAMILIES = [name for name in cells.SUBJECTS if "on " in name]
HYBRIDS = ("self on qwen3.5", "on qwen3.5", "on deepseek", "on windows", "on qwen3.5 in a loop")
SLIDING = ("on windows", "on windows in a loop", "eagle3 with a window")
TREES = (
    "standalone",
    "self",
    "eagle1",
    "eagle3",
    "eagle3 of few ids",
    "mtp",
    "gate",
    *SLIDING,
    *BLOCKS,
)
KINDS = [name for name in cells.SUBJECTS if name not in FAMILIES and "mtp of" not in name]
CHAINS = [f"{name}-chain-match" for name in cells.SUBJECTS]
VARIANTS = ("eagle1", "eagle3 of few ids", "eagle3 with a window")
BY_KIND = CHAINS + [f"{name}-{shape}-match" for name in TREES for shape in ("static", "dynamic")]
BY_RULE = [
    *(f"eagle3-chain-{rule}" for rule in ("greedy", "residual", "block", "logit-comparison")),
    *(f"suffix-chain-{rule}" for rule in ("greedy", "residual", "block", "typical-acceptance")),
    *(f"standalone-static-{rule}" for rule in ("greedy", "residual", "traversal")),
    *(f"mtp-dynamic-{rule}" for rule in ("greedy", "residual", "traversal")),
    *(f"{name}-static-match" for name in HYBRIDS if name not in SLIDING),
]
REPRESENTATIVES = (
    *(f"{name}-chain-match" for name in KINDS if name not in VARIANTS),
    "standalone-static-greedy",
    "eagle3-dynamic-match",
    "suffix-chain-residual",
)


def test_every_kind_is_tested():
    assert {cells.subject(name).method for name in cells.SUBJECTS} == set(METHODS)


@pytest.mark.representatives(*REPRESENTATIVES)
@pytest.mark.parametrize("cell", [*BY_KIND, *BY_RULE])
def test_rounds_conform(cell):
    """Tokens, states, rows that move, are inserted, rewound or restored; of one compiled round."""
    check_conformance(cells.decoder(*cell.split("-", 2)), conformance.ROUNDS)


@pytest.mark.representatives("suffix-chain-match")
@pytest.mark.landing("eagle3-chain-match", "standalone-static-residual")
@pytest.mark.parametrize(
    "cell",
    [
        *(f"{name}-chain-match" for name in KINDS),
        *(f"{name}-static-match" for name in HYBRIDS),
        "standalone-static-residual",
        "eagle3-chain-residual",
    ],
)
def test_calls_conform(cell):
    """Calls, a queue, samples, log-probabilities, rounds without drafts, the cache's last slots."""
    check_conformance(cells.decoder(*cell.split("-", 2)), conformance.CALLS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["standalone", "suffix", "self", "eagle3", "mtp in turn", "dspark"]
)
def test_decoders_of_adaptive_k_conform(name):
    """K by measured times; a head is given what rounds of K = 0 have kept for it."""
    checks = [*conformance.ROUNDS, "idle", "generate", "queue", "end"]
    check_conformance(cells.decoder(name, "adaptive", "match"), checks)


@pytest.mark.exhaustive
@pytest.mark.landing("dspark-chain")
@pytest.mark.parametrize(
    "cell",
    [
        *(f"{name}-chain" for name in KINDS),
        *(f"{name}-static" for name in ("standalone", *HYBRIDS)),
        "eagle3-dynamic",
    ],
)
def test_rounds_on_a_mesh_conform(cell):
    decoder = cells.decoder(*cell.split("-", 1), "match", mesh="data:2,tensor:2")
    check_conformance(decoder, conformance.ROUNDS)
