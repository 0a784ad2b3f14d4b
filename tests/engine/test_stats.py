"""Statistics count what was decided: drafts that an end cut are in no rate."""

from __future__ import annotations

import numpy as np
import pytest

from spec_jax.decoding import Finish, Kind
from spec_jax.engine.stats import Stats, row_stats


def decoded(rng, rate, num_draft, limit, stop_rate=0.0):
    """Kinds, drafts offered and ``Finish`` of a row whose text ends by a limit or a stop token."""
    end = limit
    for place in range(limit):  # the text does not depend on the drafts
        if rng.random() < stop_rate:
            end = place + 1
            break
    kinds, offered = [Kind.FIRST], [-1]
    while len(kinds) < end:
        n = num_draft if rng.random() < 0.9 else num_draft // 2
        is_right = rng.random(n) < rate
        accepted = int(np.cumprod(is_right).sum())
        new = [*[Kind.ACCEPTED] * accepted, Kind.BONUS if accepted == n else Kind.CORRECTED]
        new = new[: end - len(kinds)]
        offered += [n, *[-1] * (len(new) - 1)]
        kinds += new
    finish = Finish.LENGTH if end == limit else Finish.STOP_TOKEN
    return np.asarray(kinds, np.int8), np.asarray(offered, np.int16), finish


@pytest.mark.parametrize("limit, stop_rate", [(4, 0.0), (7, 0.2), (30, 0.1)])
def test_rates_do_not_depend_on_where_rows_end(limit, stop_rate):
    """Of drafts that are right with one probability, also in rows far shorter than a round."""
    rng, K, rate, total = np.random.default_rng(0), 6, 0.8, Stats()
    for _ in range(300):
        kind, offered, finish = decoded(rng, rate, K, limit, stop_rate)
        total += row_stats(kind, offered, K, finish=finish)
    assert total.offered_at == tuple(np.add(total.drafted_at, total.cut_at))
    for i, count in enumerate(total.drafted_at):
        found, expected = total.unconditional_acceptance_by_position[i], rate ** (i + 1)
        if i < limit - 1:
            assert abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / count)
        else:
            assert count == 0 and np.isnan(found)


def test_a_row_that_a_fault_or_a_cancellation_stopped_has_no_end_that_cuts():
    k = Kind
    kind, offered = np.array([k.FIRST, k.ACCEPTED, k.CORRECTED]), np.array([-1, 4, -1])
    for finish in (Finish.CANCELLED, Finish.NAN_TARGET, Finish.RUNNING):
        assert row_stats(kind, offered, 4, finish=finish).drafted_at == (1, 1, 1, 1)
    for finish in (Finish.LENGTH, Finish.STOP_TOKEN, Finish.STOP_STRING):
        stats = row_stats(kind, offered, 4, finish=finish)
        assert stats.drafted_at == (1, 1, 0, 0) and stats.cut_at == (0, 0, 1, 1)


def test_rounds_without_drafts_past_the_drafters_length_are_counted():
    """Not those before it, in which a drafter has nothing to offer."""
    k = Kind
    kind = np.array([k.FIRST, k.BONUS, k.ACCEPTED, k.BONUS, k.BONUS, k.BONUS])
    offered = np.array([-1, 0, 1, -1, 0, 0])
    for until, count in ((np.inf, 0), (5, 0), (4, 1), (3, 2), (0, 3)):
        assert row_stats(kind, offered, 1, drafted_until=until).undrafted_rounds == count
    stats = row_stats(kind, offered, 1, drafted_until=3)
    assert "past the draft's maximum length 2 rounds" in repr(stats + stats.__class__())
    assert "past the draft" not in repr(Stats()) and stats.to_dict()["undrafted_rounds"] == 2
