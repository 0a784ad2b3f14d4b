"""Runs of several processes, through the launcher or by hand."""

import os
import pathlib
import socket
import subprocess
import sys

import jax

ROOT = pathlib.Path(__file__).resolve().parents[2]


def environment():
    """Tests' modules can be imported, and compiled programs are kept where the tests keep them."""
    return os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
    }


def run(count, devices, module, *arguments):
    """Exit code and output of a run through the launcher."""
    command = [sys.executable, "-m", "experiments.launch", f"--processes={count}"]
    command += [f"--devices={devices}", module, *arguments]
    options = dict(env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(command, cwd=ROOT, timeout=500, **options)
    return done.returncode, done.stdout


def begin(module, *arguments_of_each, folders=None):
    """Processes that are started by hand, one for each list of arguments, each in a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    count = len(arguments_of_each)
    command = [sys.executable, "-m", module, f"--coordinator_address={address}"]
    command += [f"--num_processes={count}"]
    options = dict(env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    folders = folders or [ROOT] * count
    return [
        subprocess.Popen([*command, f"--process_id={i}", *arguments], cwd=folders[i], **options)
        for i, arguments in enumerate(arguments_of_each)
    ]
