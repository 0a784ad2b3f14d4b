"""Every kind of drafter, in chains and trees and with every rule, conforms.

What that means is in ``spec_jax/testing/conformance.py``. A rule and a kind know nothing of each
other, so each kind is tested with one rule, and each rule with two kinds. Nor do the loop, a queue
and a mesh know a kind: whole calls and meshes are tested with one kind of each way to draft and one
cache of each sort.
"""

from __future__ import annotations

import pytest
from conformance import cells

from spec_jax.config import METHODS
from spec_jax.testing import conformance
from spec_jax.testing.conformance import check_conformance

HYBRIDS = ("self on qwen3.5", "on qwen3.5", "on deepseek", "on qwen3.5 in a loop")
STATIC = (
    *("standalone", "self", "eagle1", "eagle3 with a window", "mtp", "treeflash", "on windows"),
    *("dflash", "dspark"),
)
DYNAMIC = (
    *("standalone", "eagle3", "eagle3 of few ids", "gate", "treeflash", "on windows in a loop"),
    *("peagle", "dflash2"),
)
KINDS = [name for name in cells.SUBJECTS if "on " not in name and "mtp of" not in name]
CHAINS = [f"{name}-chain-match" for name in cells.SUBJECTS]
VARIANTS = ("eagle1", "eagle3 of few ids", "eagle3 with a window")
BY_KIND = [
    *CHAINS,
    *(f"{name}-static-match" for name in (*STATIC, *HYBRIDS)),
    *(f"{name}-dynamic-match" for name in DYNAMIC),
]
BY_RULE = [
    *(f"eagle3-chain-{rule}" for rule in ("greedy", "residual", "block", "logit-comparison")),
    *(f"suffix-chain-{rule}" for rule in ("greedy", "residual", "block", "typical-acceptance")),
    *(f"standalone-static-{rule}" for rule in ("greedy", "residual", "traversal")),
    *(f"mtp-dynamic-{rule}" for rule in ("greedy", "residual", "traversal")),
]
REPRESENTATIVES = (
    *(f"{name}-chain-match" for name in KINDS if name not in VARIANTS),
    "standalone-static-greedy",
    "eagle3-dynamic-match",
    "suffix-chain-residual",
)
WHOLE = ("suffix", "self", "eagle3", "mtp in turn", "dspark", "host")  # one of each way to draft
OTHERS = [name for name in KINDS if name not in WHOLE]
SPLIT = ("dflash2", "treeflash", "peagle")  # with layers of their own, which a mesh splits


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
        *(f"{name}-chain-match" for name in WHOLE),
        *("standalone-static-residual", "eagle3-chain-residual", "on qwen3.5-static-match"),
    ],
)
def test_calls_conform(cell):
    """Calls, a queue, samples, log-probabilities, rounds without drafts, the cache's last slots."""
    check_conformance(cells.decoder(*cell.split("-", 2)), conformance.CALLS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_rounds_without_drafts_and_in_the_last_slots_conform(name):
    """Of ``CALLS`` those that run a kind's own code as no other check does."""
    check_conformance(cells.decoder(name, "chain", "match"), ("idle", "end"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["standalone", "suffix", "eagle3", "mtp in turn", "dspark"])
def test_decoders_of_adaptive_k_conform(name):
    """K by measured times; a head is given what rounds of K = 0 have kept for it."""
    checks = [*conformance.ROUNDS, "idle", "generate", "queue", "end"]
    check_conformance(cells.decoder(name, "adaptive", "match"), checks)


@pytest.mark.exhaustive
@pytest.mark.landing("dspark-chain")
@pytest.mark.parametrize(
    "cell",
    [
        *(f"{name}-chain" for name in (*WHOLE, "eagle3 of few ids", *SPLIT)),
        *(f"{name}-static" for name in ("standalone", "on deepseek", "on qwen3.5 in a loop")),
        "eagle3-dynamic",
    ],
)
def test_rounds_on_a_mesh_conform(cell):
    decoder = cells.decoder(*cell.split("-", 1), "match", mesh="data:2,tensor:2")
    check_conformance(decoder, conformance.ROUNDS)
