"""The parts of the benchmark, one module each."""
