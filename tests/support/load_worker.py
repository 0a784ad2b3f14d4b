"""Loads a directory onto a mesh in this process, and prints what it took as JSON.

    python tests/support/load_worker.py make DIR                # a Llama of 400 MB in 5 shards
    python tests/support/load_worker.py load DIR --mesh=data:2,tensor:4

Devices are forced CPU devices, whose buffers are host memory. So the reader's own memory is that by
which the resident set grew while one array was read, at its peak, less the array's buffers.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import time

DEVICES = 8


def make(directory: str, scale: int = 1) -> None:
    """Writes a Llama of random weights in bfloat16: 400 MB, or less by ``scale`` squared."""
    import jax.numpy as jnp
    import numpy as np

    from spec_jax.models.checkpoint import save_pretrained
    from spec_jax.models.config import ModelConfig
    from spec_jax.models.params import assemble

    random = np.random.default_rng(0)
    settings = dict(vocab_size=32000 // scale, hidden_size=1024 // scale)
    settings |= dict(intermediate_size=4096 // scale, num_hidden_layers=8, num_attention_heads=16)
    settings |= dict(num_key_value_heads=8)
    config = ModelConfig(**settings)
    draw = lambda spec, layer: random.standard_normal(spec.shape, np.float32).astype(jnp.bfloat16)
    options = dict(dtype="bfloat16", max_shard_bytes=100_000_000 // scale**2)
    save_pretrained(directory, assemble(config, draw, np.stack), config, **options)


def status(name: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(f"{name}:"))


def forget_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def chars_read() -> int:
    """Bytes that this process has asked files for."""
    return int(pathlib.Path("/proc/self/io").read_text().split()[1])


def buffers(array) -> int:
    """Bytes of an array's buffers in this process, each once."""
    shards = {s.data.unsafe_buffer_pointer(): s.data.nbytes for s in array.addressable_shards}
    return sum(shards.values())


def load(args: argparse.Namespace) -> dict:
    import jax

    import spec_jax
    from spec_jax import processes
    from spec_jax.meshes import make_mesh
    from spec_jax.models import checkpoint, parts, shards

    if args.process is not None:
        processes.start(f"127.0.0.1:{args.port}", 2, args.process)
    jax.device_put(0.0).block_until_ready()
    held, bytes_read, read_onto = [], [], parts.read_onto

    def watch(tensor, sharding=None):
        forget_peak()
        before = status("VmRSS")
        array = jax.block_until_ready(read_onto(tensor, sharding))
        held.append(status("VmHWM") - before - buffers(array))
        return array

    class Counted(io.FileIO):
        def readinto(self, buffer):
            bytes_read.append(super().readinto(buffer))
            return bytes_read[-1]

    shards.open = lambda path, mode, buffering: Counted(path, mode)
    if args.watch:
        checkpoint.read_onto = watch
    mesh = args.mesh and make_mesh(args.mesh)
    options = {} if mesh is None or args.whole else {"mesh": mesh}
    forget_peak()
    before, chars, begin = status("VmRSS"), chars_read(), time.perf_counter()
    model = spec_jax.load_model(args.directory, args.dtype, scan_layers=args.scan, **options)
    if args.whole and mesh is not None:
        model = model.on_mesh(mesh)
    jax.block_until_ready(model.params)
    seconds = time.perf_counter() - begin
    leaves = jax.tree.leaves(model.params)
    result = dict(seconds=round(seconds, 2), bytes_of_devices=sum(map(buffers, leaves)))
    result |= dict(bytes_at_peak=status("VmHWM") - before if not args.watch else None)
    result |= dict(bytes_of_reader=max(held, default=None))
    result |= dict(largest_part=max(s.data.nbytes for x in leaves for s in x.addressable_shards))
    result |= dict(largest_array=max(x.nbytes for x in leaves))
    result |= dict(bytes_read=sum(bytes_read))
    result |= dict(bytes_read_by_kernel=chars_read() - chars)
    if args.save:
        checkpoint.save_pretrained(
            args.save, model.params, model.config, dtype=args.dtype, max_shard_bytes=2_000_000
        )
        assert (pathlib.Path(args.save) / "config.json").exists()  # in every process
    if args.process is not None:
        processes.finish()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["make", "load"])
    parser.add_argument("directory")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--mesh")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--whole", action="store_true", help="read whole, then placed")
    parser.add_argument("--watch", action="store_true", help="the reader's memory; slower")
    parser.add_argument("--save", help="a directory to write the model to, in small files")
    parser.add_argument("--process", type=int, help="number of this one of two processes")
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    devices = DEVICES if args.process is None else DEVICES // 2
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    with contextlib.suppress(BrokenPipeError):
        if args.action == "make":
            make(args.directory, args.scale)
        else:
            print(json.dumps(load(args)))


if __name__ == "__main__":
    main()
