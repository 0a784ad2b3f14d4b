"""The process in which chat templates are rendered: started once, ended when it takes too long."""

from __future__ import annotations

import atexit
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from spec_jax.errors import ConfigError

MAX_SECONDS = 10.0  # of one rendering
_START_SECONDS = 60.0
_PROGRAM = pathlib.Path(__file__).with_name("template_program.py")


class TemplateProcess:
    """A process that renders one template at a time, for every template and thread of this one.

    It starts with the first request, and again after one that it did not survive.
    """

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request and returns its answer, see ``template_program.answer_of``.

        Args:
          request: JSON values by name.

        Raises:
          ConfigError: there is no answer within ``MAX_SECONDS``, when the process is ended, or
            within the memory, or the process cannot be started.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._start()
            answer = self._exchange({**request, "seconds": MAX_SECONDS}, MAX_SECONDS)
            if "fault" in answer:
                self.close()
                raise ConfigError(
                    f"the chat template {answer['fault']}; check the template before trusting it; "
                    "if it is fine, render the conversation yourself and pass text"
                )
            return answer

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                try:
                    pipe.close()
                except OSError:  # what was left to write
                    pass

    def _start(self) -> None:
        try:
            if not sys.executable:
                raise ValueError("no program of Python is known, as where Python is embedded")
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            fault = self._exchange({"path": [*map(str, sys.path)]}, _START_SECONDS).get("fault")
        except (OSError, ValueError) as error:
            fault = str(error)
        if fault:
            self.close()
            raise ConfigError(
                "chat templates are rendered in a process of their own, and it cannot be started "
                f"({fault}): expected sys.executable, {sys.executable!r}, to be the path of a "
                "Python that can import jinja2"
            )

    def _exchange(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Returns the answer to a message, or the fault because of which there is none."""
        process = self._process
        is_late = threading.Event()
        timer = threading.Timer(seconds, lambda: (is_late.set(), process.kill()))
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = b""
        except BaseException:  # an interrupt: an answer that comes later must not be read
            self.close()
            raise
        finally:
            timer.cancel()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        late = f"takes more than {seconds:g} seconds"
        return {"fault": late if is_late.is_set() else "breaks the process that renders it"}


_shared = TemplateProcess()
_inherited: list[TemplateProcess] = []  # of the process that this one was forked from


def ask(request: Mapping[str, Any]) -> dict[str, Any]:
    """Calls ``TemplateProcess.ask`` of the one process that all templates share."""
    return _shared.ask(request)


def _leave_to_parent() -> None:
    """Called in a process that was just forked, which must not share its parent's pipes."""
    global _shared
    _inherited.append(_shared)
    _shared = TemplateProcess()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
atexit.register(lambda: _shared.close())
