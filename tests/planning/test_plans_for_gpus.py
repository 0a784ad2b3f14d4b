"""Programs of real sizes, compiled for GPUs ahead of time: what a round writes, copies and moves.

    pip install -e '.[plan-gpu]'
    XLA_FLAGS= pytest -s -m exhaustive tests/planning/test_plans_for_gpus.py

Two programs take about a CPU-minute; -m measure compiles the others. docs/measurements.md has the
figures. They need jax's plugin, and neither CUDA nor a device.
"""

import importlib.util
import os

import pytest

from spec_jax import planning as plan
from spec_jax.drafters import registry
from spec_jax.meshes import make_mesh
from spec_jax.planning import roofline
from spec_jax.planning.chips import Topology
from spec_jax.planning.presets import find_config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax_cuda13_plugin is not installed (extra plan-gpu)",
)
EAGLE = ("eagle3", 4, dict(draft_vocab_size=32000))
DFLASH = ("dflash", 7, dict(num_layers=5))
NGRAM = ("ngram", 4, None)
PLAIN = (None, 0, None)


def compiled(name, chips, drafts, batch, slots=2048, **job):
    """Compiles a round; returns the job and what is counted."""
    topology = Topology.parse(chips)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    target = find_config(name, topology.platform)
    method, num_draft, options = drafts
    draft = method if options is None else registry.objectives()[method][1].new(target, **options)
    job |= dict(target=target, draft=draft, num_draft=num_draft, batch=batch, slots=slots)
    job = plan.Job(mesh=f"data:1,tensor:{topology.num_devices}", **job)
    devices = make_mesh(job.mesh, topology.describe().devices)
    found = plan.compile_and_count(lambda: plan.trace_decode(job, devices))
    sizes = job.target, job.draft, job.num_draft, job.setting
    ratio = found.counted.hbm_bytes / roofline.round_work(*sizes).work.hbm_bytes
    print(
        f"{found.counted.hbm_bytes / 1e9:.2f} GB, {ratio:.3f} of the analytic bytes, "
        f"{found.needs.temporaries / 1e9:.4f} GB of temporaries, {found.counted.kernels} kernels, "
        f"{found.counted.num_collectives} collectives, {found.cpu_s:.0f} CPU-seconds"
    )
    return job, found, ratio


def check(job, found, ratio, most):
    counted, needs = found.counted, found.needs
    assert counted.copies == [] and counted.rewrites == [] and counted.in_branches == 0
    assert needs.aliased == needs.state
    assert needs.temporaries <= 0.05 * needs.params
    assert ratio <= most


EXHAUSTIVE = pytest.mark.exhaustive
MEASURE = pytest.mark.measure
ONE = [  # on one H100: drafts, rows, and at most how many of the counted bytes
    # With many rows scores of attention are more, and partial sums of products that XLA splits; it
    # splits none with XLA_FLAGS=--xla_gpu_experimental_force_split_k=1.
    pytest.param(EAGLE, 1, 1.10, marks=EXHAUSTIVE),
    pytest.param(PLAIN, 1, 1.05, marks=MEASURE),
    pytest.param(DFLASH, 1, 1.10, marks=EXHAUSTIVE),
    pytest.param(NGRAM, 1, 1.10, marks=MEASURE),
    pytest.param(PLAIN, 8, 1.05, marks=MEASURE),
    pytest.param(EAGLE, 8, 1.20, marks=MEASURE),
    pytest.param(NGRAM, 8, 1.25, marks=MEASURE),
    pytest.param(DFLASH, 8, 1.30, marks=MEASURE),
    pytest.param(PLAIN, 64, 1.20, marks=MEASURE),
    pytest.param(EAGLE, 64, 1.40, marks=MEASURE),
]


@pytest.mark.parametrize("drafts, batch, most", ONE)
def test_a_round_on_one_gpu_reads_weights_and_caches_in_place(drafts, batch, most):
    check(*compiled("llama-3.1-8b", "h100:1", drafts, batch), most)


@pytest.mark.parametrize(
    "name, most",
    [
        # Partial sums of products that XLA splits, each of a few MB, beside small parts of weights.
        pytest.param("llama-3.1-8b", 1.45, marks=EXHAUSTIVE),
        pytest.param("llama-3.1-70b", 1.30, marks=MEASURE),
    ],
)
def test_a_round_on_eight_gpus_has_two_reductions_a_layer(name, most):
    job, found, ratio = compiled(name, "h100:8", EAGLE, 8)
    check(job, found, ratio, most)
    assert set(found.counted.collectives) <= {"all-reduce", "all-gather"}
    passes = job.target.num_hidden_layers + job.num_draft  # the target's layers, the head's passes
    assert 2 * passes <= found.counted.num_collectives <= 2 * passes + 12


@MEASURE
@pytest.mark.parametrize("drafts, most", [(PLAIN, 1.05), (NGRAM, 1.2)])
def test_of_experts_only_those_that_are_chosen_are_read(drafts, most):
    check(*compiled("qwen3-30b-a3b", "h100:1", drafts, 1), most)


@MEASURE
def test_stacked_layers_are_written_before_they_are_read():
    """Why they are apart on GPUs, see ``models.runs.laid_out``."""
    found = find_config("llama-3.1-8b", "tpu")
    job = plan.Job(target=found, batch=1)
    devices = make_mesh(job.mesh, Topology.parse("h100:1").describe().devices)
    counted = plan.compile_and_count(lambda: plan.trace_decode(job, devices)).counted
    written = sum(times * size for _, times, size, _ in counted.rewrites)
    assert written > 0.8 * 16e9
