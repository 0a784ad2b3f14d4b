"""Plans of programs: compiled ahead of time, without weights and without the devices."""

from spec_jax.parallel.plan.compiled import Compiled, Counted, Needs, compile_and_count
from spec_jax.parallel.plan.programs import Job, Traced, trace_decode
from spec_jax.parallel.plan.training import TrainJob, trace_train

__all__ = [
    "Compiled", "Counted", "Job", "Needs", "Traced", "TrainJob", "compile_and_count",
    "trace_decode", "trace_train",
]  # fmt: skip
