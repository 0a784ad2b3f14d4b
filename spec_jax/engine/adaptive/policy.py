"""How many tokens to draft next: from what was accepted lately and what rounds cost.

Everything here is plain numbers on the host, a value in and a value out; ``pace`` runs it beside
the device. K depends on finished rounds alone, so the law of the output stays what it is.

Estimate. ``rates[i]`` is the chance that draft i + 1 is accepted once those before it are, from
counts that forget. It is pulled towards the rate of the position before, so positions that were
never drafted take the last known one. A draft that a row did not offer counts as not accepted.

Choice. The K of the most tokens a millisecond, ``E(K) / T(K)`` with ``E(K) = 1 + sum_i
prod_{j<=i} rates[j]``; the whole batch has one K, and all rows share the counts. The current K
stays unless another is better by more than ``HYSTERESIS``.

Exploration. What lies beyond the current K is not seen (at K = 0 nothing is), so the next larger
K is tried now and then: as soon as ``EXPLORED_SHARE`` of the time spent pays for the trial, should
none of its drafts be accepted.

Source: the marginal rule and its costs follow Leviathan et al., arXiv 2211.17192, theorem 3.8,
with a rate for each position and a measured time for each K.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

DECAY = 0.98  # of the counts, a round
FLOOR = 8.0  # rounds that the counts of positions no longer drafted still weigh
PRIOR_RATE = 0.7  # before anything is known
PRIOR_ROUNDS = 16.0  # that the prior weighs at first; it is forgotten like what is seen
PULL_ROUNDS = 4.0  # that the rate of the position before weighs
HYSTERESIS = 0.02
EXPLORED_SHARE = 0.01
SHORTEST, LONGEST = 4, 32  # rounds until the next choice; doubled while K stays


class Costs(NamedTuple):
    """What was measured of one batch size, in milliseconds.

    Attributes:
      round_ms: of a round, by K.
      replay_ms: of one pass over what rounds without drafts have left to the draft.
      replay_width: tokens of such a pass.
    """

    round_ms: Mapping[int, float]
    replay_ms: float = 0.0
    replay_width: int = 1

    def replay(self, backlog: int) -> float:
        """Of bringing a draft up that is so many tokens behind."""
        return self.replay_ms * -(-backlog // self.replay_width)


class Plan(NamedTuple):
    """What to run next."""

    num_draft: int
    rounds: int


@dataclasses.dataclass(frozen=True)
class Tuner:
    """What is known, and what was chosen last.

    Attributes:
      reached, accepted: discounted counts by position.
      settled: the K that was found best; None before the first choice.
      rounds: of the last choice.
      credit_ms: time that may be spent on trials.
    """

    reached: tuple[float, ...]
    accepted: tuple[float, ...]
    settled: int | None = None
    rounds: int = SHORTEST
    credit_ms: float = 0.0

    @classmethod
    def fresh(cls, most: int) -> Tuner:
        """One that has seen nothing, for K up to ``most``."""
        unseen = (0.0,) * (most - 1)
        return cls((PRIOR_ROUNDS, *unseen), (PRIOR_RATE * PRIOR_ROUNDS, *unseen))

    @property
    def rates(self) -> tuple[float, ...]:
        """Estimated conditional acceptance by position."""
        rates = [self.accepted[0] / self.reached[0]]
        for reached, accepted in zip(self.reached[1:], self.accepted[1:]):
            rates.append((accepted + PULL_ROUNDS * rates[-1]) / (reached + PULL_ROUNDS))
        return tuple(rates)

    def choose(self, costs: Costs, backlog: int = 0) -> tuple[Plan, Tuner]:
        """The next K among those that costs are known of, and for how many rounds.

        Args:
          costs: of this batch size.
          backlog: tokens that the draft is behind.
        """
        tokens = expected_tokens(self.rates)
        speed = {k: tokens[k] / ms for k, ms in costs.round_ms.items()}
        settled = self.settled
        if settled is None and len(speed) > 1:
            speed.pop(0, None)  # begin by drafting: plain decoding shows nothing
        best = max(speed, key=speed.get)
        if settled not in speed or speed[best] > (1 + HYSTERESIS) * speed[settled]:
            settled = best
        is_new = settled != self.settled
        rounds = SHORTEST if is_new else min(2 * self.rounds, LONGEST)
        time_ms = costs.round_ms[settled]
        larger = [k for k in costs.round_ms if k > settled]
        if larger and not is_new:
            trial = min(larger)
            loss = SHORTEST * max(costs.round_ms[trial] - time_ms, 0.0) + costs.replay(backlog)
            if loss <= self.credit_ms:
                # The rounds begin anew, so that what a trial shows is soon looked at.
                after = dataclasses.replace(
                    self, credit_ms=self.credit_ms - loss, rounds=SHORTEST
                )
                return Plan(trial, SHORTEST), after
        chosen = dataclasses.replace(self, settled=settled, rounds=rounds)
        return Plan(settled, rounds), chosen

    def observe(
        self, num_draft: int, rounds: int, row_rounds: int, accepted_at: Sequence[int],
        time_ms: float,
    ) -> Tuner:
        """Takes in what a plan has shown.

        Args:
          num_draft: K.
          rounds: that were run.
          row_rounds: the same, counted for each row that was active.
          accepted_at: drafts accepted, by position, of all rows.
          time_ms: that the rounds cost.
        """  # fmt: skip
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
            self, reached=tuple(reached), accepted=tuple(accepted), credit_ms=credit_ms
        )


def _faded(keep: float, reached: float) -> float:
    """The share of old counts that stays without new ones: down to ``FLOOR``, no further."""
    return max(keep, min(1.0, FLOOR / reached)) if reached else 1.0


def expected_tokens(rates: Sequence[float]) -> tuple[float, ...]:
    """E(K) for K = 0 .. len(rates): tokens that a round emits, the target's own included."""
    tokens, reach = [1.0], 1.0
    for rate in rates:
        reach *= rate
        tokens.append(tokens[-1] + reach)
    return tuple(tokens)
