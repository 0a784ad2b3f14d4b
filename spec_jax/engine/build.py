"""What a ``SpeculativeDecoder`` is made of: built from its arguments, and checked."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import jax
from jax.sharding import Mesh

from spec_jax import decoding, named
from spec_jax.config import (
    GREEDY_BELOW,
    AsyncSpecConfig,
    SamplerConfig,
    SpeculativeConfig,
    check_integer,
)
from spec_jax.contracts import Drafter, Model, Observer, Rule
from spec_jax.drafters import registry
from spec_jax.drafters.common.chain import with_confidence_stop
from spec_jax.drafters.common.replicated import replicated
from spec_jax.drafters.loaded import beside_target, of_target, tapped_model
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.engine.adaptive.deferred import with_deferred_commits, with_room
from spec_jax.engine.adaptive.runner import CATCH_UP, AdaptiveState, plain_rule
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.engine.request import named_sampler
from spec_jax.engine.stats import RunningStats
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel, check_loaded
from spec_jax.meshes import has_copies, mesh_of, mesh_text, to_mesh, without_copies
from spec_jax.models.caches.rewriting import warn_if_rewritten
from spec_jax.models.chunks import CHUNK
from spec_jax.models.config import largest_pass
from spec_jax.overlap import overlap
from spec_jax.rules import make_rule
from spec_jax.sampling import Samplers, check_samplers, highest_temperature
from spec_jax.sharding import REPLICATED, SHARDED
from spec_jax.show.summary import ReprMixin


class DecoderParts(ReprMixin):
    """Everything that a decoder is made of, checked for consistency.

    Arguments and errors are those of ``SpeculativeDecoder``.

    Attributes:
      target: the target, on its mesh.
      draft: the draft or head, on its mesh, or None.
      model: the target's functions, with the states that the drafter reads.
      drafter: what drafts.
      given_config: what drafts and which rule accepts, before ``resolved_config``; None: plain
        decoding.
      rule: a rule that replaces the config's strategy, or None.
      own_drafter: the name of a drafter that replaces the config's method, or None.
      target_sampler: how the target's tokens are drawn, where a call does not say.
      draft_sampler: how drafts are drawn; None: see ``sampling.draft_samplers``.
      has_expected: record the rule's closed-form acceptance.
      max_length: maximum tokens of a row, prompt and output together, or None.
      history: past outputs that the drafter copies from, or None.
      adaptive: costs and acceptance that adaptive decoding has measured; None where K is fixed.
      loop: what decodes: ``decoding``, or an ``overlap.Overlap``.
      is_fallback: drafts were asked for, and the target cannot rewind.
      mesh: where the programs run; None: on the device of the weights, or overlapped.
      observers: what watches the rounds.
      prefill_chunk: tokens of a prompt that a pass has at most.
      token: cancels every call.
      totals: counts and times of all calls.
      worker: the thread of asynchronous calls.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | LoadedHead | None = None,
        config: SpeculativeConfig | AsyncSpecConfig | None = None,
        *,
        target_sampler: Samplers | str | None = None,
        draft_sampler: Samplers | None = None,
        drafter: Drafter | Callable[[LoadedModel], Drafter] | str | None = None,
        rule: Rule | Callable[[], Rule] | str | None = None,
        has_expected: bool = False,
        force_n1: bool = False,
        devices: overlap.Devices | None = None,
        mesh: Mesh | str | None = None,
        is_draft_replicated: bool = False,
        observers: Sequence[Observer] = (),
        prefill_chunk: int | None = None,
    ):
        if isinstance(draft, SpeculativeConfig | AsyncSpecConfig):
            raise ConfigError(f"draft is a {type(draft).__name__}; name it: config=...")
        check_loaded("target", target, LoadedModel)
        if draft is not None:
            check_loaded("draft", draft, LoadedModel | LoadedHead)
        mesh, target, draft, is_replicated = place(
            target, draft, mesh, devices, is_draft_replicated
        )
        target_sampler = named_sampler(target, target_sampler)
        self.max_length: int | None = None
        if isinstance(config, AsyncSpecConfig):
            if target_sampler is not None or draft_sampler is not None:
                raise ConfigError("samplers stand in the AsyncSpecConfig; give them once, there")
            target_sampler = config.target_sampler
            draft_sampler = config.draft_sampler
            force_n1 = force_n1 or config.force_n1
            self.max_length = config.max_tokens
            has_drafts = not force_n1 or draft is not None or drafter is not None
            method = "standalone" if draft is None else draft.method
            config = SpeculativeConfig(method, config.spec_k) if has_drafts else None
        if not isinstance(config, SpeculativeConfig | None):
            raise ConfigError(f"config is {config!r}; expected a SpeculativeConfig")
        if config is None and draft is not None:
            config = SpeculativeConfig(draft.method)
        elif config is None and drafter is not None:
            config = SpeculativeConfig()
        if config is not None and draft is None and drafter is None:
            draft = of_target(config.speculative_method, target)
        check_samplers(target_sampler=target_sampler, draft_sampler=draft_sampler)
        self.target_sampler = SamplerConfig() if target_sampler is None else target_sampler
        self.draft_sampler = draft_sampler
        custom = None if drafter is None else named.to_drafter(drafter, target)
        self.own_drafter = custom and custom.name
        self.rule = None if rule is None else named.to_rule(rule)
        if custom is not None or self.rule is not None:
            target, draft = map(_on_one_mesh, (target, draft))
        history = None
        if custom is None:
            check_same_tokens(target, draft)
            history = config and registry.find(config.speculative_method).drafting.history
        self.history = history and history(config)
        self.target = target
        self.draft = draft
        self.given_config = config
        self.model = tapped_model(target, draft)
        drafter = with_adaptive(config, custom or make_drafter(config, self.model, draft))
        self.drafter = replicated(drafter) if is_replicated else drafter
        if drafter.vocab_size not in (None, target.model.vocab_size):
            raise ConfigError(
                f"the vocabularies differ: target {target.name} has {target.model.vocab_size} ids, "
                f"drafter {drafter.name} has {drafter.vocab_size}"
            )
        is_adaptive = config is not None and config.is_adaptive
        self.adaptive = AdaptiveState(config.buckets) if is_adaptive else None
        self.is_fallback = config is not None and not (force_n1 or target.model.can_rewind)
        is_plain = force_n1 or self.is_fallback
        states = {"target": (target.model.init_cache, target.params)}
        if draft is not None and not is_plain:
            states["draft"] = (self.drafter.init, beside_target(draft, draft.params, target.params))
        warn_if_rewritten(states, stacklevel=3)
        self.loop: Any = decoding
        if devices is not None and not is_plain:
            self.loop = overlap.make_loop(devices, stacklevel=3)
        if is_adaptive and self.is_overlapped:
            raise ConfigError("is_adaptive is set; an overlapped draft needs a fixed K")
        self.mesh = None if self.is_overlapped else mesh
        self.has_expected = has_expected
        self.observers = check_observers(observers)
        most = min(largest_pass(part.config) for part in (target, draft) if part is not None)
        self.prefill_chunk = min(CHUNK, most)
        if prefill_chunk is not None:
            self.prefill_chunk = check_integer("prefill_chunk", prefill_chunk, 1)
            if prefill_chunk > most:
                raise ConfigError(
                    f"prefill_chunk is {prefill_chunk}; the caches of layers with a sliding window "
                    f"take passes of {most} tokens: take at most {most}"
                )
            if prefill_chunk > target.model.max_length:
                raise ConfigError(
                    f"prefill_chunk is {prefill_chunk}; {target.name} holds "
                    f"{target.model.max_length} tokens"
                )
        self.system(self.target_sampler)  # refuses an invalid strategy or rule
        if is_plain:
            self.model = target.model
            self.drafter = NO_DRAFT
            self.given_config = self.rule = self.history = self.adaptive = None
        check_passes(self.system(self.target_sampler), target, draft)
        self._begin_calls()

    def _begin_calls(self) -> None:
        self.token = CancellationToken()
        self.totals = RunningStats()
        self.worker = ThreadPoolExecutor(1, "spec_jax")  # starts with the first asynchronous call

    def with_parts(self, **parts: Any) -> Self:
        """Returns a copy with some parts replaced, for tools that examine a decoder.

        The parts are not checked against each other.

        Args:
          **parts: the new parts, by the names of attributes.
        """
        other = copy.copy(self)
        for name, part in parts.items():
            getattr(self, name)  # raises where there is no such part
            setattr(other, name, part)
        other._begin_calls()
        return other

    @property
    def is_overlapped(self) -> bool:
        """Whether drafting runs on devices of its own."""
        return self.loop is not decoding

    @property
    def num_draft(self) -> int:
        """K; 0 for plain decoding."""
        return 0 if self.given_config is None else self.given_config.num_speculative_tokens

    def resolved_config(self, samplers: Samplers) -> SpeculativeConfig | None:
        """Returns the config as it is used with these samplers of the target.

        Raises:
          ConfigError: the strategy cannot serve their temperature.
        """
        if self.given_config is None:
            return None
        return self.given_config.resolve(
            highest_temperature(samplers),
            is_sampled=self.drafter.is_sampled,
            default=self.drafter.defaults.strategy,
            drafter=self.own_drafter,
            rule=self.rule and self.rule.name,
        )

    def system(self, samplers: Samplers | None = None) -> decoding.System:
        """Returns what is compiled for these samplers: target, drafter, rule and K.

        Args:
          samplers: of the target; by default the decoder's.

        Raises:
          ConfigError: the rule cannot serve their temperature, or what is drafted.
        """
        samplers = self.target_sampler if samplers is None else samplers
        config = self.resolved_config(samplers)
        if self.rule is not None:
            rule = self.rule
        elif config is not None:
            rule = make_rule(config)
        else:
            rule = plain_rule(highest_temperature(samplers) < GREEDY_BELOW)
        if rule.is_greedy and highest_temperature(samplers) >= GREEDY_BELOW:
            raise ConfigError(f"rule {rule.name!r} emits argmax tokens: it needs temperature 0")
        if rule.needs_probs and self.num_draft == 0:
            raise ConfigError(f"rule {rule.name!r} accepts drafts; plain decoding has none")
        if self.drafter.shape.tree is not None and not rule.has_trees:
            raise ConfigError(
                f"rule {rule.name!r} accepts chains only; trees need 'residual', 'traversal' or "
                "'match'"
            )
        if self.drafter.shape.tree is not None and not self.model.takes("window_mask"):
            raise ConfigError("forward of the target takes no window_mask, which trees need")
        observers = self.observers
        if self.has_expected and rule.expected_acceptance and self.drafter.shape.tree is None:
            observers = (*observers, decoding.expected_acceptance(rule))
        system = decoding.System(
            self.model,
            self.drafter,
            rule,
            self.num_draft,
            observers,
            is_adaptive=self.adaptive is not None,
            prefill_chunk=self.prefill_chunk,
        )
        if self.is_overlapped:
            overlap.check(system)
        return system

    def _repr_fields(self) -> dict[str, str]:
        facts = {"": repr(self.target.name)}
        if self.num_draft == 0:
            facts["drafts"] = "none, one token a pass"
        else:
            by = "" if self.draft is None else f" {self.draft.name!r}"
            facts["drafts"] = f"by {self.drafter.name}{by}"
            facts["K"] = f"up to {self.num_draft}" if self.adaptive else str(self.num_draft)
            if self.drafter.shape.tree is not None:
                facts["tree of depth"] = str(self.drafter.shape.tree.depth)
            facts["rule"] = self.system(self.target_sampler).rule.name
        facts["temperature"] = f"{highest_temperature(self.target_sampler):g}"
        if self.mesh is not None:
            facts["mesh"] = mesh_text(self.mesh)
        return facts


