"""Plans of programs: compiled ahead of time, without weights and without the devices."""

from spec_jax.planning.compiled import Compiled, Counted, Needs, compile_and_count
from spec_jax.planning.programs import (
    Job,
    PrefillJob,
    Traced,
    TrainJob,
    trace_decode,
    trace_prefill,
    trace_train,
    train_memory,
)

__all__ = [
    "Compiled",
    "Counted",
    "Job",
    "Needs",
    "PrefillJob",
    "Traced",
    "TrainJob",
    "compile_and_count",
    "trace_decode",
    "trace_prefill",
    "trace_train",
    "train_memory",
]
