"""A process that answers requests, one line of JSON each: both of its ends.

Both ends need the standard library alone, so that the process may run another interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.run.memory import peak_bytes

Answers = Callable[[dict], dict]


class WorkerError(Exception):
    """The process ended, or what it wrote is no answer; the message says which.

    Of one that ended it holds the last line on stderr.
    """


class RefusedError(Exception):
    """The process could not do what one request asked, and waits for the next."""


class Worker(contextlib.AbstractContextManager):
    """A process that has loaded something and answers requests about it.

    Attributes:
      facts: What it said of itself when it had loaded.
      peak_bytes: The largest memory that it had used at its last answer, see ``serve``.
    """

    def __init__(
        self,
        command: Sequence[str],
        setup: Mapping[str, Any],
        *,
        cwd: str | pathlib.Path,
        environment: Mapping[str, str] | None = None,
        limit_s: float | None = None,
    ):
        """Starts the process and waits until it has loaded.

        Args:
          command: The command line of a program that calls ``serve``.
          setup: Its first request.
          cwd: The directory that it runs in.
          environment: Its environment variables; by default those of this process.
          limit_s: After so many seconds it is killed; None: never.

        Raises:
          WorkerError: It cannot be started, ended, or does not answer.
          RefusedError: It could not load what ``setup`` names.
        """
        self.peak_bytes = None
        self._errors = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            self._errors.close()
            raise WorkerError(f"{command[0]} cannot be run: {error.strerror}") from error
        self._alarm = threading.Timer(limit_s or 0, self._end)
        self._limit_s: float | None = None  # that has passed
        if limit_s is not None:
            self._alarm.start()
        try:
            self.facts = self.ask(setup)
        except BaseException:
            self.close()
            raise

    def _end(self) -> None:
        self._limit_s = self._alarm.interval
        self._process.kill()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends one request and waits for its answer.

        Raises:
          WorkerError: The process ended, or wrote something else to stdout.
          RefusedError: It could not do this.
        """
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            if self._limit_s is not None:
                raise WorkerError(f"its limit of {self._limit_s:.0f} s had passed")
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            why = said[-1] if said else "it wrote nothing to stderr"
            raise WorkerError(f"the process ended with exit code {code}: {why}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):  # of a wrapper around the interpreter, for example
            raise WorkerError(f"the process wrote {line.strip()[:60]!r} to stdout; expected JSON")
        if "error" in answer:
            raise RefusedError(answer["error"])
        self.peak_bytes = answer.pop("peak_bytes", None)
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._alarm.cancel()
        with contextlib.suppress(BrokenPipeError):  # it has ended, and left a request unread
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __exit__(self, *_) -> None:
        self.close()


def serve(load: Callable[[dict], tuple[dict, Answers]]) -> None:
    """Answers requests from stdin until it closes.

    Whatever else is printed meanwhile goes to stderr. An error of one request is its answer.

    Args:
      load: Takes the first request; returns the first answer, and what answers the others. To
        every answer the largest memory that the process has used so far is added,
        ``peak_bytes``, or None where the system does not say.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(make: Callable[[], dict]) -> None:
        try:
            value = make() | {"peak_bytes": peak_bytes()}
        except Exception as error:
            traceback.print_exc()
            value = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    facts, answer = load(json.loads(sys.stdin.readline()))
    reply(lambda: facts)
    for line in sys.stdin:
        reply(lambda: answer(json.loads(line)))
