"""Which step of a training run won, by how much, and how sure that is."""

import json

import numpy as np
import pytest
from scipy import stats as scipy_stats

from experiments.training.choice import EVALUATIONS, Evaluations, describe
from spec_jax.engine.stats import Stats

TAKEN = {20: (8, 9, 8, 7), 40: (4, 5, 4, 4), 60: (5, 5, 4, 4)}  # rounds of 12 tokens each


def rows(rounds):
    return [Stats(emitted=13, first=1, accepted=12 - n, bonus=n, rounds=n) for n in rounds]


def test_a_step_is_compared_with_the_next_best_prompt_by_prompt(tmp_path):
    first = Evaluations(tmp_path, ["prompts", 5])
    first.append(20, rows(TAKEN[20]))
    assert "step 20, the only one that was evaluated: tau 1.50" in describe(first.choice(20))
    with open(tmp_path / EVALUATIONS, "a", encoding="utf-8") as file:
        file.write('{"step": 40, "set')  # killed meanwhile
    again = Evaluations(tmp_path, ["prompts", 5])
    again.append(20, rows(TAKEN[20]))  # evaluated again after its checkpoint was lost
    for step in (40, 60):
        again.append(step, rows(TAKEN[step]))
    Evaluations(tmp_path, ["other prompts", 5]).append(50, rows((1, 1)))
    found = Evaluations(tmp_path, ["prompts", 5]).choice(40)
    assert (found["step"], found["other"], found["prompts"], found["evaluated"]) == (40, 60, 4, 3)
    assert found["tau"] == pytest.approx(48 / 17) and found["other_tau"] == pytest.approx(48 / 18)
    # The jackknife, written out.
    less = [36 / (17 - a) - 36 / (18 - b) for a, b in zip(TAKEN[40], TAKEN[60])]
    width = scipy_stats.t.ppf(0.975, 3) * np.std(less) * np.sqrt(3)
    middle = 48 / 17 - 48 / 18
    np.testing.assert_allclose(found["difference_interval"], [middle - width, middle + width])
    assert "step 60, not significant" in describe(found)
    assert "less than the best, step 40" in describe(again.choice(60))
    assert again.choice(30) is None, "it was not evaluated"
    json.dumps(found, allow_nan=False)
