"""What drafters refuse before anything is compiled: a call, its error, the words that matter."""

import functools
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from support import block_heads, block_kind, eagle_heads, parallel_heads
from support.block_drafts import HEADS, TARGET, head_of
from support.decoders import rule
from support.tiny_models import LLAMA, QWEN3_NEXT_TARGET
from support.trees import BUSH

from spec_jax import SpeculativeConfig, SpeculativeDecoder, host_drafter, load_draft, load_head
from spec_jax.contracts import Proposal
from spec_jax.decoding import System
from spec_jax.decoding.validate import validate_proposal
from spec_jax.drafters import register, registry
from spec_jax.drafters.block.config import DFlashConfig, DSparkConfig
from spec_jax.drafters.block.model import block_drafter
from spec_jax.drafters.common.tree import draft_tree
from spec_jax.drafters.eagle.model import eagle
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.loading import random_head
from spec_jax.models import transformer
from spec_jax.tree import DynamicTree, Tree


@pytest.fixture(scope="module", autouse=True)
def registered():
    yield register(block_kind.KIND)
    registry.unregister("block")


def suffix(**options):
    return SpeculativeConfig("suffix", **options)


def eagle_of(name, tree):
    config = eagle_heads.CONFIGS[name]
    return eagle(config, transformer.model(LLAMA, config.taps, num_tokens=27), tree)


def block_of(name, **options):
    config = SpeculativeConfig(name, **options)
    return SpeculativeDecoder(TARGET, head_of(HEADS[name]), config)


def peagle(**options):
    head = parallel_heads.head_of(parallel_heads.HEADS["p-eagle"])
    return SpeculativeDecoder(TARGET, head, SpeculativeConfig("peagle", **options))


modules = functools.partial(MtpConfig.of_target, LLAMA)


def own_block():
    return block_heads.make_head(block_heads.new(LLAMA.hidden_size, LLAMA.vocab_size, taps=(1, 3)))


def misshapen_block():
    head = own_block()
    layers = head.params["layers"]
    layers = {**layers, "1": {**layers["1"], "q": jnp.zeros((1, 1))}}
    wrong = replace(head, params={**head.params, "layers": layers})
    return SpeculativeDecoder(TARGET, wrong, SpeculativeConfig("block", 4))


def of_another_rank():
    head = head_of(HEADS["dspark"])
    return replace(head, config=replace(head.config, markov_rank=5))


def export_of_another_rank():
    of_another_rank().save("nowhere", TARGET)


def decoder_of_another_rank():
    SpeculativeDecoder(TARGET, of_another_rank(), SpeculativeConfig("dspark", 3))


def of_few_candidates():
    config = HEADS["dflash2"]
    return block_drafter(config, transformer.model(LLAMA, config.taps, 4), Tree((0,) * 5))


def tree_for_a_rule_of_chains():
    nodes = jnp.zeros((1, 2), jnp.int32)
    proposal = Proposal(nodes, jnp.asarray([2]), parents=nodes, tree_depth=1)
    validate_proposal(proposal, System(TARGET.model, NO_DRAFT, rule("block"), 2))


# The config of a mixture that does not say how many experts a token has.
UNKNOWN = types.SimpleNamespace(**vars(QWEN3_NEXT_TARGET) | {"num_experts_per_tok": None})


def kind(draft="head", drafter=None, has_head=False):
    head = registry.HeadSpec(config_class=dict, table=dict) if has_head else None
    drafting = registry.Drafting(draft=draft, drafter=drafter)
    return registry.register(registry.DrafterKind(name="x", drafting=drafting, head=head))


