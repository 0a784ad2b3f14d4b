"""Several processes that run one program together, each with devices of its own.

``start`` begins ``jax.distributed``, which carries the collectives, and watches the other
processes: when one of them stops, all do, and say which one it was and why. Decisions that depend
on a clock or on something that happens in one process are those of process 0, see ``from_writer``.
With one process every function here does nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from spec_jax.errors import ConfigError, SpecJaxError

BEAT_S = 1.0  # between two signs of life, and between two looks at those of the others
SILENT_S = 30.0  # without a sign of life, after which a process counts as dead
RUNTIME_SILENT_S = 50  # after which jax's own runtime aborts, in case this module cannot
_LINGER_S = 8.0  # that process 0, which holds what is said, waits for the others to read it
_ROOT = "spec_jax"
_PART = 1 << 20  # characters of a message, of which the store takes a few million
_FOREVER_MS = 24 * 3600 * 1000
_KEPT = 256  # answers of ``from_writer`` that are kept for slow processes

_watch: _Watch | None = None
_num_said = 0
_num_checked = 0
_said = threading.Lock()


def index() -> int:
    """Number of this process; 0 where there is only one."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def count() -> int:
    """Number of processes."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_writer() -> bool:
    """Whether this process writes reports, plots and logs: the first one does."""
    return index() == 0


def start(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: int = 300,
) -> None:
    """Joins the other processes. Called once, before jax touches a device.

    Without arguments the cluster is detected: Cloud TPU, Slurm, Kubernetes, Open MPI.

    Args:
      coordinator_address: HOST:PORT that process 0 listens on.
      num_processes: of all of them.
      process_id: of this one, from 0.
      timeout_s: for all of them to arrive.

    Raises:
      ConfigError: no cluster is detected, or only some of the arguments are given.
    """
    global _watch
    given = (coordinator_address, num_processes, process_id)
    is_explicit = any(x is not None for x in given)
    if is_explicit and any(x is None for x in given):
        raise ConfigError(
            f"coordinator_address is {coordinator_address!r}, num_processes {num_processes} and "
            f"process_id {process_id}; expected all three, or none to detect the cluster"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM stays with the program
    try:
        jax.distributed.initialize(
            *given,
            initialization_timeout=timeout_s,
            heartbeat_timeout_seconds=RUNTIME_SILENT_S,
            cluster_detection_method="deactivate" if is_explicit else None,
        )
    except Exception as error:  # jax and the runtime raise of many kinds
        raise ConfigError(
            f"jax.distributed did not start: {' '.join(str(error).split())[:300]}; it detects "
            "Cloud TPU, Slurm, Kubernetes and Open MPI; elsewhere give coordinator_address "
            "(HOST:PORT of process 0), num_processes and process_id"
        ) from error
    if count() > 1:
        _watch = _Watch()
        barrier("start")
        any_process(False)  # Gloo waits 30 s for the first collective; here all arrive together


def from_writer(value: Any) -> Any:
    """Returns the value that process 0 has, in every process.

    All processes call it equally often and in the same order.

    Args:
      value: anything that JSON can hold.
    """
    global _num_said
    if count() == 1:
        return value
    with _said:
        _num_said += 1
        number = _num_said

    def key(number, part=0):
        return f"{_ROOT}/said/{number}/{part}"

    if not is_writer():

        def get(part):
            return _client().blocking_key_value_get(key(number, part), _FOREVER_MS)

        num_parts, _, text = get(0).partition(":")
        return json.loads(text + "".join(map(get, range(1, int(num_parts)))))
    text = json.dumps(value)
    parts = [text[i : i + _PART] for i in range(0, len(text), _PART)]
    for i, part in enumerate(parts):
        _client().key_value_set(key(number, i), part if i else f"{len(parts)}:{part}")
    if number > _KEPT and number % _KEPT == 0:  # every other process is near: it computes with us
        for old in range(number - 2 * _KEPT, number - _KEPT):
            _client().key_value_delete(f"{_ROOT}/said/{old}/")
    return json.loads(text)


def any_process(is_true: bool) -> bool:
    """Returns whether something is true in one process at least.

    All processes call it equally often and in the same order.
    """
    if count() == 1:
        return is_true
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.asarray(is_true)).any())


def barrier(name: str) -> None:
    """Waits until every process is here.

    Args:
      name: of the place, used once.
    """
    if count() > 1:
        _client().wait_at_barrier(f"{_ROOT}/{name}", _FOREVER_MS)


def check_same(values: Mapping[str, Any]) -> None:
    """Checks that every process has the same values, such as its configuration and versions.

    Args:
      values: by name; anything that JSON can hold.

    Raises:
      ConfigError: in every process, where one of them differs; it names the values.
    """
    if count() == 1:
        return
    global _num_checked
    _num_checked += 1
    values = {key: json.dumps(value, default=str) for key, value in values.items()}
    folder = f"values{_num_checked}"
    _client().key_value_set(f"{_ROOT}/{folder}/{index()}", json.dumps(values))
    barrier(folder)
    found = {int(k): json.loads(v) for k, v in _read(folder).items()}
    first = found.pop(0)
    different = [
        f"{key} is {other.get(key, 'missing')} in process {number} and "
        f"{first.get(key, 'missing')} in process 0"
        for number, other in sorted(found.items())
        for key in sorted({*first, *other})
        if first.get(key) != other.get(key)
    ]
    if different:
        more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
        raise ConfigError(
            f"the processes differ: {'; '.join(different[:3])}{more}; start all of them with the "
            "same command, the same versions and the same files"
        )


def finish() -> None:
    """Ends together with the other processes, after the last of them is done."""
    global _watch
    if _watch is not None:
        barrier("end")
        _watch.is_over.set()
        jax.distributed.shutdown()
        _watch = None


def fail(error: BaseException | str, code: int) -> None:
    """Ends this process by an error, and with it all the others. Does not return.

    Args:
      error: what happened; a ``SpecJaxError`` that every process raises is printed once.
      code: the exit code of every process.
    """
    assert _watch is not None, "there are no other processes"
    _watch.fail(error, code)


class _Watch:
    """A thread that shows the others that this process lives, and stops it when one of them does.

    Process 0 looks for processes that show no sign of life, and says so to all. Processes end
    without jax's own shutdown, which would wait minutes for the one that is missing.
    """

    def __init__(self):
        self.is_over = threading.Event()
        self._id = index()
        self._count = count()
        self._host = socket.gethostname()
        self._seen: dict[str, tuple[str, float]] = {}
        self._silent: set[str] = set()
        self._lock = threading.Lock()  # held by the thread that ends the process
        threading.Thread(target=self._run, name="processes", daemon=True).start()

    def _run(self) -> None:
        for beat in range(1 << 62):
            try:
                self._look(beat)
            except Exception:  # no answer: the runtime aborts if process 0 is gone
                pass
            if self.is_over.wait(BEAT_S):
                return

    def _look(self, beat: int) -> None:
        about = json.dumps([beat, self._host, os.getpid()])
        _client().key_value_set(f"{_ROOT}/beat/{self._id}", about, allow_overwrite=True)
        if self._id == 0:
            self._find_silent(time.monotonic())
        stopped = self._stopped()
        if stopped and not self.is_over.is_set():
            with self._lock:
                number, (text, code) = min(stopped.items())
                self._print(f"process {number} has stopped: {text}; process {self._id} stops too")
                self._exit(code)

    def _find_silent(self, now: float) -> None:
        for name, text in _read("beat").items():
            known, since = self._seen.get(name, ("", now))
            if text != known:
                self._seen[name] = text, now
            elif now - since > SILENT_S:
                self._silent.add(name)
                _, host, pid = json.loads(text)
                self._say(
                    name,
                    f"no sign of life for {SILENT_S:.0f} s (pid {pid} on {host}): it "
                    "was killed, or its machine is gone",
                    1,
                )

    def _stopped(self) -> dict[int, tuple[str, int]]:
        found = {int(k): tuple(json.loads(v)) for k, v in _read("stopped").items()}
        return {number: said for number, said in found.items() if number != self._id}

    def _say(self, number: int | str, text: str, code: int) -> None:
        try:
            _client().key_value_set(f"{_ROOT}/stopped/{number}", json.dumps([text, code]))
        except Exception:  # said before, or process 0 is gone
            pass

    def fail(self, error: BaseException | str, code: int) -> None:
        text = " ".join(str(error).split()) or type(error).__name__
        if _is_of_others(error):  # another process is gone: wait until it is known which one
            self._print(f"process {self._id}: {text[:300]}")
            time.sleep(SILENT_S + 5 * BEAT_S)
        with self._lock:
            self._say(self._id, text, code)
            is_known = False
            if self._id and isinstance(error, SpecJaxError):  # all may have the same one
                end = time.monotonic() + 3 * BEAT_S
                while not is_known and time.monotonic() < end:
                    time.sleep(BEAT_S / 10)
                    is_known = self._stopped().get(0, ("", 0))[0] == text
            if isinstance(error, Exception) and not isinstance(error, SpecJaxError):
                traceback.print_exception(error, file=sys.__stderr__)
            if not is_known:
                self._print(f"process {self._id} of {self._count}: error: {text}")
            self._exit(code)

    def _print(self, text: str) -> None:
        print(text, file=sys.__stderr__, flush=True)

    def _exit(self, code: int) -> None:
        try:
            _client().key_value_set(f"{_ROOT}/left/{self._id}", "")
            end = time.monotonic() + _LINGER_S
            expected = self._count - len(self._silent)
            while self._id == 0 and len(_read("left")) < expected and time.monotonic() < end:
                time.sleep(BEAT_S / 10)
        finally:
            for stream in (sys.stdout, sys.stderr, sys.__stderr__):
                stream.flush()
            os._exit(code)


def _is_of_others(error: BaseException | str) -> bool:
    """Whether an error says that a collective broke, which tells nothing of who broke it."""
    if isinstance(error, SpecJaxError | str):
        return False
    return isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)


def _client() -> Any:
    from jax._src import distributed  # the store of the runtime; jax has no public way to it

    return distributed.global_state.client


def _read(folder: str) -> dict[str, str]:
    """Returns what the processes have stored, by the last part of its key."""
    try:
        found = _client().key_value_dir_get(f"{_ROOT}/{folder}/")
    except Exception:
        return {}
    return {key.rsplit("/", 1)[1]: value for key, value in found}
