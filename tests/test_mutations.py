"""Mutations that the default tier kills: of each invariant, rule, cache and drafter.

    pytest -m measure tests/test_mutations.py    # about ten CPU-seconds each

Each changes one line of a copy of the package, in which the named test must then fail.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    name: str
    file: str  # in spec_jax
    old: str  # occurs there once
    new: str
    test: str  # in tests, of the default tier


DECODE, RULES = "decoding/test_decode.py", "rules/test_rules.py"
GUARDS = "decoding/test_guards.py"
VERDICT = f"{GUARDS}::test_a_verdict_that_cannot_be_ends_its_row_and_is_safe_to_commit"
TREE, TREE_RULES = "drafters/test_tree.py", "rules/test_tree_rules.py"
CERTIFICATE, CACHE = "testing/test_certificate.py", "models/test_cache.py"
ROUNDS = f"{DECODE}::test_a_round_commits_what_it_emits_and_finished_rows_change_nothing"
FAULTY = f"{DECODE}::test_a_faulty_draft_stops_its_row_alone"
MATCH = f"{DECODE}::test_match_emits_exactly_the_plain_stream_for_mixed_rows"
ALIKE = f"{DECODE}::test_a_draft_equal_to_the_target_is_always_accepted[match]"
SETTINGS = f"{CERTIFICATE}::test_enumerated_law_is_the_targets_for_every_setting_in_one_batch"
ON_TREES = f"{TREE_RULES}::test_enumerated_law_of_a_sampled_tree_is_the_targets"
ROLLED_BACK = f"{CACHE}::test_state_after_accept_and_roll_back_equals_a_fresh_prefill"
PARAMETERS = "test_sampling.py::test_every_parameter_and_all_together_in_one_batch_of_mixed_rows"
SHARDED = "sharding/test_sharded_tokens.py::test_a_mesh_changes_no_token"
PLACED = "sharding/test_sharding_is_complete.py"
MEMORY = "decoding/test_memory_of_drafters.py"
EAGLE, MTP = "drafters/eagle/test_eagle.py", "drafters/mtp/test_mtp.py"

MUTATIONS = [
    # The invariants of the round.
    Mutation("target keeps a rejected draft", "decoding/round.py",
             "target=state.target.commit(n_emit, path)",
             "target=state.target.commit(n_emit + 1, path)", ROUNDS),
    Mutation("kinds are exchanged", "decoding/round.py", "Kind.CORRECTED, Kind.BONUS)",
             "Kind.BONUS, Kind.CORRECTED)",
             f"{DECODE}::test_every_kind_is_recorded_where_it_happened"),
    Mutation("finished rows go on", "decoding/state.py",
             "jnp.where(state.is_active & (fault == Finish.RUNNING), kept, 0)",
             "jnp.where(fault == Finish.RUNNING, kept, 0)",
             f"{DECODE}::test_stop_token_inside_a_block_cuts_what_follows[self]"),
    Mutation("one token more than the limit", "decoding/state.py",
             "room = state.limit - total", "room = state.limit - total + 1", ROUNDS),
    Mutation("one token after a stop token", "decoding/state.py",
             "jnp.where(is_stop, index + 1,", "jnp.where(is_stop, index + 2,",
             f"{DECODE}::test_stop_token_inside_a_block_cuts_what_follows[self]"),
    Mutation("a row is put into another's slot", "decoding/loop.py",
             "put = lambda full, one: full.at[row].set(one[0])",
             "put = lambda full, one: full.at[0].set(one[0])",
             f"{DECODE}::test_an_inserted_row_decodes_as_if_it_were_alone[residual]"),
    Mutation("ids outside of the vocabulary count", "decoding/validate.py",
             "(proposal.tokens >= 0) & (proposal.tokens <= system.target.last_id)",
             "proposal.tokens >= 0", FAULTY),
    Mutation("any number of drafts counts", "decoding/validate.py",
             "| (proposal.n_draft != n_draft)", "", FAULTY),
    # The guards.
    Mutation("greedy rows read what drafts were drawn from", "decoding/validate.py",
             "jnp.where(is_greedy[:, None, None], point.astype(q.dtype), q)", "q",
             f"{GUARDS}::"
             "test_rows_of_temperature_0_never_read_what_their_drafts_were_drawn_from"),
    Mutation("a distribution of any sum counts", "decoding/validate.py",
             "~(jnp.abs(mass - 1.0) <= _SUM_TOLERANCE)", "mass != mass",
             f"{GUARDS}::"
             "test_what_is_no_distribution_ends_a_row_that_is_sampled_and_offers_it[0]"),
    Mutation("a rule accepts what is not offered", "decoding/validate.py",
             "(verdict.tokens[:, :-1] != drafts) | is_free", "verdict.tokens[:, :-1] != drafts",
             VERDICT),
    Mutation("a rule emits what has no probability", "decoding/validate.py",
             "is_token & (mass > 0) & jnp.isfinite(mass)", "is_token", VERDICT),
    Mutation("a rule is blamed for the target", "decoding/validate.py",
             "| (is_scored & is_wrong[:, None])", "",
             f"{GUARDS}::test_a_target_that_is_not_finite_is_at_fault_before_draft_and_rule"),
    Mutation("a queue counts its rows twice", "engine/batching.py",
             "generation.stats, n1_fallbacks", "generation.stats + generation.stats, n1_fallbacks",
             "engine/test_queue.py::test_every_prompt_gives_its_greedy_stream"),
    Mutation("noise of the position before", "decoding/round.py",
             "rng.Stream.TARGET, start + 1 + i)", "rng.Stream.TARGET, start + i)",
             f"{MATCH}[ngram]"),
    Mutation("noise that made what was learned", "rng.py",
             "return row_keys if learned is None else", "return row_keys if True else",
             f"{MEMORY}::test_a_second_call_with_the_same_seed_matches_target_distribution[suffix]"),
    Mutation("drafts are drawn before the count is read", "decoding/round.py",
             "num_updates = system.drafter.num_updates(params, state.draft)",
             "num_updates = jnp.uint32(0)",
             f"{MEMORY}::test_a_second_call_with_the_same_seed_matches_target_distribution[sampled]"),
    Mutation("each decoder counts what was learned anew", "engine/engine.py",
             "draft = self._history.params",
             'draft = {**self._history.params, "num_updates": jnp.uint32(0)}',
             f"{MEMORY}::test_the_count_of_updates_belongs_to_the_memory_and_not_to_the_decoder"),
    Mutation("sources that learn share their counts", "rng.py",
             "counts[source] * len(counts) + source", "counts[source]",
             f"{MEMORY}::test_every_count_of_every_source_has_noise_of_its_own"),
    Mutation("a row without a finite logit goes on", "decoding/loop.py",
             "~jnp.isfinite(processed.max(axis=-1))", "(processed != processed).all(axis=-1)",
             f"{DECODE}::test_a_row_in_which_every_token_is_forbidden_stops_with_a_reason"),
    # Rules.
    Mutation("residual: what has no probability is accepted", "rules/chain.py",
             "noise.uniforms * q_d < p_d", "noise.uniforms * q_d <= p_d",
             f"{CERTIFICATE}::"
             "test_mutation_inclusive_boundary_is_caught_by_a_uniform_of_zero"),
    Mutation("residual: replaced from the target itself", "rules/chain.py",
             "jnp.maximum(p[n_accept] - q_next, 0.0)", "p[n_accept]", f"{SETTINGS}[own-residual]"),
    Mutation("block: more than certain", "rules/chain.py",
             "reach.append(jnp.minimum(reach[-1] * ratio[i], 1.0))",
             "reach.append(reach[-1] * ratio[i])", f"{SETTINGS}[own-block]"),
    Mutation("match: what is not offered counts", "rules/chain.py",
             "(proposal.tokens == own[:-1]) & proposal.is_offered",
             "proposal.tokens == own[:-1]",
             f"{RULES}::test_drafts_past_a_rows_own_count_are_never_looked_at"),
    Mutation("typical: entropy with the other sign", "rules/chain.py",
             "delta * jnp.exp(-entropy)", "delta * jnp.exp(entropy)",
             f"{RULES}::test_typical_acceptance_uses_medusas_threshold"),
    Mutation("logits compared the other way", "rules/chain.py",
             "_at(theirs, proposal.tokens) > _at(ours, proposal.tokens)",
             "_at(theirs, proposal.tokens) < _at(ours, proposal.tokens)",
             f"{RULES}::test_logit_comparison_rejects_iff_the_draft_logit_is_larger"),
    Mutation("synthetic: half of the rates", "rules/synthetic.py",
             "jnp.where(proposal.is_offered, rates, 0.0)",
             "jnp.where(proposal.is_offered, rates / 2, 0.0)",
             f"{RULES}::test_synthetic_acceptance_has_the_stated_rates"),
    Mutation("siblings are drawn again", "rules/tree.py",
             "return q.at[node, token].set(0.0)", "return q", f"{ON_TREES}[residual]"),
    Mutation("traversal: a leaf takes too much away", "rules/tree.py",
             "room = mass + 1.0 - w[v]", "room = mass + 1.0", f"{ON_TREES}[traversal]"),
    Mutation("every depth has the root's noise", "rules/tree.py",
             "noise.gumbel[depths]", "noise.gumbel[0 * depths]",
             f"{TREE_RULES}::test_on_a_chain_a_tree_rule_is_the_chain_rule[match-sampled]"),
    # Caches.
    Mutation("one index for all rows", "models/caches/kv.py",
             "return moved.replace(length=self.length + n)",
             "return moved.replace(length=self.length + n.max())", ROLLED_BACK),
    Mutation("all rows write where the first does", "models/caches/kv.py",
             "b * n, start[b]", "b * n, start[0]", ROLLED_BACK),
    Mutation("an accepted path stays where the tree had it", "models/caches/kv.py",
             "moved = self if path is None else self._gather(path)", "moved = self",
             f"{TREE}::test_emits_exactly_the_plain_tokens[greedy-standalone-static]"),
    Mutation("the state takes one input too many", "models/caches/state.py",
             "jnp.arange(width) < n[:, None]", "jnp.arange(width) <= n[:, None]", ROLLED_BACK),
    Mutation("the convolution forgets what is new", "models/caches/state.py",
             "jax.vmap(last)(inputs, n)", "jax.vmap(last)(inputs, 0 * n)", ROLLED_BACK),
    Mutation("replay feeds every pass in full", "models/caches/replay.py",
             "jnp.clip(n - begin, 0, width)", "jnp.clip(n, 0, width)",
             f"{CACHE}::test_a_restored_snapshot_and_the_tokens_since_give_a_fresh_prefill"),
    # Drafters.
    Mutation("standalone: the last prompt token is fed twice", "drafters/standalone/model.py",
             "cache.commit(lengths - 1)", "cache.commit(lengths)", ALIKE),
    Mutation("chain: q is that of another temperature", "drafters/common/chain.py",
             '"probs": jax.nn.softmax(dist, axis=-1)', '"probs": jax.nn.softmax(logits, axis=-1)',
             f"{CERTIFICATE}::test_mixed_temperature_zero_rows_are_argmax_rows"),
    Mutation("ngram: the earliest match wins", "drafters/ngram.py", "size * M + index",
             "size * M + M - index", "drafters/test_draft.py"),
    Mutation("suffix: the rarest continuation wins", "drafters/suffix.py",
             "token = jnp.argmax(counts)", "token = jnp.argmin(counts)",
             "drafters/test_suffix.py::test_the_most_frequent_continuation_is_followed"),
    Mutation("head: its second draft is a position late", "drafters/common/head.py",
             "cache, node - 2)", "cache, node - 1)",
             f"{EAGLE}::test_two_recycled_steps_are_the_published_architecture[eagle-3]"),
    Mutation("head: what drafting wrote is read", "drafters/common/head.py",
             "return HeadState(cache.commit(n), last)",
             "return HeadState(cache.commit(n + 1), last)",
             f"{EAGLE}::test_drafts_after_ten_rounds_are_those_after_a_fresh_prefill[eagle-3]"),
    Mutation("padding is drafted", "drafters/common/vocabulary.py",
             "jnp.where(jnp.arange(V) <= last, logits, -jnp.inf)", "logits",
             "engine/test_padded_vocabularies.py"),
    Mutation("a conversation has two starts", "data/conversations.py",
             "return self.backend.encode(text, add_special_tokens=False).ids",
             "return self.backend.encode(text).ids", "engine/test_messages.py"),
    Mutation("eagle: offsets are taken for ids", "drafters/common/vocabulary.py",
             'jnp.arange(len(head["d2t"])) + head["d2t"]', 'head["d2t"]',
             f"{EAGLE}::test_two_recycled_steps_are_the_published_architecture[eagle-3]"),
    Mutation("modules read their own slot", "drafters/common/sequential.py",
             "return jnp.concatenate([last, x[:, :-1]], axis=1)", "return x",
             f"{MTP}::test_drafts_are_the_published_architecture[sequential]"),
    # Sampling.
    Mutation("filters read logits that are computed twice", "sampling.py",
             "            x = jax.lax.optimization_barrier(x)\n", "",
             "test_sampling.py::test_filters_keep_a_token_however_the_compiler_rounds"),
    Mutation("the nucleus is a token short", "sampling.py",
             "jnp.cumsum(prob, axis=-1) - prob", "jnp.cumsum(prob, axis=-1)", PARAMETERS),
    Mutation("a node is penalised for its own token", "sampling.py",
             "jnp.arange(K) < jnp.arange(T)[:, None]", "jnp.arange(K) <= jnp.arange(T)[:, None]",
             "test_sampling.py::"
             "test_penalties_at_each_node_equal_a_recount_of_the_drafts_before_it"),
    # Meshes.
    Mutation("each device writes as if it had all rows", "models/caches/kv.py",
             'put = by_shard(put_rows, (axes, axes, P("batch"), P()), axes)',
             'put = by_shard(put_rows, (axes, axes, P(), P()), axes)', SHARDED),
    Mutation("each device draws with the seeds of all rows", "sharding.py",
             'PartitionSpec("batch" if x.ndim and x.shape[0] == rows else None)',
             'PartitionSpec("batch" if x.ndim > 1 and x.shape[0] == rows else None)', SHARDED),
    Mutation("rows are not split", "sharding.py", 'SHARDED: Rules = {\n    "batch": "data",',
             "SHARDED: Rules = {",
             f"{PLACED}::test_what_is_large_in_a_state_is_split_over_all_devices[scanned]"),
    Mutation("a cache takes its heads for rows", "models/caches/kv.py",
             'P("layers", "batch", "kv_heads", "slots", "head_dim")',
             'P("layers", "kv_heads", "batch", "slots", "head_dim")',
             f"{PLACED}::test_every_array_of_every_state_says_its_axes[scanned]"),
    Mutation("a weight has an axis that nobody knows", "models/specs.py",
             'axes, hf_name = ("mlp", "embed")', 'axes, hf_name = ("width", "embed")',
             f"{PLACED}::test_every_axis_of_every_weight_has_a_rule_or_stays_whole"),
    # What is timed.
    Mutation("compilation counts as decoding", "compilation.py",
             "self.run_s = total_s - self.compile_s", "self.run_s = total_s",
             "engine/test_compilation.py::"
             "test_compilation_is_no_part_of_the_time_of_a_run"),
    Mutation("a warm-up forgets the samplers", "engine/call.py",
             "rounds_per_sync=1, **options,", "rounds_per_sync=1,",
             "engine/test_compilation.py::test_after_a_warmup_nothing_is_compiled[standalone]"),
]  # fmt: skip


def test_every_mutation_changes_one_place_and_names_its_test():
    for mutation in MUTATIONS:
        text = (ROOT / "spec_jax" / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, f"{mutation.name}: {text.count(mutation.old)} places"
        file, *name = mutation.test.split("[")[0].split("::")
        assert all(f"def {n}(" in (ROOT / "tests" / file).read_text(encoding="utf-8") for n in name)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutant") / "copy"
    ignored = shutil.ignore_patterns(".git", "runs", "__pycache__", "*.egg-info")
    return shutil.copytree(ROOT, folder, ignore=ignored)


@pytest.mark.measure
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_default_tier_kills(mutation, copy):
    path = copy / "spec_jax" / mutation.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    options = [] if "[" in mutation.test else ["-m", "not exhaustive"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *options,
             f"tests/{mutation.test}"],
            cwd=copy, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)},
            capture_output=True, text=True,
        )  # fmt: skip
    finally:
        path.write_text(text, encoding="utf-8")
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
