r"""Runs an experiment in several processes on this machine.

    python -m experiments.launch --processes=2 --devices=4 experiments.decode \
        --config.mesh=data:2,tensor:4

Everything after the name of the experiment is passed to it; "--" may stand
before the name. On a CPU each process has --devices devices. With GPUs or TPUs
leave this flag out, and either give every process its devices by the usual
variables or run one process for the host. Each printed line begins with the
number of its process. When a process fails, the others are stopped, and its
exit code is returned: 128 plus the signal's number if a signal ended it. On
clusters use the cluster's launcher, see docs/scale.md.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

GRACE_S = 15.0  # in which processes may end by themselves, after a signal or another's end
_DEVICES = "--xla_force_host_platform_device_count"


def launch(
    module: str, arguments: Sequence[str], processes: int, devices: int | None = None
) -> int:
    """Runs a module in several processes and waits for all of them.

    Args:
      module: The name of an experiment, such as ``experiments.decode``.
      arguments: Its arguments.
      processes: The number of processes.
      devices: The number of CPU devices of each; None leaves the devices as they are.

    Returns:
      0, or the exit code of the first process that failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    if devices is not None:
        flags = re.sub(rf"{_DEVICES}=\d+", "", env.get("XLA_FLAGS", ""))
        env |= {"XLA_FLAGS": f"{flags} {_DEVICES}={devices}".strip(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, *arguments]
    command += [f"--coordinator_address=127.0.0.1:{port}", f"--num_processes={processes}"]
    children = [
        subprocess.Popen(
            [*command, f"--process_id={i}"],
            env=env,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        for i in range(processes)
    ]
    printing = threading.Lock()
    readers = [
        threading.Thread(target=_pass_on, args=(i, child, printing), daemon=True)
        for i, child in enumerate(children)
    ]
    for reader in readers:
        reader.start()

    def forward(number: int, _) -> None:
        for child in children:  # in groups of their own, so that Ctrl-C reaches them once
            child.send_signal(number)
        if number == signal.SIGINT:
            signal.signal(number, before[number])  # another Ctrl-C ends all of them at once

    before = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _wait(children)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            child.kill()
        for reader in readers:
            reader.join(timeout=5)


def _pass_on(number: int, child: subprocess.Popen, printing: threading.Lock) -> None:
    for line in child.stdout:
        with printing:
            print(f"[{number}] {line}", end="", flush=True)


def _wait(children: Sequence[subprocess.Popen]) -> int:
    """Waits for all processes; returns the exit code of the first that failed."""
    failed = None
    end = float("inf")
    codes = [None]
    while None in codes and time.monotonic() < end:
        codes = [child.poll() for child in children]
        bad = [i for i, code in enumerate(codes) if code]
        if bad and failed is None:
            failed = bad[0]
            end = time.monotonic() + GRACE_S
            code = codes[failed]
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed ({code})"
            print(f"launch: process {failed} {how}; the others are stopped", file=sys.stderr)
            if code < 0:  # a process that could not say why; one that fails tells the others
                for child in children:
                    child.terminate()
        time.sleep(0.05)
    if failed is None:
        return 0
    code = children[failed].returncode
    return code if code > 0 else 128 - code


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line and runs the experiment that it names."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, required=True, help="how many to start")
    parser.add_argument("--devices", type=int, help="CPU devices of each process")
    parser.add_argument("experiment", help="its module, such as experiments.decode")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the experiment")
    found = parser.parse_args(arguments)
    for name in ("processes", "devices"):
        value = getattr(found, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; expected 1 or more")
    try:
        return launch(found.experiment, found.arguments, found.processes, found.devices)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
