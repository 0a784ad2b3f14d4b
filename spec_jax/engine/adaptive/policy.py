"""Chooses how many tokens to draft next, from recent acceptance and from measured round times.

Everything here is plain numbers on the host: pure functions of values. ``AdaptiveRunner`` runs it
beside the device. K depends on finished rounds alone, so the output keeps its distribution.

Estimate. ``rates[i]`` is the probability that draft i + 1 is accepted once those before it are,
from counts that decay. It is pulled towards the rate of the position before, so that positions
which were never drafted take the last known rate. A draft that a row did not offer counts as
rejected; one that a limit or a stop token cut, or that would have passed the drafter's maximum
length, does not count.

Choice. The K with the most tokens a millisecond, ``E(K) / T(K)`` with ``E(K) = 1 + sum_i
prod_{j<=i} rates[j]``. The whole batch has one K, and all rows share the counts. The current K is
kept unless another is better by more than ``HYSTERESIS``.

Exploration. Acceptance beyond the current K is not observed (at K = 0 nothing is), so the next
larger K is tried now and then: as soon as ``EXPLORED_SHARE`` of the time spent would pay for a
trial in which no draft is accepted.

Source: the marginal rule and its costs follow Leviathan et al., arXiv 2211.17192, theorem 3.8,
with a rate for each position and a measured time for each K.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

DECAY = 0.98  # of the counts, per round
FLOOR = 8.0  # counts of positions that are no longer drafted decay down to so many rounds
PRIOR_RATE = 0.7  # before anything is observed
PRIOR_ROUNDS = 16.0  # initial weight of the prior, which decays as observations do
PULL_ROUNDS = 4.0  # weight of the rate of the position before
HYSTERESIS = 0.02
EXPLORED_SHARE = 0.01
# until the next choice; doubled while K stays
MIN_ROUNDS = 4
MAX_ROUNDS = 32


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


@dataclasses.dataclass(frozen=True)
class Tuner:
    """What has been observed, and the last choice.

    Attributes:
      reached, accepted: decayed counts by position.
      settled: the K that was found best; None before the first choice.
      rounds: how many rounds the last choice was for.
      credit_ms: time that may be spent on trials.
      num_updates: how often it has observed; part of the noise of what it chooses (see ``rng``).
    """

    reached: tuple[float, ...]
    accepted: tuple[float, ...]
    settled: int | None = None
    rounds: int = MIN_ROUNDS
    credit_ms: float = 0.0
    num_updates: int = 0

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
        settled = max(speed, key=speed.get)
        if self.settled in speed and speed[settled] <= (1 + HYSTERESIS) * speed[self.settled]:
            settled = self.settled
        is_new = settled != self.settled
        rounds = MIN_ROUNDS if is_new else min(2 * self.rounds, MAX_ROUNDS)
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

    def observe(
        self,
        num_draft: int,
        rounds: int,
        reached_at: Sequence[int],
        accepted_at: Sequence[int],
        time_ms: float,
    ) -> Tuner:
        """Returns the tuner after the rounds of a plan have been observed.

        Args:
          num_draft: K.
          rounds: how many rounds were run.
          reached_at: rounds by position, summed over rows, in which the drafts before it were
            accepted and it was decided whether the one there is, see ``runner.drafts_since``.
          accepted_at: accepted drafts by position, summed over rows.
          time_ms: time that the rounds took.
        """
        keep = DECAY**rounds
        reached = []
        accepted = []
        for i, (old, kept) in enumerate(zip(self.reached, self.accepted)):
            if i < num_draft:
                share = keep
                new_reached = reached_at[i]
                new_accepted = accepted_at[i]
            else:
                # Without new counts they fade down to FLOOR, and no further.
                share = max(keep, min(1.0, FLOOR / old)) if old else 1.0
                new_reached = 0
                new_accepted = 0
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


def expected_tokens(rates: Sequence[float]) -> tuple[float, ...]:
    """Expected tokens of a round for K = 0 .. len(rates), the target's own token included.

    Args:
      rates: conditional acceptance rates by position.
    """
    reach = itertools.accumulate(rates, operator.mul, initial=1.0)
    return tuple(itertools.accumulate(reach))
