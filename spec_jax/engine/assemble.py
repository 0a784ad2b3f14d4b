"""Builds the drafter that a config names from what was loaded for it."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from spec_jax.config import SpeculativeConfig
from spec_jax.contracts import Drafter, Model
from spec_jax.drafters import registry
from spec_jax.drafters.common.chain import with_confidence_stop
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.drafters.suffix import History
from spec_jax.engine.adaptive.deferred import with_deferred_commits
from spec_jax.engine.adaptive.runner import CATCH_UP
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.meshes import mesh_of, to_mesh
from spec_jax.models import transformer
from spec_jax.overlap.overlap import Devices, mesh_of_side
from spec_jax.sharding import REPLICATED, SHARDED


def place(
    target: LoadedModel, draft: LoadedModel | LoadedHead | None, mesh: Mesh | str | None,
    devices: Devices | None, is_draft_replicated: bool,
) -> tuple[Mesh | None, LoadedModel, LoadedModel | LoadedHead | None, bool]:  # fmt: skip
    """Returns the target's mesh, target and draft on meshes, and whether the draft lies whole.

    Without ``mesh`` and ``devices``, weights that lie on the mesh already stay as they are split.

    Args:
      target: the target.
      draft: what drafts for it, or None.
      mesh: of both, see ``to_mesh``; None: the one that the target's weights lie on, if any.
      devices: of each side, in place of one mesh of both; sides that share a device take turns on
        the target's.
      is_draft_replicated: the draft lies whole on every device of its mesh.

    Raises:
      ConfigError: there is no such mesh, it does not divide the heads of a model, or an option is
        given with or without another that it excludes or needs.
    """
    if devices is not None and mesh is not None:
        raise ConfigError(
            "devices and mesh are both given; an overlapped decoder takes a mesh for each side: "
            "devices=overlap.Devices(draft=mesh, target=mesh)"
        )
    is_there = mesh is None and devices is None
    mesh = draft_mesh = mesh_of(target.params) if mesh is None else to_mesh(mesh)
    if isinstance(devices, Devices):
        mesh = mesh_of_side(devices.target)
        draft_mesh = mesh if devices.shared else mesh_of_side(devices.draft)
    if is_draft_replicated and (draft_mesh is None or draft is None):
        lacks = "mesh" if draft_mesh is None else "draft model or head"
        raise ConfigError(f"is_draft_replicated is set, and there is no {lacks}")
    if mesh is not None and not is_there:
        target = target.on_mesh(mesh)
    if draft is not None and draft_mesh is not None:
        if is_there and not is_draft_replicated and mesh_of(draft.params) == mesh:
            whole = (x.sharding.is_fully_replicated for x in jax.tree.leaves(draft.params))
            return mesh, target, draft, mesh.size > 1 and all(whole)
        draft = draft.on_mesh(draft_mesh, REPLICATED if is_draft_replicated else SHARDED)
    return mesh, target, draft, is_draft_replicated


def check_same_tokens(target: LoadedModel, draft: LoadedModel | LoadedHead | None) -> None:
    """Checks that a draft model has the tokens of its target.

    Tokenizers decide where both have one; their embeddings may then be padded to different sizes.
    Otherwise both must have as many ids, or as many tokens.

    Args:
      target: the target.
      draft: what drafts for it; a head has the ids of its target, see ``tapped_model``.

    Raises:
      ConfigError: the tokens differ, or the draft has no embedding for one of them.
    """
    if not isinstance(draft, LoadedModel):
        return
    ours, theirs = target.model, draft.model
    differ, tokens = "the vocabularies differ: ", (ours.last_id + 1, theirs.last_id + 1)
    has_tokenizers = None not in (target.tokenizer, draft.tokenizer)
    if has_tokenizers and not target.tokenizer.has_same_vocab(draft.tokenizer):
        count, example = target.tokenizer.differing_tokens(draft.tokenizer)
        raise ConfigError(
            f"{differ}{target.name} and {draft.name} have {count} different tokens, such as "
            f"{example}"
        )
    is_same = has_tokenizers or theirs.vocab_size == ours.vocab_size or tokens[0] == tokens[1]
    if not is_same or theirs.vocab_size < tokens[0]:
        raise ConfigError(
            f"{differ}target {target.name} has {tokens[0]} tokens, draft {draft.name} has "
            f"{tokens[1]}"
        )


def tapped_model(target: LoadedModel, draft: LoadedModel | LoadedHead | None) -> Model:
    """Returns the target's functions, with the states that the draft reads.

    Args:
      target: the target.
      draft: the model or head that drafts for it, or None.

    Raises:
      ConfigError: the head is for another target.
      WeightsError: the head's weights are not those of its config.
    """
    if draft is None or registry.find(draft.method).draft != "head":
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
    """Returns the drafter of a config.

    Args:
      config: what drafts; None means plain decoding.
      target: the target's functions, with the states that a head reads.
      draft: the model or head that drafts; None if the method copies tokens.

    Raises:
      ConfigError: the method does not fit the draft.
    """
    if config is None:
        return NO_DRAFT
    kind = registry.find(config.speculative_method)
    if kind.draft == "none" and draft is not None:
        raise ConfigError(
            f"speculative_method {kind.name!r} copies tokens; leave the draft {draft.name} out"
        )
    if kind.draft != "none" and draft is None:
        needed = "a draft model" if kind.draft == "model" else "a head"
        raise ConfigError(f"speculative_method {kind.name!r} needs {needed}; load_draft gives one")
    if draft is not None and draft.method != kind.name:
        raise ConfigError(
            f"speculative_method is {kind.name!r}; the draft {draft.name} is for {draft.method!r}"
        )
    return kind.make_drafter(draft, target, config)


def make_history(config: SpeculativeConfig | None) -> History | None:
    """Returns what keeps past outputs, if the config's drafter copies from them."""
    history = config and registry.find(config.speculative_method).history
    return history and history(config)


def with_adaptive(config: SpeculativeConfig | None, drafter: Drafter) -> Drafter:
    """Returns the drafter with the config's confidence stop, and with room to catch up.

    Args:
      config: the config; None means plain decoding.
      drafter: a drafter.

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