def _on_one_mesh(model: LoadedModel | LoadedHead | None) -> LoadedModel | LoadedHead | None:
    """Returns a model whose weights lie on the mesh itself, see ``meshes.with_copies``.

    jax compiles calls of Python functions, which a drafter or a rule may make, for one mesh alone.
    """
    if model is None or not any(map(has_copies, jax.tree.leaves(model.params))):
        return model

    def move(x):
        return jax.device_put(x, without_copies(x.sharding)) if has_copies(x) else x

    return dataclasses.replace(model, params=jax.tree.map(move, model.params))


def check_passes(
    system: decoding.System, target: LoadedModel, draft: LoadedModel | LoadedHead | None
) -> None:
    """Checks that what a round feeds fits the caches of layers with a sliding window.

    Args:
      system: the round.
      target: the target.
      draft: the model or head that drafts for it, or None.

    Raises:
      ConfigError: it is more than ``max_pass`` of the config.
    """
    K = system.num_draft
    fed = [(target, K + 1)]
    if draft is not None and K > 0:
        fed.append((draft, system.lookahead_slots))
    for part, count in fed:
        most = largest_pass(part.config)
        if count > most:
            is_chain = system.drafter.shape.tree is None
            fewer = "lower num_speculative_tokens" if is_chain else "take a smaller tree"
            remedy = "leave is_adaptive out" if K < most and system.is_adaptive else fewer
            raise ConfigError(
                f"rounds may feed {part.name} {count} tokens after the committed ones; its layers "
                f"with a sliding window take {most}: {remedy}"
            )


