"""Every error that spec_jax raises on bad input.

Each is also the builtin that fits it (``ValueError`` or ``RuntimeError``), so a
caller may catch either.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SYNONYMS = (  # of other engines and of this package
    (
        "num_speculative_tokens",
        "spec_k",
        "k",
        "num_draft",
        "num_draft_tokens",
        "num_assistant_tokens",
    ),
    ("speculative_method", "method"),
    ("standalone", "draft_model"),
    ("ngram", "prompt_lookup"),
    ("ngram_max", "prompt_lookup_max"),
    ("ngram_min", "prompt_lookup_min"),
    ("prompts", "prompt", "inputs", "input_ids", "prompt_token_ids"),
    ("max_new_tokens", "max_completion_tokens", "max_output_tokens", "max_gen_len"),
    ("max_length", "max_seq_len", "max_model_len"),
    ("stop_tokens", "eos_token_id", "stop_token_ids", "eos_token_ids"),
    ("stop", "stop_strings", "stop_words", "stop_sequences", "stopping_criteria"),
    ("num_samples", "num_return_sequences", "n"),
    ("sampler", "sampling_params", "generation_config"),
    ("seeds", "generator", "rng", "key"),
    ("on_token", "streamer", "callback"),
    ("logprobs", "output_scores", "output_logits", "return_logprob"),
)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns " (did you mean NAME?)", or "" where no known name is close.

    Args:
      name: what was given.
      known: the names to choose from. A synonym is close, and a name that the given one contains
        or that contains it.
    """
    known, name = list(known), str(name)
    parts = [x for x in known if len(name) > 2 and (name in x or (len(x) > 2 and x in name))]
    same = [x for group in _SYNONYMS if name in group for x in group if x in known]
    close = [*same, *difflib.get_close_matches(name, known, 1), *sorted(parts, key=len)]
    return f" (did you mean {close[0]}?)" if close else ""


class SpecJaxError(Exception):
    """The root: any error that spec_jax raises on purpose."""


class ConfigError(SpecJaxError, ValueError):
    """A configuration names an unknown key, a wrong value or an invalid combination."""


class ModelNotLoaded(ConfigError):
    """A path, a config or a model without weights was given where a loaded model is needed."""


class ShapeError(SpecJaxError, ValueError):
    """An array has a shape that its axis letters do not allow."""


class WeightsError(SpecJaxError, ValueError):
    """A checkpoint cannot be read, or a tensor is missing, unexpected or misshapen."""


class PromptError(SpecJaxError, ValueError):
    """A prompt is empty, too long, or holds ids that the vocabulary does not have."""


class SnapshotError(SpecJaxError, ValueError):
    """A snapshot does not fit the cache it is to be restored into."""


class TrainingError(SpecJaxError, RuntimeError):
    """Training cannot go on: a loss that is not finite, a checkpoint that cannot be saved or read.

    Checkpoints that were saved earlier are intact.
    """


class Cancelled(SpecJaxError, RuntimeError):
    """A generation was cancelled before its first token.

    A generation that is cancelled later is not an error: it returns its tokens so far, with the
      finish_reason "cancelled".
    """


class InvalidRowsError(SpecJaxError, RuntimeError):
    """A drafter or a rule broke its contract in some rows.

    ``generations`` holds what every row of the batch produced: the faulty ones stop before the
    round of the fault, the others are complete.
    """

    def __init__(self, message: str, generations=()):
        super().__init__(message)
        self.generations = list(generations)


class InvalidDraftError(InvalidRowsError):
    """A drafter proposed ids outside of the target's vocabulary, parents that are not a tree, or
    ``Proposal.probs`` that are not distributions; or the function of a ``host_drafter`` raised an
    exception, which is then the ``__cause__``.
    """


class InvalidVerdictError(InvalidRowsError):
    """A rule accepted a draft that was not offered, emitted a token of probability zero, or
    returned a number that is not finite."""
