"""Programs of real sizes, compiled for TPUs ahead of time: what a round sends, copies and moves.

    pip install -e '.[tpu]' && pytest -s -m measure tests/planning/test_plans_for_tpus.py

Takes five to ten CPU-minutes and 2 GB of memory; docs/measurements.md has the figures.
"""

import importlib.util
import os

import pytest

from spec_jax import planning as plan
from spec_jax.config import SamplerConfig, TreeConfig
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.meshes import make_mesh
from spec_jax.planning import roofline
from spec_jax.planning.chips import Topology
from spec_jax.planning.presets import find_config

pytestmark = [
    pytest.mark.measure,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu)"
    ),
]
K, V = 5, 128256
SMALL, LARGE = find_config("llama-3.1-8b", "tpu"), find_config("llama-3.1-70b", "tpu")
DRAFT = find_config("llama-3.2-1b", "tpu")
L, L_d = SMALL.num_hidden_layers, DRAFT.num_hidden_layers
WIDE, WARM = dict(batch=128, slots=1024), dict(sampler=SamplerConfig(temperature=0.7))
COPIED, STANDALONE, EAGLE_1, EAGLE_3, MODULES = (
    dict(draft=draft, num_draft=K)
    for draft in (
        "ngram",
        DRAFT,
        EagleConfig.of_target(SMALL, 1),
        EagleConfig.of_target(SMALL, draft_vocab_size=32000),
        MtpConfig.of_target(SMALL),
    )
)
TREE = dict(tree=TreeConfig(children=(3, 2, 1)), num_draft=15)
OF_DRAFT = 2 * L + 2 * K * L_d + 3 * K + 6  # a draft's argmax takes two
# What a job has besides, the most collectives of a round, and the most bytes of temporaries.
PROGRAMS = {
    "plain": ({}, 2 * L + 6, 0.1e9),
    "plain, 128 rows": (WIDE, 2 * L + 6, 0.1e9),
    "ngram": (COPIED, 2 * L + 6, 0.1e9),
    "ngram, sampled, 64 rows": (COPIED | WARM | dict(batch=64), 2 * L + 8, 0.1e9),
    "standalone": (STANDALONE, OF_DRAFT, 1e9),
    "standalone, 128 rows": (STANDALONE | WIDE, OF_DRAFT, 1e9),
    "standalone, sampled": (STANDALONE | WARM, OF_DRAFT + K + 4, 0.1e9),
    "eagle-1": (EAGLE_1, 2 * L + 2 * K + 24, 1e9),  # a draft's argmax takes two
    "eagle-3": (EAGLE_3, 2 * L + 24, 1e9),
    "eagle-3, 128 rows": (EAGLE_3 | WIDE, 2 * L + 24, 1e9),
    # A level's logits of the whole vocabulary are scattered as [V, nodes], padded to 128 lanes.
    "eagle-3, tree": (EAGLE_3 | TREE, 2 * L + 24, 0.05e9 + 4 * 128 * V),
    "mtp": (MODULES, 2 * L + 2 * K + 24, 1e9),  # likewise
}


def check(topology, num_rows, collectives, temporaries, excess=1.15, **job):
    """Compiles a job of ``num_rows`` rows a device; ``excess``: of HBM bytes over the count."""
    topology, job = Topology.parse(topology), plan.Job(**dict(batch=8, slots=2048) | job)
    # Without a TPU, its library looks for one in the cloud and locks itself.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    devices = make_mesh(job.mesh, topology.describe().devices)
    found = plan.compile_and_count(lambda: plan.trace_decode(job, devices))
    sizes = job.target, job.draft, job.num_draft, job.setting, job.tree_shape
    counted, needs = found.counted, found.needs
    ratio = counted.hbm_bytes / roofline.round_work(*sizes).work.hbm_bytes
    print(
        f"{counted.num_collectives} collectives, {needs.temporaries / 1e9:.3f} GB of "
        f"temporaries, {ratio:.3f} of the analytic HBM bytes, {found.cpu_s:.0f} CPU-seconds"
    )
    exchanges = {"all-to-all"} if job.sampler.temperature else set()
    assert set(counted.collectives) <= {"all-reduce", "all-gather"} | exchanges
    assert counted.num_collectives <= collectives
    assert counted.in_branches == 0
    # Of logits none but a tree's and a head's are gathered.
    is_head = job.draft is not None and not isinstance(job.draft, str | type(SMALL))
    tokens = job.num_draft + 1 if is_head else 1
    assert counted.largest_gather <= num_rows * tokens * 4 * (V if is_head else 16)
    assert counted.copies == []
    assert needs.aliased == needs.state
    assert needs.temporaries <= temporaries
    assert 1 / excess <= ratio <= excess


@pytest.mark.parametrize("name", PROGRAMS)
def test_8b_on_eight_chips(name):
    job, *bounds = PROGRAMS[name]
    num_rows = job.get("batch", 8) // 2
    check("v5e:2x4", num_rows, *bounds, target=SMALL, mesh="data:2,tensor:4", **job)


def test_70b_on_64_chips():
    # The count leaves out activations and attention scores, which lie in HBM here.
    job = WIDE | dict(draft=EagleConfig.of_target(LARGE, draft_vocab_size=32000), num_draft=K)
    collectives = 2 * LARGE.num_hidden_layers + 24
    job |= dict(target=LARGE, mesh="data:8,tensor:8")
    check("v5p:4x4x4", 128 // 8, collectives, 1e9, excess=1.3, **job)
