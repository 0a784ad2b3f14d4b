"""Rewards for tests of ``experiments.rl``, named as ``support.rl_rewards:NAME``."""

import math
import os
import pathlib
import signal


def small_ids(prompt, output):
    """The share of ids below 100, which any model can learn."""
    assert all(type(i) is int for i in (*prompt, *output))
    return sum(i < 100 for i in output) / len(output)


def nothing(prompt, output):
    return math.nan


def raises(prompt, output):
    raise LookupError("no such answer")


def kills(prompt, output):
    """As ``small_ids``, in a process that is killed once, at the 20th output."""
    calls = pathlib.Path(os.environ["RL_CALLS"])
    with open(calls, "ab") as file:
        file.write(b".")
    if calls.stat().st_size == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return small_ids(prompt, output)
