"""What loading onto a mesh holds on the host and reads from files, in processes of its own."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import load_worker
from support.meshes import mesh

from spec_jax.models.families import read_config
from spec_jax.models.params import declared, param_shardings

TESTS = pathlib.Path(__file__).resolve().parents[1]


def start(*arguments) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    options = dict(text=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, load_worker.__file__, "load", *map(str, arguments)], **options
    )


def result(process: subprocess.Popen) -> dict:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def both(*arguments) -> list[dict]:
    """What two processes of four devices print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [start(*arguments, f"--process={i}", f"--port={port}") for i in range(2)]
    return [result(process) for process in started]


def stored_bytes(directory) -> int:
    return sum(x.nbytes for x in tensors_of(directory).values())


def tensors_of(directory) -> dict[str, np.ndarray]:
    files = sorted(pathlib.Path(directory).glob("*.safetensors"))
    return {name: x for file in files for name, x in load_file(file).items()}


def bytes_of_process(config, where, devices) -> int:
    """Bytes in bfloat16 of the parts that some devices hold, each part once."""
    placed = param_shardings(config, where)
    total = 0
    for name, spec, layer in declared(config):
        sharding = placed[name] if layer is None else placed["layers"][str(layer)][name]
        indices = sharding.devices_indices_map(spec.shape)
        parts = {
            tuple(s.indices(n) for s, n in zip(indices[device], spec.shape)) for device in devices
        }
        size = lambda part: int(np.prod([stop - start for start, stop, _ in part]))
        total += 2 * sum(map(size, parts))
    return total


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A Llama of 24 MB in five files."""
    path = tmp_path_factory.mktemp("model")
    load_worker.make(path, scale=4)
    return path


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [[], ["--scan"]], ids=["unrolled", "scanned"])
def test_the_host_holds_a_part_and_not_the_model(directory, options):
    found = result(start(directory, "--mesh=data:1,tensor:8", "--watch", *options))
    stored = stored_bytes(directory)
    # Pages that the allocator keeps are counted too, half a megabyte for such small tensors.
    limit = max(x.nbytes for x in tensors_of(directory).values()) + found["largest_part"]
    assert found["bytes_of_reader"] <= limit + (1 << 19) < stored / 4
    assert found["bytes_read"] == stored
    assert 0 <= found["bytes_read_by_kernel"] - stored < 1 << 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", ["data:1,tensor:8", "data:2,tensor:4"])
def test_each_process_reads_its_own_parts_and_one_writes(directory, tmp_path, sizes):
    config = read_config(directory)
    rows = both(directory, f"--mesh={sizes}", f"--save={tmp_path / 'saved'}")
    where = mesh(sizes)
    devices = where.devices.flatten()
    for row, own in zip(rows, (devices[:4], devices[4:])):
        assert row["bytes_read"] == bytes_of_process(config, where, own)
        assert 0 <= row["bytes_read_by_kernel"] - row["bytes_read"] < 1 << 20
    assert (rows[0]["bytes_read"] < 0.52 * stored_bytes(directory)) == (sizes == "data:1,tensor:8")
    ours, theirs = tensors_of(tmp_path / "saved"), tensors_of(directory)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
