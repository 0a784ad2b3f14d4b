"""What one of several processes runs in tests: it agrees, computes, and may fail in many ways.

PYTHONPATH=tests python -m experiments.launch --processes=2 support.process_worker --config...
"""

import os
import signal
import sys
import time

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.run import cli
from spec_jax import processes
from spec_jax.errors import ConfigError


def get_config():
    return ConfigDict(
        {
            "number": 1,
            "prompts": "",
            "target": "",
            "who": 1,  # the process that does ``act``
            "act": "none",  # or raise, config, kill, stop, exit
            "is_waiting": False,  # every process sleeps on the host, instead of computing together
        }
    )


def act(name):
    print(f"act {time.time()}", file=sys.__stderr__, flush=True)
    if name == "raise":
        raise RuntimeError("a bug of one process")
    if name == "config":
        raise ConfigError("a file that one process lacks")
    if name in ("kill", "stop"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[name])


def main():
    config, index = _CONFIG.value, processes.index()
    said = [processes.from_writer({"index": index, "x": 0.1 + 0.2, "i": i}) for i in range(600)]
    assert said == [{"index": 0, "x": 0.1 + 0.2, "i": i} for i in range(600)]
    mesh = jax.make_mesh((jax.device_count(),), ("data",), devices=jax.devices())
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.make_array_from_callback(
        (jax.device_count(),), rows, lambda at: np.arange(jax.device_count(), dtype=np.float32)[at]
    )
    total = jax.jit(lambda x: x.sum(), out_shardings=whole)
    print(f"sum {float(total(x)):g} of {jax.device_count()} devices", flush=True)
    for step in range(20 if config.act == "none" else 10_000):
        if index == config.who and step == 5:
            act(config.act)
        if config.is_waiting:
            time.sleep(0.2)
        else:
            float(total(x))
            time.sleep(0.01)
    print("done", flush=True)


if __name__ == "__main__":
    _CONFIG, _ = cli.define_flags(sys.modules[__name__], "none")
    cli.run(main)
