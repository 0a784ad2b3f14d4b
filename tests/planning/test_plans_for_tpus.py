"""Programs of real sizes, compiled for TPUs ahead of time: what a round sends, copies and moves.

    pip install -e '.[tpu]' && pytest -s -m measure tests/planning/test_plans_for_tpus.py

Takes five to ten CPU-minutes and 2 GB of memory; docs/measurements.md has the figures.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NamedTuple

import pytest

from spec_jax import planning as plan
from spec_jax.config import SamplerConfig, TreeConfig
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.meshes import make_mesh
from spec_jax.planning import roofline
from spec_jax.planning.chips import Topology
from spec_jax.planning.presets import find_config
from spec_jax.tree import Tree

pytestmark = [
    pytest.mark.measure,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu)"
    ),
]
K, V = 5, 128256
SMALL, LARGE = find_config("llama-3.1-8b"), find_config("llama-3.1-70b")
DRAFT = find_config("llama-3.2-1b")
L, L_d = SMALL.num_hidden_layers, DRAFT.num_hidden_layers


class Bound(NamedTuple):
    """A program, and the most that it may need.

    Attributes:
      draft: see ``plan.Job``.
      collectives: a round, all branches included.
      temporaries: bytes of a device.
      batch, slots: of the job.
      temperature: of the sampler.
      excess: HBM bytes over the analytic count.
      tree: what is drafted; None means a chain of K.
    """

    draft: Any
    collectives: int
    temporaries: float
    batch: int = 8
    slots: int = 2048
    temperature: float = 0.0
    excess: float = 1.15
    tree: TreeConfig | None = None

    @property
    def num_draft(self) -> int:
        """Drafted tokens, or nodes."""
        if self.draft is None:
            return 0
        return K if self.tree is None else Tree.branching(self.tree.children).num_nodes


def eagle3(target):
    return EagleConfig.of_target(target, draft_vocab_size=32000)


STANDALONE = 2 * L + 2 * K * L_d + 3 * K + 6  # a draft's argmax takes two
PROGRAMS = {
    "plain": Bound(None, 2 * L + 6, 0.1e9),
    "plain, 128 rows": Bound(None, 2 * L + 6, 0.1e9, batch=128, slots=1024),
    "ngram": Bound("ngram", 2 * L + 6, 0.1e9),
    "standalone": Bound(DRAFT, STANDALONE, 1e9),
    "standalone, 128 rows": Bound(DRAFT, STANDALONE, 1e9, batch=128, slots=1024),
    "standalone, sampled": Bound(DRAFT, STANDALONE + K + 4, 0.1e9, temperature=0.7),
    "ngram, sampled, 64 rows": Bound("ngram", 2 * L + 8, 0.1e9, batch=64, temperature=0.7),
    "eagle-1": Bound(EagleConfig.of_target(SMALL, 1), 2 * L + 2 * K + 24, 1e9),  # as "standalone"
    "eagle-3": Bound(eagle3(SMALL), 2 * L + 24, 1e9),
    "eagle-3, 128 rows": Bound(eagle3(SMALL), 2 * L + 24, 1e9, batch=128, slots=1024),
    # A level's logits of the whole vocabulary are scattered as [V, nodes], padded to 128 lanes.
    "eagle-3, tree": Bound(
        eagle3(SMALL), 2 * L + 24, 0.05e9 + 4 * 128 * V, tree=TreeConfig(children=(3, 2, 1))
    ),
    "mtp": Bound(MtpConfig.of_target(SMALL), 2 * L + 2 * K + 24, 1e9),  # as "standalone"
}


def compiled(target, topology, mesh, bound):
    topology = Topology.parse(topology)
    settings = dict(mesh=mesh, sampler=SamplerConfig(temperature=bound.temperature))
    options = dict(tree=bound.tree, batch=bound.batch, slots=bound.slots, **settings)
    job = plan.Job(target=target, draft=bound.draft, num_draft=bound.num_draft, **options)
    # Without a TPU, its library looks for one in the cloud and locks itself.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    devices = make_mesh(mesh, topology.describe().devices)
    found = plan.compile_and_count(lambda: plan.trace_decode(job, devices))
    analytic = roofline.round_work(
        job.target, job.draft, job.num_draft, job.setting, job.tree_shape
    )
    return found, found.counted.hbm_bytes / analytic.work.hbm_bytes


def check(found, excess, bound, rows):
    counted, needs = found.counted, found.needs
    print(
        f"{counted.num_collectives} collectives, {needs.temporaries / 1e9:.3f} GB of "
        f"temporaries, {excess:.3f} of the analytic HBM bytes, {found.cpu_s:.0f} CPU-seconds"
    )
    exchanges = {"all-to-all"} if bound.temperature else set()
    assert set(counted.collectives) <= {"all-reduce", "all-gather"} | exchanges
    assert counted.num_collectives <= bound.collectives
    assert counted.in_branches == 0
    # Of logits none but a tree's and a head's are gathered.
    is_head = bound.draft is not None and not isinstance(bound.draft, str | type(SMALL))
    tokens = bound.num_draft + 1 if is_head else 1
    assert counted.largest_gather <= rows * tokens * 4 * (V if is_head else 16)
    assert counted.copies == []
    assert needs.aliased == needs.state
    assert needs.temporaries <= bound.temporaries
    assert 1 / bound.excess <= excess <= bound.excess


@pytest.mark.parametrize("name", PROGRAMS)
def test_8b_on_eight_chips(name):
    bound = PROGRAMS[name]
    found, excess = compiled(SMALL, "v5e:2x4", "data:2,tensor:4", bound)
    check(found, excess, bound, bound.batch // 2)


def test_70b_on_64_chips():
    # The count leaves out activations and attention scores, which lie in HBM here.
    bound = Bound(
        eagle3(LARGE), 2 * LARGE.num_hidden_layers + 24, 1e9, batch=128, slots=1024, excess=1.3
    )
    found, excess = compiled(LARGE, "v5p:4x4x4", "data:8,tensor:8", bound)
    check(found, excess, bound, bound.batch // 8)
