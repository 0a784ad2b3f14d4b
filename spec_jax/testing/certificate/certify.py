"""One certificate for a rule and a drafter, or for a target."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spec_jax.config import SuffixConfig
from spec_jax.contracts import Drafter, Memory, Processor, Rule
from spec_jax.decoding import System
from spec_jax.drafters.suffix import History, suffix
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel
from spec_jax.named import to_rule, to_target
from spec_jax.progress import Progress
from spec_jax.testing.certificate import forcing, states, subjects
from spec_jax.testing.certificate.loop import Loop, check_texts, joint, near_target
from spec_jax.testing.certificate.records import (
    TOLERANCE,
    Certificate,
    CertificateError,
    Check,
    ProposalError,
    Range,
    TargetCertificate,
    settings_of,
)
from spec_jax.testing.certificate.rounds import check_round, one_by_one
from spec_jax.testing.certificate.subjects import Subject
from spec_jax.testing.certificate.target import certify_target

MAX_DRAFT = 4
_MAX_OUTCOMES = 400_000  # of one enumeration
_DRAWS = 2048  # of a drafter under each setting
_PLACES = 300  # of each setting, in a batch of the loop
_FOLLOWED = 200  # of these, whose tokens are compared one by one with their distributions
_ROUNDS = 2  # after which the states are compared, and again at the end
_CELLS = 700  # of a chi-square test
_REMEMBERED = 31  # tokens of past outputs
_LENGTH = 8  # tokens that the loop decodes after the first, of all settings
_WITH_CONFIDENCE = 3  # K of the rounds in which drafts come with a confidence
_TEXT = 40  # and of one setting, with a target near the draft
_TEXT_DRAFTS = (4, 2, 1)  # K with such a target
_TEXT_SETTING = 1  # which of the settings


def certify(
    rule: Rule | Callable[[], Rule] | str | None = None,
    drafter: Drafter | Callable[[LoadedModel], Drafter] | str | None = None,
    *,
    target: LoadedModel | Callable[[], LoadedModel] | str | None = None,
    logits: Callable[[Any, jax.Array], jax.Array] | None = None,
    params: Any = None,
    draft_distribution: forcing.DraftDistribution | None = None,
    trials: int = 4_000,
    seed: int = 0,
    has_memory: bool = False,
    processors: Sequence[Processor] = (),
) -> Certificate | TargetCertificate:
    """Certifies that decoding with a rule and a drafter keeps the target's distribution.

    With ``target`` a model is certified instead, see ``certify_target``.

    The target is a toy of few tokens. The drafts, coins and last tokens of rounds of 1 to 4 drafts
    are enumerated through the functions that the decoder calls, under twenty-two settings of the
    sampling parameters, with tokens that are nearly certain and others that underflow float32 (see
    ``Certificate.p`` and ``q``); the compiled loop is tested by chi-square, and the drafter's draws
    are compared with the distributions that it reports. With 1, 2 and 4 drafts the loop also
    decodes long texts for a target near the draft, which are tested token by token, with those of
    neighbouring seeds, and after each round. A drafter with a memory decodes prompts again with the
    same seeds, after it has learned from them. The certificate says what was proved and what was
    not.

    Example:
      ```python
      import spec_jax

      print(spec_jax.certify(rule="residual", trials=1_000))  # half a minute
      ```

    Args:
      rule: a ``Rule``, a function that returns one, the name of one of the package, or
        ``module:NAME``; by default "residual".
      drafter: a ``Drafter``, a function of the target that returns one, or ``module:NAME`` of
        either. A function is called with small targets; a ``Drafter`` keeps its own vocabulary. By
        default a toy draft model is used, and to certify the rule also a deterministic drafter and
        a tree.
      target: a model to certify instead: a ``LoadedModel``, a function that returns one,
        ``module:NAME`` of either, or what ``load_model`` takes.
      logits: the target's logits, computed without a cache, see ``certify_target``.
      params: the drafter's parameters, if it has any, a function that makes them for a target, or
        its ``Memory``, empty.
      draft_distribution: ``(row, output, drafted) -> f64[V]``, the distribution that the next draft
        should have, computed another way. Without it the drafter's own report is compared with its
        draws.
      trials: sequences that the loop decodes for each setting.
      seed: of the toy parameters.
      processors: of logits, for target and draft in all settings, see ``SamplerConfig.processors``.
      has_memory: the drafter's state depends on more than the text, such as on what was accepted
        or rejected before, so it is not compared with the state after a prefill of the text.

    Returns:
      The certificate; print it.

    Raises:
      CertificateError: a check fails. Where a distribution differs, the message names the shortest
        text after which a token has another probability than it should. ``error.certificate`` has
        the checks that passed before.
      ConfigError: there is no such rule or drafter, or it cannot be certified with small models.
    """
    if target is not None:
        if rule is not None or drafter is not None:
            raise ConfigError("target is given, and a rule or a drafter; certify one after another")
        if params is not None or draft_distribution is not None or processors:
            raise ConfigError(
                "params, draft_distribution and processors are for rules and drafters"
            )
        return certify_target(to_target(target), logits, seed=seed)
    if logits is not None:
        raise ConfigError("logits are compared with those of a target; give target=")
    run = _Run(
        to_rule("residual" if rule is None else rule),
        drafter,
        params,
        draft_distribution,
        trials,
        seed,
        has_memory,
        tuple(processors),
    )
    with Progress(len(run.steps), "certify", every_s=5.0) as progress:
        for what, step in run.steps:
            progress.now(what)
            try:
                step()
            except CertificateError as error:
                error.certificate = run.certificate(str(error))
                raise
            progress.step(what)
    return run.certificate(None)


@dataclasses.dataclass
class _Run:
    """The checks of one certificate, cheap ones first; the fields are arguments of ``certify``."""

    rule: Rule
    drafter: Any = None
    params: Any = None
    stated: forcing.DraftDistribution | None = None
    trials: int = 1
    seed: int = 0
    has_memory: bool = False
    processors: tuple[Processor, ...] = ()

    def __post_init__(self):
        rule = self.rule
        drafter = self.drafter
        # A new function: see ``make_subject``.
        self.rule = rule._replace(accept=lambda *args: rule.accept(*args))
        self.rows = subjects.certified_rows(is_greedy=rule.is_greedy, processors=self.processors)
        self.memory = self.params if isinstance(self.params, Memory) else None
        params = self.params if self.memory is None else self.memory.params
        self.main = subjects.make_subject(drafter, params, self.seed)
        self.others = [] if drafter is not None else subjects.other_drafters(rule, self.main)
        self.padded = None
        if not isinstance(drafter, Drafter) or drafter.vocab_size is None:
            self.padded = subjects.make_subject(drafter, params, self.seed, is_padded=True)
        # What it remembers is out of reach, and changes from one call to the next.
        self.is_hidden = self.main.drafter.memory is not None and self.memory is None
        self.has_memory |= self.is_hidden
        self.toy = self.main if drafter is None else subjects.make_subject(None, None, self.seed)
        self._near: Subject | None = None  # the drafter with a target near it
        self.is_gumbel_max = True  # the rule's last token, with the noise that it is given
        self.is_forced = True  # the drafter draws with Context.gumbel
        self.checks: list[Check] = []
        self._since = time.perf_counter()
        self.not_proved: list[str] = []
        self.num_drafts: set[int] = set()
        self.p: list[Range] = []  # of the target's distributions
        self.q: list[Range] = []  # of the drafters'
        self.is_coupled = rule.is_coupled or rule.is_greedy
        self.steps = self._all_steps()

    def _add(self, what: str, method: str, **results: Any) -> None:
        """Records a check that has passed."""
        now = time.perf_counter()
        self.checks.append(Check(what, method, **results, seconds=now - self._since))
        self._since = now

    def _all_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """Returns what is checked. A rule that emits plain decoding's tokens is not enumerated."""
        main = self.main
        tree = main.drafter.shape.tree
        steps = []

        def add(what, function, *args):
            steps.append((what, functools.partial(function, *args)))

        if self.is_coupled:
            for subject in (main, *self.others, *filter(None, [self.padded])):
                add(subject.drafter.name, self._loop, subject)
        else:
            for k in range(1, MAX_DRAFT + 1) if tree is None else [tree.num_nodes]:
                add(f"{k} drafts", self._enumerate, main, k)
                if len(steps) == 1 and main.drafter.is_sampled:
                    add("draws of the drafter", self._draws)
            for subject in self.others:
                add(f"drafts of {subject.drafter.name}", self._enumerate, subject, MAX_DRAFT)
            if self.padded is not None:
                add("a padded vocabulary", self._pad)
            if main.drafter.memory is not None or self.others:
                add("a memory", self._memory)
            add("the compiled loop", self._loop, main)
        ks = _TEXT_DRAFTS if tree is None else (tree.num_nodes,)
        for k in ks:
            add(f"texts with {k} drafts", self._text, k, k == ks[-1])
        return steps

    def _enumerate(self, subject: Subject, num_draft: int) -> None:
        """Enumerates a round after many texts; of the toy drafter if drafts cannot be forced."""
        if subject is self.main and self.is_forced:
            self.is_forced = self._enumerate_forced(subject, num_draft)
            if self.is_forced:
                return
        subject = self.toy if subject is self.main else subject
        if not self._enumerate_forced(subject, num_draft):
            name = subject.drafter.name
            raise CertificateError(f"drafter {name!r} does not draw with Context.gumbel")

    def _enumerate_forced(self, subject: Subject, num_draft: int) -> bool:
        """Returns whether the drafter draws with ``Context.gumbel``, so that drafts are forced."""
        system = subject.system(self.rule, num_draft)
        K = system.num_draft
        V = system.target.vocab_size
        name = subject.drafter.name
        drafts = V ** min(K, 8) if system.drafter.is_sampled else 1  # an upper bound
        each = drafts * 2**K * V
        starts = [subjects.prefixes(subject, len(self.rows), size) for size in (3, 2, 1, 0)]
        starts = [x for x in starts if each * len(x) <= _MAX_OUTCOMES]
        if not starts:
            self.not_proved.append(
                f"{K} drafts of {name}: a round has up to {each:,} outcomes, too many to enumerate"
            )
            return True
        drafting = forcing.Drafting(system, subject.params, self.rows)
        forced = forcing.force_all(drafting, starts[0], self.stated)
        if forced is None:
            return False
        try:
            forcing.check_report(drafting, forced)
        except CertificateError:
            if subject is self.main:
                self._draws()  # says by how much, if it can tell
            raise
        self.num_drafts.add(K)
        is_cut = num_draft == MAX_DRAFT or system.drafter.shape.tree is not None
        check = functools.partial(check_round, system, rows=self.rows, logits_of=subject.logits_of)
        proposal = forced.proposal
        if num_draft == _WITH_CONFIDENCE and proposal.parents is None and system.drafter.is_sampled:
            forced = forced if proposal.confidence is not None else forcing.with_confidence(forced)
        if num_draft == 2 and subject is not self.padded and forced.proposal.probs is not None:
            self._misreport(check, forced)
        comparisons = [
            check(some) for some in (forcing.mixed_lengths(forced) if is_cut else [forced])
        ]
        self.p += [x.p for x in comparisons]
        q = forcing.report_range(forced, drafting.parents)
        self.q += [] if q is None else [q]
        drafts = f"0 to {K} of {K} drafts" if is_cut else f"{K} draft{'s' * (K > 1)}"
        padding = ", whose target pads its vocabulary" if subject is self.padded else ""
        what = f"{drafts} of {name}{padding}"
        error = max(x.error for x in comparisons)
        count = sum(x.num_outcomes for x in comparisons)
        p_values = [x.p_value for x in comparisons if x.p_value is not None]
        self.is_gumbel_max &= not p_values
        p_value = min(1.0, min(p_values) * len(p_values)) if p_values else None
        self._add(what, "enumeration", error=error, p_value=p_value, trials=count)
        return True

    def _pad(self) -> None:
        """A target whose last ids only pad its vocabulary."""
        try:
            self._enumerate(self.padded, 2)
        except ProposalError as error:
            self.not_proved.append(
                "a padded vocabulary: ids after target.model.last_id are no tokens, and the "
                f"decoder stops a row that is offered one; {error}"
            )

    def _memory(self) -> None:
        """Calls with the same prompts and seeds, between which a drafter has learned."""
        subject = self.main
        memory = self.memory
        if subject.drafter.memory is None:  # a rule is certified: with one that has
            memory = History(_REMEMBERED)
            drafter = suffix(subjects.NUM_TOKENS, SuffixConfig(history_tokens=_REMEMBERED))
            subject = dataclasses.replace(subject, drafter=drafter)
        system = subject.system(self.rule, 2)
        p_value, count = states.certify_memory(system, subject.params, memory)
        what = f"calls with the same seeds, from whose outputs {subject.drafter.name} had learned"
        self._add(what, "chi-square", p_value=p_value, trials=count)

    def _misreport(self, check: Callable[..., Any], forced: forcing.Forced) -> None:
        """Checks that the enumeration detects a wrong report, if the rule reads it."""
        flat = np.sqrt(forced.proposal.probs)
        flat /= np.maximum(flat.sum(axis=2, keepdims=True), 1e-9)
        wrong = forced._replace(proposal=forced.proposal.replace(probs=flat))
        comparison = check(wrong, tolerance=np.inf)
        unread = "" if comparison.error > TOLERANCE else ", which this rule does not read"
        what = f"a report of q at another temperature than drawn{unread}"
        self._add(what, "control", error=comparison.error, trials=comparison.num_outcomes)

    def _draws(self) -> None:
        """The draws of the drafter, with noise of its own, against what it reports."""
        system = self.main.system(self.rule, MAX_DRAFT)
        drafting = forcing.Drafting(system, self.main.params, self.rows)
        starts = subjects.prefixes(self.main, len(self.rows), 0)
        p_value, count = forcing.check_draws(drafting, starts, _DRAWS)
        what = f"draws of {self.main.drafter.name} against what it reports"
        self._add(what, "chi-square", p_value=p_value, trials=count)

    def _loop(self, subject: Subject) -> None:
        """The compiled loop: its tokens, the drafter's states, the places of the rows."""
        system = subject.system(self.rule, MAX_DRAFT)
        loop = self._make_loop(subject, system, _LENGTH)
        of = np.tile(np.arange(len(self.rows)), _PLACES)
        output = self._check_states(loop, subject, of)
        drafts = f"{system.num_draft} drafts of {subject.drafter.name}"
        if self.is_coupled:
            loop.check_equal(loop.plain(of, np.arange(len(of))), output, of, "by plain decoding")
            self._add(f"tokens with {drafts} and of plain decoding", "equality", trials=output.size)
        moved = self._check_places(loop, subject, of, output)
        self._test_tokens(loop, of, [output, moved], drafts)
        some = output[: len(self.rows) * _FOLLOWED]
        p_value, p = loop.test_means(some, of)
        self.p.append(p)
        what = f"all tokens after the first, with {drafts}"
        self._add(what, "mean probability", p_value=p_value, trials=some[:, 1:].size)

    def _make_loop(self, subject: Subject, system: System, num_tokens: int) -> Loop:
        """Returns a loop whose states hold its texts and no more.

        So a drafter that keeps rejected drafts runs out of slots; the toy draft, which reads two
        tokens alone, would not show it otherwise.
        """
        prompt = max(len(row.prompt) for row in self.rows)
        slots = prompt + num_tokens + 1 + max(MAX_DRAFT + 1, system.lookahead_slots)
        return Loop(system, subject.params, self.rows, num_tokens, slots, subject.logits_of)

    def _text(self, num_draft: int, is_last: bool = False) -> None:
        """Long texts of one setting, or of all for a rule that emits plain decoding's tokens.

        Such a rule is not enumerated, so at last it is called for each row in a batch of one.
        """
        subject = self.main
        B = len(self.rows) * _PLACES
        of = np.full(B, _TEXT_SETTING)
        if self.is_coupled:
            of = np.tile(np.arange(len(self.rows)), _PLACES)
        if self._near is None:
            short = self._make_loop(subject, subject.system(self.rule, num_draft), _LENGTH)
            self._near = dataclasses.replace(subject, params=near_target(short, of))
        subject = self._near
        rule = self.rule
        if self.is_coupled and is_last:
            rule = rule._replace(accept=one_by_one(rule.accept))
        loop = self._make_loop(subject, subject.system(rule, num_draft), _TEXT)
        seeds = np.arange(B)
        state = loop.generate(loop.prefill(of, seeds))
        output = loop.output(state, of)
        K = loop.system.num_draft
        name = subject.drafter.name
        drafts = f"{K} draft{'s' * (K > 1)} of {name}, and a target near them"
        if self.is_coupled:
            loop.check_equal(loop.plain(of, seeds), output, of, "by plain decoding")
            what = f"texts of {_TEXT} tokens with {drafts}, and of plain decoding"
            self._add(what, "equality", trials=output.size)
            return
        row = self.rows[_TEXT_SETTING]
        kinds = loop.of_output(np.asarray(state.kind), of)
        p_value = check_texts(loop, output, kinds, row)
        what = (
            f"each of {_TEXT} tokens, the first of each round by the round before, and those of "
            f"neighbouring seeds jointly, with {drafts}"
        )
        self._add(what, "chi-square", p_value=p_value, trials=output[:, 1:].size)

    def _check_states(self, loop: Loop, subject: Subject, of: np.ndarray) -> np.ndarray:
        """Compares the drafter's states with fresh ones twice; returns the output of all rows."""
        name = subject.drafter.name
        is_own = subject is self.main or subject is self.padded
        is_compared = not (self.has_memory and is_own)
        state = loop.generate(loop.prefill(of, np.arange(len(of))), _ROUNDS)
        if not is_compared:
            return loop.output(loop.generate(state), of)
        error, asked = states.check_states(loop, state, of)
        state = loop.generate(state)
        error = max(error, states.check_states(loop, state, of)[0])
        what = f"states of {name} after commit and after a fresh prefill of the same tokens"
        self._add(what, "equality", error=error, trials=2 * len(of))
        if not self.is_coupled:
            states.check_stateless(loop, asked)
            what = f"drafts of {name} after the same texts, before and after others were decoded"
            self._add(what, "equality", trials=len(of))
        what = f"drafts of {name} in batches of one and in a larger batch"
        self._add(what, "equality", trials=states.check_alone(loop, asked))
        return loop.output(state, of)

    def _check_places(
        self, loop: Loop, subject: Subject, of: np.ndarray, output: np.ndarray
    ) -> np.ndarray:
        """Decodes half of the rows in other places, beside others; returns those others' output."""
        half = len(of) // 2
        B = len(of)
        rest = slice(None, half - 1, -1)
        seeds = np.arange(B)
        moved = loop.decode(
            np.concatenate([of[:half], of[rest]]), np.concatenate([seeds[:half] + B, seeds[rest]])
        )
        if self.is_coupled or not (self.is_hidden and subject is self.main):
            hint = ". If the drafter remembers outputs, it must say so, see Drafter.memory"
            hint = "" if self.is_coupled else hint
            how = "in another place of the batch"
            loop.check_equal(output[rest], moved[half:], of[rest], how, hint)
            drafts = f"drafts of {subject.drafter.name}"
            what = f"tokens with {drafts} in other places of the batch, beside other rows"
            self._add(what, "equality", trials=output[rest].size)
        return moved[:half]

    def _test_tokens(
        self, loop: Loop, of: np.ndarray, outputs: Sequence[np.ndarray], drafts: str
    ) -> None:
        """Tests the joint distribution of as many tokens as fit a table.

        Args:
          loop: Decodes more, until there are enough trials.
          of: The rows of all places.
          outputs: Of the first of these, decoded with other seeds each.
          drafts: What they were decoded with.
        """
        R = len(self.rows)
        V = loop.system.target.vocab_size
        size = max(n for n in range(1, 5) if n == 1 or V**n <= _CELLS)
        begin = int(size == 1)  # of one token only, the second, since the first is prefill's
        counts = np.zeros((R, *[V] * size), np.int64)
        left = [*outputs]
        done = 0
        while left or done < self.trials * R:
            some = left.pop(0) if left else loop.decode(of, np.arange(done, done + len(of)))
            np.add.at(counts, (of[: len(some)], *some[:, begin : begin + size].T), 1)
            done += len(some)
        dists = [joint(row, begin, size, loop.logits_of) for row in self.rows]
        p_value = loop.test(counts, begin, dists)
        which = f"{begin + 1} to {begin + size}" if size > 1 else f"{begin + 1}"
        what = f"tokens {which} of the compiled loop with {drafts}"
        self._add(what, "chi-square", p_value=p_value, trials=done)

    def certificate(self, failure: str | None) -> Certificate:
        """Returns the certificate of the checks so far, and what they did not prove."""
        drafter = self.main.drafter
        open_ends = [f"drafts of depth {MAX_DRAFT + 1} and more"] * (drafter.shape.tree is None)
        if drafter.is_sampled and self.stated is None:
            open_ends.append(
                "the drafter's distribution was not stated, so its own report was compared with "
                f"{_DRAWS:,} draws under each setting; draft_distribution= states it"
            )
        if not self.is_forced:
            open_ends.append(
                f"rounds of {drafter.name} were not enumerated, but those of a toy draft model: "
                "it does not draw with Context.gumbel, as draft_chain does"
            )
        if not self.is_gumbel_max:
            open_ends.append(
                f"rare last tokens of {self.rule.name}: they are not the argmax of "
                "log(replacement) + noise.gumbel, so they were drawn with ordinary noise"
            )
        if self.is_hidden:
            open_ends.append(
                f"what {drafter.name} remembers of one row and drafts for others: each row of the "
                "test has a prompt of its own"
            )
        if self.has_memory:
            open_ends.append(
                f"the memory of {drafter.name}: rounds were enumerated after a prefill, and its "
                "states were not compared with it"
            )
        if self.padded is None:
            open_ends.append("a padded vocabulary: give a function make(target) as drafter")
        open_ends.append(f"texts of more than {1 + _TEXT} tokens")
        open_ends.append("vocabularies, weights and rounding of real models; several devices")
        return Certificate(
            self.rule.name,
            self.main.drafter.name,
            self.main.target.model.vocab_size,
            tuple(sorted(self.num_drafts)),
            tuple(map(settings_of, self.rows)),
            tuple(self.checks),
            (*self.not_proved, *open_ends),
            failure,
            Range.join(self.p) if self.p else None,
            Range.join(self.q) if self.q else None,
        )
