"""Chooses how many tokens to draft next, from recent acceptance and from measured round times.

Everything here is plain numbers on the host: pure functions of values. ``AdaptiveRunner`` runs it
beside the device. K depends on finished rounds alone, so the output keeps its distribution.

Estimate. ``rates[i]`` is the probability that draft i + 1 is accepted once those before it are,
from counts that decay. It is pulled towards the rate of the position before, so that positions
which were never drafted take the last known rate. A draft that a row did not offer counts as
rejected.

Choice. The K with the most tokens a millisecond, ``E(K) / T(K)`` with ``E(K) = 1 + sum_i
prod_{j<=i} rates[j]``. The whole batch has one K, and all rows share the counts. The current K is
kept unless another is better by more than ``HYSTERESIS``.

Outlook. A drafter that estimates how probably its drafts are accepted (``Proposal.confidence``) may
see sooner than the counts do that the text has become harder. What it expected in the latest rounds
over what it expected in all counted ones multiplies the probability to get that far, so an estimate
that is wrong by a constant factor changes nothing. Whether to draft at all is decided by the counts
alone: at K = 0 nothing is estimated.

Exploration. Acceptance beyond the current K is not observed (at K = 0 nothing is), so the next
larger K is tried now and then: as soon as ``EXPLORED_SHARE`` of the time spent would pay for a
trial in which no draft is accepted.

Source: the marginal rule and its costs follow Leviathan et al., arXiv 2211.17192, theorem 3.8,
with a rate for each position and a measured time for each K.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

DECAY = 0.98  # of the counts, per round
FLOOR = 8.0  # counts of positions that are no longer drafted decay down to so many rounds
PRIOR_RATE = 0.7  # before anything is observed
PRIOR_ROUNDS = 16.0  # initial weight of the prior, which decays as observations do
PULL_ROUNDS = 4.0  # weight of the rate of the position before
HYSTERESIS = 0.02
EXPLORED_SHARE = 0.01
MIN_ROUNDS, MAX_ROUNDS = 4, 32  # until the next choice; doubled while K stays
RECENT_DECAY = 0.5  # per round, of what was expected in the latest rounds
RECENT_COUNTS = 0.5  # of the usual expectation among these
SHIFT = 0.1  # a change of the first draft's outlook after which K is chosen again soon


class RoundCosts(NamedTuple):
    """Measured times for one batch size.

    Attributes:
      round_ms: time of a round, by K.
      catch_up_ms: time of one pass over tokens that the draft has skipped.
      catch_up_width: tokens of such a pass.
    """

    round_ms: Mapping[int, float]
    catch_up_ms: float = 0.0
    catch_up_width: int = 1

    def of_lag(self, lag: int) -> float:
        """Time in ms in which a draft that lags by so many tokens catches up."""
        return self.catch_up_ms * -(-lag // self.catch_up_width)


class Plan(NamedTuple):
    """K of the next rounds, and how many of them to run."""

    num_draft: int
    rounds: int


class Means(NamedTuple):
    """Means by position of what has been added, in which older values count less."""

    sums: tuple[float, ...]
    counts: tuple[float, ...]

    def add(self, keep: float, count: float, sums: Sequence[float]) -> Means:
        """Returns the means after ``count`` values more at the first positions."""
        new = zip(self.sums, itertools.chain(sums, itertools.repeat(0.0)))
        counts = (keep * c + count * (i < len(sums)) for i, c in enumerate(self.counts))
        return Means(tuple(keep * old + more for old, more in new), tuple(counts))

    def at(self, i: int, prior: float = 0.0, weight: float = 0.0) -> float:
        """Returns the mean at a position, with a prior of a weight."""
        count = self.counts[i] + weight
        return (self.sums[i] + weight * prior) / count if count > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Tuner:
    """What has been observed, and the last choice.

    Attributes:
      reached, accepted: decayed counts by position.
      settled: the K that was found best; None before the first choice.
      rounds: how many rounds the last choice was for.
      credit_ms: time that may be spent on trials.
      num_updates: how often it has observed; part of the noise of what it chooses (see ``rng``).
      outlook: what the drafter expected to be accepted at each position, in all counted rounds and
        in the latest ones.
    """

    reached: tuple[float, ...]
    accepted: tuple[float, ...]
    settled: int | None = None
    rounds: int = MIN_ROUNDS
    credit_ms: float = 0.0
    num_updates: int = 0
    outlook: tuple[Means, Means] | None = None

    @classmethod
    def fresh(cls, max_draft: int) -> Tuner:
        """Returns a tuner without observations, for K up to ``max_draft``."""
        unseen = (0.0,) * (max_draft - 1)
        return cls((PRIOR_ROUNDS, *unseen), (PRIOR_RATE * PRIOR_ROUNDS, *unseen))

    @property
    def rates(self) -> tuple[float, ...]:
        """Estimated conditional acceptance rates by position."""
        rates = [self.accepted[0] / self.reached[0]]
        for reached, accepted in zip(self.reached[1:], self.accepted[1:]):
            rates.append((accepted + PULL_ROUNDS * rates[-1]) / (reached + PULL_ROUNDS))
        return tuple(rates)

    @property
    def lifts(self) -> tuple[float, ...]:
        """By position, the latest outlook over the usual one; of unseen ones that before."""
        lifts, (usual, latest) = [1.0], self.outlook
        for i in range(len(self.reached)):
            mean = usual.at(i)
            lifts.append(
                latest.at(i, mean * lifts[-1], RECENT_COUNTS) / mean if mean > 0 else lifts[-1]
            )
        return tuple(lifts[1:])

    def choose(self, costs: RoundCosts, lag: int = 0) -> tuple[Plan, Tuner]:
        """Chooses the next K among those in ``costs``, and for how many rounds.

        Args:
          costs: times of this batch size.
          lag: tokens that the draft has skipped.

        Returns:
          What to run next, and the tuner after this choice.
        """
        tokens = expected_tokens(self.rates)
        speed = {k: tokens[k] / ms for k, ms in costs.round_ms.items()}
        if self.settled is None and len(speed) > 1:
            speed.pop(0, None)  # begin by drafting: plain decoding teaches nothing
        settled, is_shifted = self._best(speed), False
        if settled > 0 and self.outlook is not None:
            tokens = expected_tokens(self.rates, self.lifts)
            speed = {k: tokens[k] / ms for k, ms in costs.round_ms.items() if k > 0}
            settled, is_shifted = self._best(speed), abs(self.lifts[0] - 1) > SHIFT
        is_new = settled != self.settled
        is_short = is_new or is_shifted
        rounds = MIN_ROUNDS if is_short else min(2 * self.rounds, MAX_ROUNDS)
        time_ms = costs.round_ms[settled]
        larger = [k for k in costs.round_ms if k > settled]
        if larger and not is_new:
            trial = min(larger)
            loss = MIN_ROUNDS * max(costs.round_ms[trial] - time_ms, 0.0) + costs.of_lag(lag)
            if loss <= self.credit_ms:
                # Rounds start short again, so that the trial's result is used soon.
                after = dataclasses.replace(
                    self, credit_ms=self.credit_ms - loss, rounds=MIN_ROUNDS
                )
                return Plan(trial, MIN_ROUNDS), after
        chosen = dataclasses.replace(self, settled=settled, rounds=rounds)
        return Plan(settled, rounds), chosen

    def _best(self, speed: Mapping[int, float]) -> int:
        """The K of the highest speed, or the settled one if that is clearly no faster."""
        best, settled = max(speed, key=speed.get), self.settled
        is_better = settled not in speed or speed[best] > (1 + HYSTERESIS) * speed[settled]
        return best if is_better else settled

    def expect(self, rounds: int, row_rounds: int, expected_at: Sequence[float]) -> Tuner:
        """Returns the tuner after it was told what the drafter expected of some rounds.

        Args:
          rounds: how many rounds were run.
          row_rounds: the same, summed over the rows that were active.
          expected_at: drafts that were expected to be accepted, by position, summed over rows; of
            as many positions as were drafted.
        """
        none = (0.0,) * len(self.reached)
        before = self.outlook or (Means(none, none), Means(none, none))
        outlook = tuple(
            means.add(decay**rounds, row_rounds, expected_at)
            for means, decay in zip(before, (DECAY, RECENT_DECAY))
        )
        return dataclasses.replace(self, outlook=outlook)

    def observe(
        self,
        num_draft: int,
        rounds: int,
        row_rounds: int,
        accepted_at: Sequence[int],
        time_ms: float,
    ) -> Tuner:
        """Returns the tuner after the rounds of a plan have been observed.

        Args:
          num_draft: K.
          rounds: how many rounds were run.
          row_rounds: the same, summed over the rows that were active.
          accepted_at: accepted drafts by position, summed over rows.
          time_ms: time that the rounds took.
        """
        keep = DECAY**rounds
        reached, accepted = [], []
        news = list(itertools.pairwise((row_rounds, *accepted_at[:num_draft])))
        for i, (old, kept) in enumerate(zip(self.reached, self.accepted)):
            if i < num_draft:
                share, (new_reached, new_accepted) = keep, news[i]
            else:
                share, new_reached, new_accepted = _faded(keep, old), 0, 0
            reached.append(share * old + new_reached)
            accepted.append(share * kept + new_accepted)
        credit_ms = self.credit_ms + EXPLORED_SHARE * time_ms
        return dataclasses.replace(
            self,
            reached=tuple(reached),
            accepted=tuple(accepted),
            credit_ms=credit_ms,
            num_updates=self.num_updates + 1,
        )


def _faded(keep: float, reached: float) -> float:
    """The share of old counts that is kept without new ones: down to ``FLOOR``, no further."""
    return max(keep, min(1.0, FLOOR / reached)) if reached else 1.0


def expected_tokens(rates: Sequence[float], lifts: Sequence[float] = ()) -> tuple[float, ...]:
    """Expected tokens of a round for K = 0 .. len(rates), the target's own token included.

    Args:
      rates: conditional acceptance rates by position.
      lifts: what the probability to get so far is multiplied by; none: 1.
    """
    tokens, reach, least = [1.0], 1.0, 1.0
    for i, rate in enumerate(rates):
        reach *= rate
        least = min(least, reach * lifts[i]) if lifts else reach
        tokens.append(tokens[-1] + least)
    return tuple(tokens)