def check_observers(observers: Sequence[Observer]) -> tuple[Observer, ...]:
    """Returns the observers of a decoder, checked.

    Raises:
      ConfigError: something else, a name that stands twice or is the package's own, or an observer
        of all rows together.
    """
    reserved = {"logprobs": "generate(logprobs=True)", "expected": "has_expected=True"}
    names = []
    for observer in observers:
        if not isinstance(observer, Observer):
            raise ConfigError(f"observers hold {observer!r:.200}; expected spec_jax.Observer(...)")
        if observer.name in reserved:
            raise ConfigError(
                f"the name {observer.name!r} is reserved for the package's observer, which "
                f"{reserved[observer.name]} adds; rename yours: observer._replace(name=...)"
            )
        if observer.name in names:
            raise ConfigError(f"two observers are called {observer.name!r}; rename one")
        if not observer.is_by_row:
            raise ConfigError(
                f"observer {observer.name!r} watches all rows together, and a decoder returns "
                "rows; give it to decoding.generate: decoder.system()._replace(observers=...)"
            )
        names.append(observer.name)
    return tuple(observers)


def place(
    target: LoadedModel,
    draft: LoadedModel | LoadedHead | None,
    mesh: Mesh | str | None,
    devices: overlap.Devices | None,
    is_draft_replicated: bool,
) -> tuple[Mesh | None, LoadedModel, LoadedModel | LoadedHead | None, bool]:
    """Returns the target's mesh, target and draft on meshes, and whether the draft is replicated.

    Without ``mesh`` and ``devices``, weights that lie on the mesh already stay as they are split.

    Args:
      target: the target.
      draft: what drafts for it, or None.
      mesh: of both, see ``to_mesh``; None: the one that the target's weights lie on, if any.
      devices: of each side, in place of one mesh of both; sides that share a device take turns on
        the target's.
      is_draft_replicated: replicate the draft on its mesh.

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
    if isinstance(devices, overlap.Devices):
        mesh = overlap.mesh_of_side(devices.target)
        draft_mesh = mesh if devices.shared else overlap.mesh_of_side(devices.draft)
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
    if draft is None or registry.find(draft.method).head is not None:
        return
    ours = target.model
    theirs = draft.model
    differ = "the vocabularies differ: "
    tokens = (ours.last_id + 1, theirs.last_id + 1)
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
    needs = kind.drafting.draft
    if needs == "none" and draft is not None:
        raise ConfigError(
            f"speculative_method {kind.name!r} copies tokens; leave the draft {draft.name} out"
        )
    if needs != "none" and draft is None:
        needed = "a draft model" if needs == "model" else "a head"
        raise ConfigError(f"speculative_method {kind.name!r} needs {needed}; load_draft gives one")
    if draft is not None and draft.method != kind.name:
        raise ConfigError(
            f"speculative_method is {kind.name!r}; the draft {draft.name} is for {draft.method!r}"
        )
    drafter = kind.make_drafter(draft, target, config)
    if draft is not None and draft.stated_length is not None:
        return drafter._replace(max_length=draft.stated_length)
    return drafter


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
    if drafter.shape.tree is not None:
        raise ConfigError(f"is_adaptive is set; drafter {drafter.name!r} proposes trees")
    if drafter.sync.catch_up is None:
        return with_deferred_commits(drafter, CATCH_UP) if drafter.shape.taps else drafter
    return drafter._replace(shape=with_room(drafter.shape, CATCH_UP))