EAGLE_3, EAGLE_1 = (eagle_heads.CONFIGS[name] for name in ("eagle-3", "eagle-1"))
ONE_TAP = dict(version=1, taps=(3,))
BARE = replace(TARGET, config=None, model=TARGET.model._replace(embedding=None))
REFUSED = [
    (lambda: suffix(suffix_max_depth=0), "suffix.max_depth is 0; expected an integer of 1 or more"),
    (lambda: suffix(suffix_history_tokens=-1), "suffix.history_tokens"),
    (lambda: suffix(suffix_min_prob=1.5), r"suffix.min_prob is 1.5; expected a number from 0 to 1"),
    (lambda: suffix(suffix_max_factor=-1.0), "suffix.max_factor"),
    (lambda: suffix(suffix_max_offset=float("nan")), "suffix.max_offset"),
    (lambda: suffix(tree=(2, 1)), "'suffix' drafts chains"),
    (lambda: SpeculativeConfig("dflush"), "expected one of standalone, .* mtp, dflash"),
    (lambda: host_drafter(len, is_sampled=True), "vocab_size"),
    # trees
    (lambda: eagle_of("eagle-3", DynamicTree(25, 1, 25)), "25 children .*; the draft .* has 20"),
    (of_few_candidates, "5 children of a node; the draft vocabulary has 4"),
    (lambda: draft_tree(None, (), None, None, 5, BUSH), "K is 5; the tree has 6 nodes"),
    (tree_for_a_rule_of_chains, "rule 'block' accepts chains only; drafter 'plain' proposes trees"),
    # K
    (lambda: block_of("dspark", num_speculative_tokens=9), "more than 4, which a block of 4"),
    (lambda: block_of("dspark", adaptive={"buckets": (0, 9)}), "9 drafts in a row are more than 4"),
    (lambda: block_of("dflash", confidence_threshold=0.4), "is 0.4; this 'dflash' head"),
    (lambda: peagle(num_speculative_tokens=6), "6 drafts .* more than 5, which the head was"),
    # weights
    (export_of_another_rank, r"^step\.embed has shape \[31, 3\]; its config asks for \[31, 5\]"),
    (decoder_of_another_rank, r"step\.embed has shape \[31, 3\]; its config asks for \[31, 5\]"),
    (misshapen_block, r"layers\.1\.q has shape \[1, 1\]; its config asks for"),
    # configs of heads
    (lambda: DSparkConfig.of_target(LLAMA, markov_rank=0), "markov_rank is 0; .* is DFlash"),
    (lambda: DFlashConfig.of_target(UNKNOWN), "has no intermediate_size to copy: give"),
    (lambda: replace(EAGLE_3, version=2), "version is 2"),
    (lambda: replace(EAGLE_3, fc_norm=True, norm_before_fc=True), "both on; expected one of them"),
    (lambda: replace(EAGLE_3, taps=()), "taps are empty"),
    (lambda: replace(EAGLE_3, target_hidden_size=24), "width is 16; the embedding .* has 24"),
    (lambda: replace(EAGLE_1, target_hidden_size=24, own_embed=True), "target's head .* has 24"),
    (lambda: replace(EAGLE_3, target_vocab_size=12), "20 is larger than the target's 12"),
    (lambda: replace(EAGLE_3, layer=LLAMA), "2 layers; expected 1"),
    (lambda: replace(EAGLE_3, version=1), "reads one state"),
    (lambda: replace(EAGLE_3, **ONE_TAP), "31 ids, not 20"),
    (lambda: replace(EAGLE_3, **ONE_TAP, norm_output=True), "options of version 3"),
    (lambda: modules(protocol="parallel"), "protocol is 'parallel'; expected one of recycled, seq"),
    (lambda: modules(order="both"), "order is 'both'; expected one of embedding-first, hid"),
    (lambda: modules(num_modules=0), "num_modules is 0"),
    (lambda: modules(num_modules=2), "num_modules is 2, but recycled drafting uses one"),
    (lambda: modules(layer=LLAMA), "2 layers; expected 1"),
    (lambda: modules(taps=(1, 2)), r"taps are \(1, 2\); expected a tuple of the one state"),
    (lambda: modules(target_hidden_size=24), "width is 16; the target's is 24"),
    (lambda: modules(target_vocab_size=30), "vocabulary has 31 ids; the target's has 30"),
    # loading and saving
    (lambda: load_draft("zoo/draft", TARGET, method="block"), "'block' has no weights to load"),
    (lambda: own_block().save("nowhere", TARGET), "its kind 'block' has no `write`"),
    (lambda: load_draft(".", TARGET, method="eagle3"), r"kind 'eagle3' \(did you mean eagle\?\)"),
    (lambda: load_head("zoo/eagle3", None), "target is None; expected a LoadedModel"),
    (lambda: load_head("zoo/eagle3", BARE), "has no embedding"),
    (lambda: load_head("zoo/eagle3", TARGET, "int8"), "dtype is 'int8'"),
    (lambda: random_head("config", jax.random.key(0)), "no drafter kind has heads of a str"),
    # kinds
    (lambda: kind("modle"), "draft is 'modle' .*; expected one of head, model, none"),
    (lambda: kind("none"), "'x' has no `drafter`, and no `functions` of a head"),
    (lambda: kind(drafter=len), "'x' has no `head`, and drafts with one: draft is 'head'"),
    (lambda: kind("none", len, has_head=True), "'x' has a `head`, and drafts without one"),
    (lambda: kind(drafter=len, has_head=True), "'x' has no `passes`, which plans, timers and pred"),
]


@pytest.mark.parametrize(("run", "words"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_it_is_refused(run, words):
    of_weights = (misshapen_block, export_of_another_rank, decoder_of_another_rank)
    error = WeightsError if run in of_weights else ConfigError
    with pytest.raises(error, match=words):
        run()
