"""The drafter that a config names, around what was loaded for it."""

from __future__ import annotations

from spec_jax.config import SpeculativeConfig
from spec_jax.contracts import Drafter, Model
from spec_jax.drafters.common.chain import with_confidence_stop
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.drafters.ngram import ngram
from spec_jax.drafters.standalone.model import standalone
from spec_jax.drafters.suffix import suffix
from spec_jax.engine.adaptive.deferred import with_deferred_commits
from spec_jax.engine.adaptive.runner import CATCH_UP
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.models import transformer


def tapped_model(target: LoadedModel, draft: LoadedModel | LoadedHead | None) -> Model:
    """The target, with the states that a head reads.

    Raises:
      ConfigError: the head is for another target.
    """
    if not isinstance(draft, LoadedHead):
        return target.model
    if target.config is None:
        raise ConfigError(f"target {target.name} has no config; a head needs one to tap it")
    sizes = (target.config.hidden_size, target.config.vocab_size)
    theirs = (draft.config.target_hidden_size, draft.config.target_vocab_size)
    if sizes != theirs:
        raise ConfigError(
            f"head {draft.name} is for a target of width {theirs[0]} and {theirs[1]} ids; "
            f"{target.name} has {sizes[0]} and {sizes[1]}"
        )
    draft.check_params()
    return transformer.model(target.config, draft.config.taps, target.model.num_tokens)


def make_drafter(
    config: SpeculativeConfig | None, target: Model, draft: LoadedModel | LoadedHead | None
) -> Drafter:
    """Builds it.

    Args:
      config: None for plain decoding.
      target: with the states that a head reads.
      draft: None where the method copies tokens.

    Raises:
      ConfigError: the method does not fit the draft.
    """
    if config is None:
        return NO_DRAFT
    method, is_head = config.speculative_method, isinstance(draft, LoadedHead)
    if config.copies_tokens:
        if draft is not None:
            raise ConfigError(
                f"speculative_method {method!r} copies tokens; leave the draft {draft.name} out"
            )
        if config.is_ngram():
            return ngram(config.ngram.max, config.ngram.min)
        return suffix(target.vocab_size, config.suffix)
    if draft is None:
        needed = "a draft model" if config.is_standalone() else "a head; load_head gives one"
        raise ConfigError(f"speculative_method {method!r} needs {needed}")
    theirs = draft.method if is_head else "standalone"
    if method != theirs:
        raise ConfigError(
            f"speculative_method is {method!r}; the draft {draft.name} is for {theirs!r}"
        )
    if not is_head:
        return standalone(draft.model, config.tree_shape)
    if config.is_mtp():
        draft.config.check_num_draft(config.num_speculative_tokens)
    return draft.drafter(target, config.tree_shape)


def with_adaptive(config: SpeculativeConfig | None, drafter: Drafter) -> Drafter:
    """The drafter with the config's confidence stop, and with room to catch up.

    Raises:
      ConfigError: K is adaptive and the drafter proposes trees.
    """
    if config is None:
        return drafter
    if config.confidence_threshold > 0:
        drafter = with_confidence_stop(drafter, config.confidence_threshold)
    if not config.is_adaptive:
        return drafter
    if drafter.tree is not None:
        raise ConfigError(f"is_adaptive is set; drafter {drafter.name!r} proposes trees")
    if drafter.catch_up is None:
        return with_deferred_commits(drafter, CATCH_UP) if drafter.taps else drafter
    return drafter._replace(window=max(drafter.window, CATCH_UP))
