"""Mutations of each invariant, rule, cache and drafter, each of which the default tier kills.

    pytest -m measure tests/test_mutations.py    # about five CPU-seconds each

Each changes one expression of a copy of the package, in which the named test must then fail;
``support/mutants.py`` has the notation. The exhaustive tier tries those that are marked *, one or
two of each room.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from support import mutants

MUTATIONS = mutants.read("""
    target keeps a rejected draft
        round.commit: state.target.commit(n_, path_) -> state.target.commit(n_ + 1, path_)
        test_a_round_commits_what_it_emits_and_finished_rows_change_nothing
    kinds are exchanged
        round.emit: f_(x_, Kind.CORRECTED, Kind.BONUS) -> f_(x_, Kind.BONUS, Kind.CORRECTED)
        test_every_kind_is_recorded_where_it_happened
    finished rows go on
        apply_limits: jnp.where(state.is_active, x_, 0) -> x_
        test_stop_token_inside_a_block_cuts_what_follows
    one token more than the limit
        apply_limits: state.limit - total -> state.limit - total + 1
        test_a_round_commits_what_it_emits_and_finished_rows_change_nothing
    one token after a stop token
        apply_limits: jnp.where(stop_, index_ + 1, ...) -> jnp.where(stop_, index_ + 2, ...)
        test_stop_token_inside_a_block_cuts_what_follows
    a row is put into another's slot
        loop._insert: full.at[row].set(one[0]) -> full.at[0].set(one[0])
        test_rounds_conform[ngram-chain-match]
    ids outside of the vocabulary count
        validate_proposal: (proposal.tokens >= 0) & x_ -> proposal.tokens >= 0
        test_a_faulty_draft_stops_its_row_alone
    any number of drafts counts
        validate_proposal: x_ | ~has_count -> x_
        test_a_faulty_draft_stops_its_row_alone
    greedy rows read what drafts were drawn from
        validate._guard_probs: jnp.where(is_greedy[:, None, None], x_, read) -> read
        test_rows_of_temperature_0_never_read_what_their_drafts_were_drawn_from
    a distribution of any sum counts
        validate._guard_probs: ~(jnp.abs(mass - 1.0) <= _SUM_TOLERANCE) -> mass != mass
        test_what_is_no_distribution_ends_a_row_that_is_sampled_and_offers_it[0]
    a rule accepts what is not offered
        validate_verdict: (verdict.tokens[:, :-1] == y_) & x_ -> verdict.tokens[:, :-1] == y_
        test_a_verdict_that_cannot_be_ends_its_row_and_is_safe_to_commit
    * a rule emits what has no probability
        _has_replacement: x_ & (mass > 0) & jnp.isfinite(mass) -> x_
        test_a_verdict_that_cannot_be_ends_its_row_and_is_safe_to_commit
    a rule is blamed for the target
        find_fault: jnp.where(is_target, x_, fault) -> fault
        test_a_target_without_a_distribution_is_at_fault_before_draft_and_rule_where_it_is_read
    a position after the limit ends a row
        apply_limits: x_ & (num_before < kept) -> x_
        test_greedy_rows_of_trees_are_those_of_automata_walked_by_hand
    a queue counts its rows twice
        Driver.count_row: self.count(x_) -> self.count(x_ + x_)
        test_every_prompt_gives_its_greedy_stream
    * noise of the position before
        round_noise.at: keys_(x_, start + 1 + i) -> keys_(x_, start + i)
        test_plain_decoding_emits_the_oracles_stream
    drafts are drawn with the draft sampler's seed alone
        loop.init_state: rng.draft_seeds(x_, y_) -> y_
        test_one_draft_sampler_draws_other_drafts_for_every_request
    a draft sampler's seed is forgotten
        loop.init_state: rng.draft_seeds(x_, y_) -> x_
        test_one_draft_sampler_draws_other_drafts_for_every_request
    noise that made what was learned
        rng.keys: update_counts is None -> True
        test_a_second_call_with_the_same_seed_matches_target_distribution[suffix]
    what replaces a draft has the noise of the first token
        round_noise: keys_(rng.Purpose.REPLACE, start) -> keys_(rng.Purpose.TARGET, start)
        test_one_draft_sampler_draws_other_drafts_for_every_request
    drafts are drawn before the count is read
        round.draft: memory.read(params["draft"], state.draft) -> jnp.uint32(0)
        test_a_second_call_with_the_same_seed_matches_target_distribution[sampled]
    each decoder counts what was learned anew
        Engine.params: x_.history.params -> {**x_.history.params, "num_updates": jnp.uint32(0)}
        test_the_count_of_updates_belongs_to_the_memory_and_not_to_the_decoder
    an overlapped block that was dropped is kept
        remaining_ahead: jnp.where(is_whole, x_, 0) -> jnp.where(block.n_draft > 0, x_, 0)
        test_accepts_all_that_is_right_and_counts_it
    an overlapped block is accepted by the scores before its own
        pearl.accept_chain: jnp.minimum(x_, ahead.n_draft[:, None]) -> jnp.minimum(x_ // 2, x_)
        test_emits_exactly_the_plain_stream_for_mixed_rows
    the token after a whole overlapped chain is emitted
        accept_chain: decoding.emit(a_, b_, c_, d_, e_, n_) -> decoding.emit(a_, b_, c_, d_, e_)
        test_emits_exactly_the_plain_stream_for_mixed_rows
    an overlapped draft is not rolled back
        pearl._follow_outcome: drafter.sync.rewind(draft, x_) -> draft
        test_the_drafts_state_is_that_of_its_prefix_kept_or_rolled_back
    an overlapped block is drawn without what is ahead of it
        pearl.draft_ahead: view.sampler -> side.sampler
        test_accepts_all_that_is_right_and_counts_it
    overlapped drafts lag behind their distributions
        pearl.remaining_ahead: moved.replace(...) -> moved.replace(..., probs=block.probs)
        test_4000_requests_of_one_draft_sampler_have_the_targets_distribution[standalone-chain]
    a draft reads what the target rejected
        BesideCache.attend: positions < end -> positions <= end
        test_rounds_conform[self-chain-match]
    what a draft writes is in the target's cache
        round.draft: a_.replace(draft=x_) -> a_.replace(draft=x_, target=a_.target.rewind(1))
        test_rounds_conform[self-chain-match]
    a draft writes into the target's cache
        open_beside: isinstance(cache, KVCache) -> False
        test_no_drafter_tree_or_rule_moves_a_cache[self-chain]
    a state is not donated
        loop.generate: f_(g_, static_argnames=x_, donate_argnames=y_) -> f_(g_, static_argnames=x_)
        test_generate_is_given_every_cache_and_copies_none[K4-B1-draft2-unrolled]
    sources that learn share their counts
        rng._fold_in_counts: counts[source] * len(counts) + source -> counts[source]
        test_every_count_of_every_source_has_noise_of_its_own
    K is chosen from outputs of the same noise
        AdaptiveRunner.__call__: count_tuner(state, x_) -> state
        test_the_noise_of_a_round_is_made_with_the_updates_of_the_choice_of_k
    a row without a finite logit goes on
        loop.init_state: ~jnp.isfinite(x_.max(axis=-1)) -> (x_ != x_).all(axis=-1)
        test_a_row_in_which_every_token_is_forbidden_stops_with_a_reason
    a queue puts every new prompt into its first row
        DecodeQueue._put: f_(x_, place, prefix, index) -> f_(x_, 0, prefix, index)
        test_every_prompt_gives_its_greedy_stream
    a prompt's last chunk counts its padding
        loop.feed_in_passes: np.clip(lengths - begin, 0, size) -> np.clip(lengths, 0, size)
        test_a_long_prompt_is_fed_while_other_rows_decode[plain]
    residual: what has no probability is accepted
        chain.residual: x_ * q_d < p_d -> x_ * q_d <= p_d
        test_mutation_inclusive_boundary_is_caught_by_a_uniform_of_zero
    residual: replaced from the target itself
        chain.residual: jnp.maximum(p_ - q_, 0.0) -> p_
        test_every_setting_in_one_batch_matches_target_distribution[own-residual]
    block: more than certain
        chain.block: jnp.minimum(x_ * ratio_, 1.0) -> x_ * ratio_
        test_every_setting_in_one_batch_matches_target_distribution[own-block]
    match: what is not offered counts
        chain._match: x_ & proposal.is_offered -> x_
        test_drafts_past_a_rows_own_count_are_never_looked_at
    typical: entropy with the other sign
        chain._typical_threshold: jnp.exp(-entropy) -> jnp.exp(entropy)
        test_typical_acceptance_uses_medusas_threshold
    logits compared the other way
        logit_comparison: x_ > y_ + LOGIT_MARGIN -> x_ < y_ + LOGIT_MARGIN
        test_logit_comparison_rejects_iff_the_draft_logit_is_larger
    synthetic: half of the rates
        chain.accept_at: f_(x_, rates, 0.0) -> f_(x_, rates / 2, 0.0)
        test_synthetic_acceptance_has_the_stated_rates
    siblings are drawn again
        tree._without: q.at[node, token].set(0.0) -> q
        test_a_sampled_tree_matches_target_distribution[static-residual]
    * traversal: a leaf takes too much away
        traversal.take_leaf: mass + 1.0 - w[v] -> mass + 1.0
        test_a_sampled_tree_matches_target_distribution[static-traversal]
    every depth has the root's noise
        tree.match: noise.gumbel[depths_] -> noise.gumbel[0 * depths_]
        test_on_a_chain_a_tree_rule_is_the_chain_rule[match-sampled]
    one index for all rows
        KVCache.commit: self.length + n -> self.length + n.max()
        test_state_after_accept_and_roll_back_equals_a_fresh_prefill
    all rows write where the first does
        kv._put_by_row: start[b] -> start[0]
        test_state_after_accept_and_roll_back_equals_a_fresh_prefill
    blocks end where the shortest row does
        attention._over_blocks: sees.end.max() -> sees.end.min()
        test_blocks_up_to_the_longest_row_are_the_whole_of_what_is_seen[chain]
    slots of a block that overlaps are seen twice
        attention._over_blocks: sees(...) & (x_ >= i * block) -> sees(...)
        test_blocks_up_to_the_longest_row_are_the_whole_of_what_is_seen[to the end]
    an accepted path stays where the tree had it
        KVCache.commit: self if path is None else x_ -> self
        test_rounds_conform[standalone-static-greedy]
    the state takes one input too many
        LayerState.commit: x_ < n[:, None] -> x_ <= n[:, None]
        test_state_after_accept_and_roll_back_equals_a_fresh_prefill
    the convolution forgets what is new
        LayerState.commit: jax.vmap(x_)(inputs, n) -> jax.vmap(x_)(inputs, 0 * n)
        test_state_after_accept_and_roll_back_equals_a_fresh_prefill
    the convolution keeps what was rejected
        LayerState.commit: jax.vmap(x_)(inputs, n) -> jax.vmap(x_)(inputs, 0 * n + width)
        test_state_after_accept_and_roll_back_equals_a_fresh_prefill
    padding is fed into the state
        LayerState.commit: x_ < n[:, None] -> jnp.ones((len(n), width), bool)
        test_state_after_accept_and_roll_back_equals_a_fresh_prefill
    gates of a key head are taken for its values
        delta._project: (Z, 2 * Z, 2 * Z + width) -> (Z, 2 * Z, 2 * Z + width - 1)
        test_logits_of_a_directory_written_by_transformers
    an expert that nobody chose is computed
        moe.mix_in_turn: is_chosen.sum() -> weights.shape[1]
        test_an_expert_that_no_token_chose_is_not_computed
    the last chosen expert is left out
        moe.mix_in_turn: is_chosen.sum() -> is_chosen.sum() - 1
        test_every_way_is_the_weighted_sum_of_each_tokens_experts
    experts of other devices are left out
        shard_map_over.on_part: jax.lax.psum(x_, over) -> x_
        test_on_a_mesh_each_device_computes_the_experts_that_it_holds_for_its_rows
    of a stack the experts of the first layer are computed
        moe._groups: weight.layer * X -> 0 * weight.layer
        test_of_a_stack_the_experts_of_one_layer_are_computed
    a loop takes layers that do not repeat
        runs.shortest_runs: same[period] // period + 2 -> same[period] // period + 3
        test_runs_are_the_shortest_that_hold_every_layer_in_order
    layers of a loop write one window
        StateCache.with_window: f_(g_, index=index, axis=0) -> f_(g_, index=0, axis=0)
        test_a_loop_over_layers_decodes_as_layers_in_turn
    gates and their other halves are exchanged
        tensors.expert_places: ("gate_proj", "up_proj") -> ("up_proj", "gate_proj")
        test_logits_of_a_directory_written_by_transformers
    the value of a latent is the end of its slot
        deepseek._attend_latents: x_[..., :rank] -> x_[..., -rank:]
        test_latents_attend_as_expanded_keys_and_values_do
    * a slot holds the latent before its norm
        deepseek._attention: rms_norm(latent[..., :rank], y_, z_) -> latent[..., :rank]
        test_logits_of_a_directory_written_by_transformers[deepseek, yarn]
    latent attention of longer contexts is as sharp as before
        DeepseekConfig.attention_scale: scale * x_ ** 2 -> scale
        test_logits_of_a_directory_written_by_transformers[deepseek, yarn]
    a row of blocks has one scale
        float8._scaled: np.asarray(r) // b - y_ -> 0 * np.asarray(r)
        test_float8_blocks_are_multiplied_by_their_scales
    a delta net adds to what its key held
        delta.correct: v_BTNH - x_ -> v_BTNH
        test_a_delta_net_equals_its_recurrence
    tokens of a window do not correct each other
        delta.invert_unit_lower: jnp.where(m_, x, 0) -> 0 * x
        test_a_delta_net_equals_its_recurrence
    a pass forgets what earlier passes of its window wrote
        delta.correct: jnp.where(is_earlier, weights, 0.0) -> 0.0 * weights
        test_a_window_that_several_passes_fill_is_one_window
    norms less one are taken for factors
        layers.centred_norms: 1 + w -> w
        test_logits_of_a_directory_written_by_transformers
    groups of layers commit without the path
        GroupedCache.commit: group.commit(n, path) -> group.commit(n, None)
        test_a_path_through_a_tree_equals_the_same_tokens_in_a_chain
    * replay feeds every pass in full
        caches.replay.replay: n - begin -> n
        test_a_restored_snapshot_and_the_tokens_since_give_a_fresh_prefill
    layers of a snapshot are ordered as text
        snapshot._as_tuples: inner[str(i)] -> inner[sorted(inner)[i]]
        test_a_saved_snapshot_keeps_the_order_of_more_than_ten_layers
    standalone: the last prompt token is fed twice
        standalone.prefill: prompt.lengths - 1 -> prompt.lengths
        test_rounds_conform[standalone-chain-match]
    standalone: what was rejected stays
        standalone.commit: state.cache.commit(n) -> state.cache.commit(0 * n + 4)
        test_rounds_conform[standalone-chain-match]
    chain: q is that of another temperature
        Drafted.add: jax.nn.softmax(dist, ...) -> jax.nn.softmax(logits, ...)
        test_mixed_temperature_zero_rows_are_argmax_rows
    ngram: the earliest match wins
        ngram.lookup: size * M + index -> size * M + M - index
        test_lookup_is_the_search_by_hand
    suffix: the rarest continuation wins
        suffix.continuation: jnp.argmax(counts) -> jnp.argmin(counts)
        test_the_most_frequent_continuation_is_followed
    * head: its second draft is a position late
        head_drafter.propose: node - 2 -> node - 1
        test_two_recycled_steps_are_the_published_architecture[eagle-3]
    head: what drafting wrote is read
        head_drafter.refresh: cache.commit(n) -> cache.commit(n + 1)
        test_rounds_conform[eagle3-chain-match]
    head: what drafting wrote stays, in as many slots as are kept
        head_drafter.refresh: cache.commit(n) -> state.cache.commit(n)
        test_rounds_conform[eagle3-chain-match]
    head: a chunk of a prompt that has ended changes its last state
        head_drafter.refresh: jnp.where((n > 0)[:, None], x_, state.last) -> x_
        test_chunks_leave_the_state_of_one_pass[5-eagle-3]
    a head catches up with the tokens before those that it skipped
        deferred.with_deferred_commits.catch_up: length - x_ + 1 -> length - x_
        test_a_head_catches_up_with_each_rows_own_tokens_and_the_states_before_them
    a head keeps the states of another row
        with_deferred_commits.defer_commit: features[:, 0] -> jnp.roll(features, 1, axis=0)[:, 0]
        test_a_head_catches_up_with_each_rows_own_tokens_and_the_states_before_them
    a coupled tree is drawn with the noise of a position later
        common.tree._noise: context.length + depth -> context.length + depth + 1
        test_a_draft_from_the_targets_distribution_is_the_token_of_a_coupled_rule[tree]
    drafts are the argmax, reported as drawn
        add.draw: sample(dist, gumbel[:, x_]) -> argmax(dist)
        test_every_setting_in_one_batch_matches_target_distribution[own-residual]
    a draft of the target's own temperature is drawn sharper than reported
        add.draw: sample(x_, gumbel[:, i_]) -> sample(3 * x_, gumbel[:, i_])
        test_every_setting_in_one_batch_matches_target_distribution[own-residual]
    p-eagle: its masks begin a position late
        peagle.propose: head.feed(p_, *pairs, cache, 0, w_) -> head.feed(p_, *pairs, cache, 1, w_)
        test_two_rounds_draft_what_a_pass_of_true_and_masked_pairs_defines[p-eagle]
    p-eagle: its masks stay in the cache
        peagle.propose: f_(cache=cache) -> f_(cache=cache.commit(0 * context.length + 1))
        test_two_rounds_draft_what_a_pass_of_true_and_masked_pairs_defines[p-eagle]
    documents of a window see each other
        attention._block_scores: low[row][..., None] -> 0 * low[row][..., None]
        test_a_packed_window_is_trained_on_as_its_documents_are_alone[eagle3-None]
    positions go on from one document to the next
        Window.after: positions - begins -> positions
        test_positions_begin_anew_with_each_document
    parts of a batch are averaged, whatever counts in them
        step._sum_of_parts: graded(params, part, counts) -> graded(params, part)
        test_parts_are_weighed_by_their_tokens_and_a_batch_without_any_changes_nothing
    a batch without tokens moves by its momentum
        step.train_step: jnp.where(is_empty, old, new) -> new
        test_parts_are_weighed_by_their_tokens_and_a_batch_without_any_changes_nothing
    turns of a list of samplers have its seeds
        rng.turn_seed: seed + turn * x_ -> seed
        test_turns_of_a_list_of_samplers_never_have_one_seed
    a draft runs into the next document
        chunks.chain_loss: batch.place(2, T) -> jnp.arange(2, 2 + T)[None]
        test_a_packed_window_is_trained_on_as_its_documents_are_alone[eagle3-None]
    block: it begins a position late
        model._windows: cache.length[:, None] + x_ -> cache.length[:, None] + 1 + x_
        test_two_rounds_draft_what_independent_arithmetic_drafts[dflash]
    block: what it wrote is committed
        model.inject: cache.commit(n) -> cache.commit(n + 1)
        test_two_rounds_draft_what_independent_arithmetic_drafts[dspark]
    block: a convolution has no tokens before
        model._convolutions: x_[:, :, :width] -> blocks
        test_two_rounds_draft_what_independent_arithmetic_drafts[dflash2]
    block: a layer sees more than its window
        model._windows: at - size + 1 -> at - size
        test_two_rounds_draft_what_independent_arithmetic_drafts[dflash]
    * a confidence looks at the draft that it decides on
        Drafted.add: confidence >= x_ -> confidence * token >= x_
        test_a_confidence_in_a_draft_may_decide_on_it_before_it_is_drawn[block]
    a block is dropped where a later confidence is low
        Drafted.proposal: self.n_draft -> jnp.where(self.is_going, self.n_draft, 0)
        test_a_confidence_in_a_draft_may_decide_on_it_before_it_is_drawn[block]
    padding is drafted
        vocabulary.aligned: jnp.where(x_, logits, -jnp.inf) -> logits
        test_padding_is_not_drafted_by_a_model_without_a_tokenizer
    an unfinished character is settled
        Tokenizer.settled_after: text.removesuffix(x_) -> text
        test_what_is_settled_begins_every_later_text[bytes alone]
    a run of bytes is settled before its end
        Tokenizer.settled_after: ids[: x_] -> ids
        test_what_is_settled_begins_every_later_text[byte fallback]
    a conversation has two starts
        Encoder.prompt: f_(text, add_special_tokens=False) -> f_(text)
        test_a_conversation_is_the_templates_text_without_a_second_start
    eagle: offsets are taken for ids
        vocabulary.draft_ids: x_ + head["d2t"] -> head["d2t"]
        test_two_recycled_steps_are_the_published_architecture[eagle-3]
    modules read their own slot
        sequential._delayed: jnp.concatenate(...) -> x
        test_drafts_are_the_published_architecture[sequential]
    modules forget the slot before a window
        sequential_drafter.refresh: _delayed(before, x) -> _delayed(0 * before, x)
        test_rounds_conform[mtp in turn-chain-match]
    modules join a state with an embedding in the other order
        mtp.model.forward: [e, h] -> [h, e]
        test_drafts_are_the_published_architecture[recycled]
    modules hand a state on before its norm
        mtp.model.recycle: rms_norm(x, y_, z_) -> x
        test_drafts_are_the_published_architecture[sequential]
    filters read logits that are computed twice
        sampling.process_rows: jax.lax.optimization_barrier(x_) -> x_
        test_filters_keep_a_token_however_the_compiler_rounds
    * the nucleus is a token short
        _of_largest: jnp.cumsum(prob_, axis=-1) - prob_ -> jnp.cumsum(prob_, axis=-1)
        test_every_parameter_and_all_together_in_one_batch_of_mixed_rows
    a node's processor follows drafts of other paths
        per_token: jnp.where(is_taken, new, old) -> new
        test_of_a_tree_each_node_follows_its_own_path
    a node is penalised for its own token
        processors._apply_penalties: jnp.arange(K) < x_ -> jnp.arange(K) <= x_
        test_every_parameter_and_all_together_in_one_batch_of_mixed_rows
    penalties know nothing of the drafts before a node
        processors._apply_penalties: K == 0 -> K >= 0
        test_every_parameter_and_all_together_in_one_batch_of_mixed_rows
    each device writes as if it had all rows
        KVCache._put: P("batch") -> P()
        test_a_mesh_changes_no_token
    each device draws with the seeds of all rows
        sharding.shard_map_rows: x.ndim and x_ == rows -> x.ndim > 1 and x_ == rows
        test_a_mesh_changes_no_token
    the copies of a key-value head are not neighbours
        sharding.repeat_heads: jnp.repeat(x, ...) -> jnp.concatenate([x] * copies, axis=axis)
        test_a_mesh_changes_no_token[grouped]
    every device along tensor samples all rows
        sampling.process: shard_map_rows(run, SAMPLED_ROWS) -> shard_map_rows(run)
        test_a_round_sends_little_and_copies_no_cache[plain sampled]
    rows are not split
        sharding.SHARDED: "batch" -> "no axis"
        test_what_is_large_in_a_state_is_split_over_all_devices[scanned]
    * a cache takes its heads for rows
        KVCache._array_axes: P(x_, "batch", "kv_heads", ...) -> P(x_, "kv_heads", "batch", ...)
        test_every_array_of_every_state_says_its_axes[scanned]
    a weight has an axis that nobody knows
        specs.gated_specs: ("mlp", "embed") -> ("width", "embed")
        test_every_axis_of_every_weight_has_a_rule_or_stays_whole
    compilation counts as decoding
        Timed.__exit__: total_ - self.compile_s -> total_
        test_compilation_is_no_part_of_the_time_of_a_run
    a warm-up forgets the samplers
        SpeculativeDecoder.warmup: GenerateOptions(...) -> GenerateOptions(rounds_per_sync=1)
        test_after_a_warmup_nothing_is_compiled[standalone]
    * a block sees the state of its own anchor
        Blocks._sees: token < anchor -> token <= anchor
        test_attention_is_that_of_one_explicit_mask[None-False]
    a sliding layer sees a token more
        Blocks._sees: jnp.abs(distance) < size -> jnp.abs(distance) <= size
        test_attention_is_that_of_one_explicit_mask[3-False]
    a window is a token wider
        Sees.low: last - self.size + 1 -> last - self.size
        test_tokens_out_of_sight_change_nothing_and_the_last_in_sight_does
    a window is a token narrower
        Sees.low: last - self.size + 1 -> last - self.size + 2
        test_tokens_out_of_sight_change_nothing_and_the_last_in_sight_does
    a window along a path is a node narrower
        Sees._is_inside: later <= self.size -> later < self.size
        test_what_rejected_drafts_wrote_is_never_seen[mistral]
    * a rejected branch overwrites a slot that is still seen
        RollingCache.create: config.sliding_window + c_ -> config.sliding_window + c_ // 2
        test_what_rejected_drafts_wrote_is_never_seen[mistral]
    the largest pass overwrites a slot that it sees
        RollingCache.create: config.sliding_window + c_ -> config.sliding_window + c_ - 2
        test_a_prompt_in_chunks_has_the_logits_of_the_whole[mistral-12]
    a window that passes fill is a token too large
        RollingCache.open_window: width > self.max_pass -> width > self.max_pass + 1
        test_a_pass_that_would_overwrite_what_it_sees_is_refused
    an accepted path is read past the last slot
        KVCache._gather: self.slots_of(x_) -> x_
        test_what_rejected_drafts_wrote_is_never_seen[mistral]
    drafts of a block are compared with the token before
        block_loss: slots(batch.tokens, anchors, first, K) -> slots(batch.tokens, anchors, 0, K)
        test_a_loss_is_the_weighted_mean_over_drafts_that_count
    the target's distribution is one of a token later
        block_loss: slots(batch.view.hidden, ...) -> slots(batch.view.hidden, anchors, 1, K)
        test_a_loss_is_the_weighted_mean_over_drafts_that_count
    a draft counts by the token of its slot
        anchors.counted: slots(padded, anchors, 1, k_) -> slots(padded, anchors, 0, k_)
        test_a_draft_counts_if_its_token_and_all_before_it_do
    a draft counts after one that does not
        anchors.counted: jnp.cumprod(...) > 0 -> counts
        test_a_draft_counts_if_its_token_and_all_before_it_do
    masked pairs see a pair too many
        eagle.objective.states_at: Blocks(c_, anchors, s_, o_) -> Blocks(c_, anchors + 1, s_, o_)
        test_a_loss_is_the_weighted_mean_over_drafts_of_whole_passes[p-eagle]
    a label that is no candidate is none while training
        candidate_loss: jnp.where(is_candidate, x_, labels) -> x_
        test_a_label_that_is_no_candidate_takes_the_place_of_the_least_likely_one
    a convolution begins as a mean of a token and those before
        model.conv_table: ParamSpec(..., init="first tap") -> ParamSpec(s_, a_, n_, init="ones")
        test_a_new_head_of_dflash_2_drafts_as_its_layers_do_alone
    a token that was cancelled and set back is none
        CancellationToken.watch: x_ or self._times != before -> x_
        test_cancelling_in_a_round_ends_the_call_after_it
    half a character is sent
        Tokenizer.settled_after: text.removesuffix(x_) -> text
        test_every_piece_is_whole_characters
    the start of a stop string is sent
        TextTracker._piece: max(x_, default=1) - 1 -> max(x_, default=1) - 2
        test_the_start_of_a_stop_string_is_held_back_until_it_is_none
    log-probabilities of a tree are those of its first nodes
        observers._see_round: of.nodes -> 0 * of.nodes + jnp.arange(of.nodes.shape[1])
        test_log_probabilities_of_a_tree_are_those_of_the_accepted_path
    a rollout has the model's probabilities for those of the policy
        rollouts._collect: (a_, b_, x_.processed, x_.raw) -> (a_, b_, x_.raw, x_.raw)
        test_rows_are_plain_decodings_with_the_probabilities_of_a_pass_without_a_cache[eagle]
    a rollout has the draft's probabilities for those of the target
        observers._see_round: of.scores -> of.scores.replace(processed=jnp.log(of.proposal.probs))
        test_rows_are_plain_decodings_with_the_probabilities_of_a_pass_without_a_cache[eagle]
    a rollout's features lie a token late
        rollouts._features.update: of.columns - 1 -> of.columns
        test_rows_are_plain_decodings_with_the_probabilities_of_a_pass_without_a_cache[eagle]
    a step is trained on the model's own probabilities
        objective.logprobs: (of(warm), of(logits)) -> (of(logits), of(logits))
        test_the_loss_is_the_formulas[5]
    * noise of a step is used again
        RlExperiment._batch: x_ + first_seed + y_ -> x_ + y_
        test_noise_and_prompts_are_new_in_every_step
    the reference stays the first policy
        RlExperiment.step: after.replace(reference=reference) -> after
        test_the_reference_is_the_policy_of_the_last_multiple_of_reference_every
    rows that went on alone are put into others' places
        rollouts.rollout: places[chosen] -> chosen
        test_rows_that_finish_leave_and_the_others_go_on_with_another_k
    positions of a block begin with the window
        Blocks.positions: first[:, :, None] + x_ -> 0 * first[:, :, None] + x_
        test_a_block_is_scored_as_it_is_drafted[dspark]
    rows of queries stay in pairs
        gguf.tensors._read_paired: pairs.swapaxes(1, 2) -> pairs
        test_a_file_is_the_model_that_it_was_made_from[llama-Q8_0]
    * a file's fields that are not read are passed over
        config._check_read: key in x_ or y_ -> True
        test_what_a_file_says_and_is_not_read_is_refused_by_name[llama.logit_scale]
    the reference accepts every draft
        reference.acceptance_probability: min(1.0, x_) -> 1.0
        test_joint_distribution_matches_target_exactly[1-3]
    the reference replaces drafts from the target itself
        reference.adjusted_distribution: np.maximum(p - q, 0.0) -> p
        test_joint_distribution_matches_target_exactly[1-3]
    the reference scores a draft by the row after it
        reference.FunctionTarget.verify: tokens[:i] -> tokens[:i + 1]
        test_joint_distribution_matches_target_exactly[1-3]
    draft and reference share their noise
        reference.generator: [seed, *stream.encode()] -> [seed]
        test_streams_of_a_seed_are_independent
""")


def test_every_mutation_changes_one_place_and_names_its_test():
    problems = []
    for mutation in MUTATIONS:
        try:
            mutants.find_site(mutation)
            mutants.find_test(mutation)
        except LookupError as error:
            problems.append(str(error))
    assert not problems, "repair these mutations:\n" + "\n".join(problems)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutant") / "copy"
    ignored = shutil.ignore_patterns(".git", "runs", "__pycache__", "*.egg-info")
    return shutil.copytree(mutants.ROOT, folder, ignore=ignored)


def _tier(mutation):
    mark = pytest.mark.exhaustive if mutation.is_in_ci else pytest.mark.measure
    return pytest.param(mutation, marks=mark, id=mutation.name)


@pytest.mark.parametrize("mutation", [_tier(mutation) for mutation in MUTATIONS])
def test_the_default_tier_kills(mutation, copy):
    file, text = mutants.mutate(mutation)
    original = (copy / file).read_text(encoding="utf-8")
    (copy / file).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    command.append(mutants.find_test(mutation))
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    for tier in ("not exhaustive", ""):  # the second where the first has none of the test's cases
        run = [*command, "-m", tier]
        done = subprocess.run(run, cwd=copy, env=env, capture_output=True, text=True)
        if done.returncode != pytest.ExitCode.NO_TESTS_COLLECTED:
            break
    (copy / file).write_text(original, encoding="utf-8")
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
