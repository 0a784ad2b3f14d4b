"""The reader of compiled programs: against numbers worked out by hand, and against programs that
are compiled for eight CPU devices with known collectives."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from spec_jax.meshes import make_mesh
from spec_jax.planning import hlo

# Three layers of weights 256x512 and a cache [3,4,2,128,128], as a TPU's compiler writes it: a
# round reads a slice of the weights in each layer, writes a row of the cache in place, and has a
# conditional of which one branch gathers.
TPU = """\
HloModule jit_generate, is_scheduled=true

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}

%inner_slice (p.0: bf16[3,256,512], p.1: s32[]) -> bf16[256,512] {
  %p.0 = bf16[3,256,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = s32[]{:T(128)} parameter(1)
  %zero.0 = s32[]{:T(128)} constant(0)
  %slice.0 = bf16[1,256,512]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p.0, %p.1, %zero.0, %zero.0), dynamic_slice_sizes={1,256,512}
  ROOT %flat.0 = bf16[256,512]{1,0:T(8,128)(2,1)} bitcast(%slice.0)
}

%product (p.2: bf16[4,256], p.3: bf16[3,256,512], p.4: s32[]) -> bf16[4,512] {
  %p.2 = bf16[4,256]{1,0:T(4,128)(2,1)S(1)} parameter(0)
  %p.3 = bf16[3,256,512]{2,1,0:T(8,128)(2,1)} parameter(1)
  %p.4 = s32[]{:T(128)} parameter(2)
  %w.0 = bf16[256,512]{1,0:T(8,128)(2,1)} fusion(%p.3, %p.4), kind=kLoop, calls=%inner_slice
  ROOT %dot.0 = bf16[4,512]{1,0:T(4,128)(2,1)S(1)} convolution(%p.2, %w.0), dim_labels=bf_io->bf
}

%layer (carry: (s32[], bf16[4,256], bf16[3,256,512], bf16[3,4,2,128,128])) -> (s32[], bf16[4,256], bf16[3,256,512], bf16[3,4,2,128,128]) {
  %one = s32[]{:T(128)} constant(1)
  %none = s32[]{:T(128)} constant(0)
  %carry = (s32[]{:T(128)}, bf16[4,256]{1,0:T(4,128)(2,1)S(1)}, bf16[3,256,512]{2,1,0:T(8,128)(2,1)}, /*index=3*/bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %act = bf16[4,256]{1,0:T(4,128)(2,1)S(1)} get-tuple-element(%carry), index=1
  %w = bf16[3,256,512]{2,1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=2
  %cache = bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=3
  %fusion.1 = bf16[4,512]{1,0:T(4,128)(2,1)S(1)} fusion(%act, %w, %i), kind=kOutput, calls=%product
  %reduced = bf16[4,512]{1,0:T(4,128)(2,1)S(1)} all-reduce(%fusion.1), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(generate)/while/body/verify/dot_general"}
  %rows = bf16[1,1,2,1,128]{4,3,2,1,0:T(8,128)(2,1)S(1)} bitcast(%reduced)
  %written = bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)} dynamic-update-slice(%cache, %rows, %i, %none, %none, /*index=5*/%none, %none)
  %next = s32[]{:T(128)S(6)} add(%i, %one)
  ROOT %out = (s32[]{:T(128)}, bf16[4,256]{1,0:T(4,128)(2,1)S(1)}, bf16[3,256,512]{2,1,0:T(8,128)(2,1)}, bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)}) tuple(%next, %act, %w, %written)
}

%layers_left (carry.1: (s32[], bf16[4,256], bf16[3,256,512], bf16[3,4,2,128,128])) -> pred[] {
  %carry.1 = (s32[]{:T(128)}, bf16[4,256]{1,0:T(4,128)(2,1)S(1)}, bf16[3,256,512]{2,1,0:T(8,128)(2,1)}, bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)}) parameter(0)
  %num_layers = s32[]{:T(128)S(6)} constant(3)
  %i.1 = s32[]{:T(128)S(6)} get-tuple-element(%carry.1), index=0
  ROOT %is_less = pred[]{:T(512)S(6)} compare(%i.1, %num_layers), direction=LT
}

%gathers (p.5: bf16[4,64]) -> bf16[4,512] {
  %p.5 = bf16[4,64]{1,0:T(4,128)(2,1)} parameter(0)
  %start = (bf16[4,64]{1,0:T(4,128)(2,1)}, bf16[4,512]{1,0:T(4,128)(2,1)}) all-gather-start(%p.5), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}
  ROOT %done = bf16[4,512]{1,0:T(4,128)(2,1)} all-gather-done(%start)
}

%stays (p.6: bf16[4,64]) -> bf16[4,512] {
  %p.6 = bf16[4,64]{1,0:T(4,128)(2,1)} parameter(0)
  %grown = bf16[4,512]{1,0:T(4,128)(2,1)S(1)} broadcast(%p.6), dimensions={0,1}
  ROOT %padded = bf16[4,512]{1,0:T(4,128)(2,1)S(1)} negate(%grown)
}

%round (state: (s32[], bf16[4,256], bf16[3,256,512], bf16[3,4,2,128,128], bf16[4,64])) -> (s32[], bf16[4,256], bf16[3,256,512], bf16[3,4,2,128,128], bf16[4,64]) {
  %state = (s32[]{:T(128)}, bf16[4,256]{1,0:T(4,128)(2,1)}, bf16[3,256,512]{2,1,0:T(8,128)(2,1)}, bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)}, bf16[4,64]{1,0:T(4,128)(2,1)}) parameter(0)
  %n = s32[]{:T(128)S(6)} get-tuple-element(%state), index=0
  %act.1 = bf16[4,256]{1,0:T(4,128)(2,1)} get-tuple-element(%state), index=1
  %w.1 = bf16[3,256,512]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %cache.1 = bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=3
  %few = bf16[4,64]{1,0:T(4,128)(2,1)} get-tuple-element(%state), index=4
  %moving = (bf16[4,256]{1,0:T(4,128)(2,1)S(1)}, bf16[4,256]{1,0:T(4,128)(2,1)}, u32[]{:S(2)}) copy-start(%act.1)
  %moved = bf16[4,256]{1,0:T(4,128)(2,1)S(1)} copy-done(%moving)
  %begin = s32[]{:T(128)S(6)} constant(0)
  %first = s32[]{:T(128)S(6)} copy(%begin)
  %inner = (s32[]{:T(128)}, bf16[4,256]{1,0:T(4,128)(2,1)S(1)}, bf16[3,256,512]{2,1,0:T(8,128)(2,1)}, bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)}) tuple(%first, %moved, %w.1, %cache.1)
  %scan = (s32[]{:T(128)}, bf16[4,256]{1,0:T(4,128)(2,1)S(1)}, bf16[3,256,512]{2,1,0:T(8,128)(2,1)}, bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)}) while(%inner), condition=%layers_left, body=%layer
  %which = pred[]{:T(512)S(6)} custom-call(%n), custom_call_target="Choose"
  %chosen = bf16[4,512]{1,0:T(4,128)(2,1)} conditional(%which, %few, %few), branch_computations={%gathers, %stays}
  %cache.2 = bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)} get-tuple-element(%scan), index=3
  ROOT %again = (s32[]{:T(128)}, bf16[4,256]{1,0:T(4,128)(2,1)}, bf16[3,256,512]{2,1,0:T(8,128)(2,1)}, bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)}, bf16[4,64]{1,0:T(4,128)(2,1)}) tuple(%n, %act.1, %w.1, %cache.2, %few)
}

%has_work (state.1: (s32[], bf16[4,256], bf16[3,256,512], bf16[3,4,2,128,128], bf16[4,64])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, bf16[4,256]{1,0:T(4,128)(2,1)}, bf16[3,256,512]{2,1,0:T(8,128)(2,1)}, bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)}, bf16[4,64]{1,0:T(4,128)(2,1)}) parameter(0)
  %n.1 = s32[]{:T(128)S(6)} get-tuple-element(%state.1), index=0
  %all = s32[]{:T(128)S(6)} all-reduce(%n.1), channel_id=3, replica_groups=mesh['data'=2,'tensor'=4] {'data'}, to_apply=%add
  %bound = s32[]{:T(128)S(6)} custom-call(), custom_call_target="Bound"
  ROOT %has = pred[]{:T(512)S(6)} compare(%all, %bound), direction=LT
}

ENTRY %main (a.0: s32[], a.1: bf16[4,256], a.2: bf16[3,256,512], a.3: bf16[3,4,2,128,128], a.4: bf16[4,64]) -> bf16[3,4,2,128,128] {
  %a.0 = s32[]{:T(128)S(6)} parameter(0)
  %a.1 = bf16[4,256]{1,0:T(4,128)(2,1)} parameter(1)
  %a.2 = bf16[3,256,512]{2,1,0:T(8,128)(2,1)} parameter(2)
  %a.3 = bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)} parameter(3)
  %a.4 = bf16[4,64]{1,0:T(4,128)(2,1)} parameter(4)
  %relaid = bf16[3,4,2,128,128]{4,2,3,1,0:T(8,128)(2,1)} copy(%a.3)
  %begin.1 = (s32[]{:T(128)}, bf16[4,256]{1,0:T(4,128)(2,1)}, bf16[3,256,512]{2,1,0:T(8,128)(2,1)}, bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)}, bf16[4,64]{1,0:T(4,128)(2,1)}) tuple(%a.0, %a.1, %a.2, %relaid, %a.4)
  %rounds = (s32[]{:T(128)}, bf16[4,256]{1,0:T(4,128)(2,1)}, bf16[3,256,512]{2,1,0:T(8,128)(2,1)}, bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)}, bf16[4,64]{1,0:T(4,128)(2,1)}) while(%begin.1), condition=%has_work, body=%round
  ROOT %result = bf16[3,4,2,128,128]{4,3,2,1,0:T(8,128)(2,1)} get-tuple-element(%rounds), index=3
}
"""  # noqa: E501
CACHE = (3, 4, 2, 128, 128)


@pytest.fixture(scope="module")
def tpu() -> hlo.Program:
    return hlo.read(TPU)


def test_a_round_is_one_pass_of_the_loop_that_depends_on_data_times_its_inner_loops(tpu):
    assert tpu.loops() == {"scan": 3, "rounds": None}
    times = {step.instruction.name: step.times for step in tpu.round()}
    assert (times["fusion.1"], times["is_less"], times["chosen"], times["has"]) == (3, 4, 1, 1)
    assert "relaid" in {step.instruction.name for step in tpu.call()}
    assert "relaid" not in times


def test_collectives_of_conditions_and_of_every_branch_are_counted_once_each(tpu):
    moved = hlo.traffic(tpu, tpu.round())
    assert moved.by_kind == {"all-gather": (1, 4096), "all-reduce": (3 + 1, 3 * 4 * 512 * 2 + 4)}
    assert moved.largest_gather == 4 * 512 * 2
    assert [c.kind for c in moved.in_branches] == ["all-gather"]
    assert "verify" in moved.collectives[1].op_name


def test_hbm_bytes_are_slices_updates_and_the_dearer_branch(tpu):
    weights = 3 * 256 * 512 * 2  # a layer's slice, in each of three layers
    rows = 3 * 2 * 128 * 2  # written in place; the rows come from on-chip memory
    prefetch = 4 * 256 * 2
    gathered, stays = (4 * 128 + 4 * 512) * 2, 4 * 128 * 2  # 64 is padded to 128
    total = hlo.traffic(tpu, tpu.round()).hbm_bytes
    assert total == weights + rows + prefetch + max(gathered, stays)


def test_copies_of_a_cache_are_found_at_entry_and_not_where_it_is_written_in_place(tpu):
    find = functools.partial(hlo.cache_copies, tpu, caches={0: math.prod(CACHE[1:])})
    (copy,) = find(tpu.call())
    assert (copy.name, copy.kind, copy.times, copy.is_prefetch) == ("relaid", "copy", 1, False)
    assert find(tpu.round()) == []


# A call that writes rows of a donated cache, which then comes out of a fusion that copies it; and a
# weight of the same shape that is copied, too.
ALIASED = """\
HloModule jit_write, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}, may-alias) }, entry_computation_layout={()->()}

%turn (p: bf16[2,4,32,128]) -> bf16[2,4,32,128] {
  %p = bf16[2,4,32,128]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %same = bf16[2,4,32,128]{3,2,1,0:T(8,128)(2,1)} bitcast(%p)
  ROOT %turned = bf16[2,4,32,128]{3,1,2,0:T(8,128)(2,1)} copy(%same)
}

ENTRY %main (w: bf16[2,4,32,128], k: bf16[2,4,32,128], v: bf16[2,4,32,128], n: bf16[4,8,128]) -> (bf16[2,4,32,128], bf16[2,4,32,128], bf16[2,4,32,128]) {
  %w = bf16[2,4,32,128]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %k = bf16[2,4,32,128]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %v = bf16[2,4,32,128]{3,2,1,0:T(8,128)(2,1)} parameter(2)
  %n = bf16[4,8,128]{2,1,0:T(8,128)(2,1)} parameter(3)
  %small = bf16[4,8,128]{2,1,0:T(8,128)(2,1)S(1)} copy(%n)
  %relaid = bf16[2,4,32,128]{3,1,2,0:T(8,128)(2,1)} copy(%w)
  %written = (bf16[2,4,32,128]{3,2,1,0:T(8,128)(2,1)}, bf16[2,4,32,128]{3,2,1,0:T(8,128)(2,1)}) custom-call(%n, %small, %k, %v), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{0}: (2, {}), {1}: (3, {})}
  %k.1 = bf16[2,4,32,128]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%written), index=0
  %v.1 = bf16[2,4,32,128]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%written), index=1
  %turned.1 = bf16[2,4,32,128]{3,1,2,0:T(8,128)(2,1)} fusion(%v.1), kind=kLoop, calls=%turn
  ROOT %all = (bf16[2,4,32,128]{3,2,1,0:T(8,128)(2,1)}, bf16[2,4,32,128]{3,2,1,0:T(8,128)(2,1)}, bf16[2,4,32,128]{3,1,2,0:T(8,128)(2,1)}) tuple(%k.1, %turned.1, %relaid)
}
"""  # noqa: E501


def test_a_call_that_writes_into_an_operand_moves_what_it_is_given_beside_it():
    program = hlo.read(ALIASED)
    moves = {m.step.instruction.name: m for m in hlo.traffic(program, program.call()).moves}
    rows = 4 * 8 * 128 * 2
    assert (moves["written"].read, moves["written"].written) == (rows, 2 * rows)


def test_a_grouped_product_reads_a_matrix_for_each_row():
    """At most: of 96 matrices eight rows read eight, and a hundred rows all."""

    def read(rows):
        shape = f"bf16[{rows},256]{{1,0:T(8,128)(2,1)}}"
        return f"""\
HloModule jit_f, is_scheduled=true

ENTRY %main (w: bf16[96,256,256], x: bf16[{rows},256]) -> bf16[{rows},256] {{
  %w = bf16[96,256,256]{{2,1,0:T(8,128)(2,1)}} parameter(0)
  %x = {shape} parameter(1)
  ROOT %ragged-dot-none.1 = {shape} custom-call(%x, %w), custom_call_target="tpu_custom_call"
}}
"""

    for rows, matrices in ((8, 8), (104, 96)):
        program = hlo.read(read(rows))
        moves = hlo.traffic(program, program.call()).moves
        (move,) = (m for m in moves if m.step.instruction.opcode == "custom-call")
        assert move.read == 2 * 256 * (256 * matrices + rows)


# Two layers on a GPU. A stack, of which a slice is started and waited for, and of which another is
# read in place by cuBLAS; two weights side by side in one of Triton's products, whose sums are
# split, and the columns of the second; a weight that is multiplied with one number a row and summed
# afterwards; experts that are chosen by number; all in a round that is a command buffer.
GPU = """\
HloModule jit_generate, is_scheduled=true

%sliced (p.0: bf16[2,256,512], p.1: s32[]) -> bf16[1,256,512] {
  %p.0 = bf16[2,256,512]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero.0 = s32[] constant(0)
  ROOT %slice.0 = bf16[1,256,512]{2,1,0} dynamic-slice(%p.0, %p.1, %zero.0, %zero.0), dynamic_slice_sizes={1,256,512}
}

%address_computation (p.2: bf16[4,256], p.3: bf16[2,256,512], p.4: s32[]) -> (bf16[4,512], s8[4194304]) {
  %p.2 = bf16[4,256]{1,0} parameter(0)
  %p.3 = bf16[2,256,512]{2,1,0} parameter(1)
  %p.4 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %slice.1 = bf16[1,256,512]{2,1,0} dynamic-slice(%p.3, %p.4, %zero.1, %zero.1), dynamic_slice_sizes={1,256,512}
  %flat.1 = bf16[256,512]{1,0} bitcast(%slice.1)
  ROOT %call.1 = (bf16[4,512]{1,0}, s8[4194304]{0}) custom-call(%p.2, %flat.1), custom_call_target="__cublas$lt$matmul"
}

%joined (p.5: bf16[4,256], p.6: bf16[256,512], p.7: bf16[256,128]) -> f32[2,4,640] {
  %p.5 = bf16[4,256]{1,0} parameter(0)
  %p.6 = bf16[256,512]{1,0} parameter(1)
  %p.7 = bf16[256,128]{1,0} parameter(2)
  %wide = bf16[256,640]{1,0} concatenate(%p.6, %p.7), dimensions={1}
  %left = bf16[2,128,4]{2,1,0} bitcast(%p.5)
  %right = bf16[2,128,640]{2,1,0} bitcast(%wide)
  ROOT %dot.0 = f32[2,4,640]{2,1,0} dot(%left, %right), lhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}

%add.1 (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%x.1, %y.1)
}

%summed (p.12: f32[2,4,640]) -> bf16[4,128] {
  %p.12 = f32[2,4,640]{2,1,0} parameter(0)
  %zero.2 = f32[] constant(0)
  %sums = f32[4,640]{1,0} reduce(%p.12, %zero.2), dimensions={0}, to_apply=%add.1
  %rounded = bf16[4,640]{1,0} convert(%sums)
  ROOT %second = bf16[4,128]{1,0} slice(%rounded), slice={[0:4], [512:640]}
}

%multiplied (p.8: bf16[256], p.9: bf16[256,128]) -> bf16[256,128] {
  %p.8 = bf16[256]{0} parameter(0)
  %p.9 = bf16[256,128]{1,0} parameter(1)
  %wide.1 = bf16[256,128]{1,0} broadcast(%p.8), dimensions={0}
  ROOT %products = bf16[256,128]{1,0} multiply(%p.9, %wide.1)
}

%chosen (p.10: bf16[16,64,32], p.11: s32[3,1]) -> bf16[3,64,32] {
  %p.10 = bf16[16,64,32]{2,1,0} parameter(0)
  %p.11 = s32[3,1]{1,0} parameter(1)
  ROOT %taken = bf16[3,64,32]{2,1,0} gather(%p.10, %p.11), offset_dims={1,2}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,64,32}
}

%command_buffer (c.0: bf16[2,256,512], c.1: bf16[256,512], c.2: bf16[256,128], c.3: bf16[16,64,32], c.4: bf16[4,256], c.5: s32[3,1], c.6: s32[]) -> bf16[3,64,32] {
  %c.0 = bf16[2,256,512]{2,1,0} parameter(0)
  %c.1 = bf16[256,512]{1,0} parameter(1)
  %c.2 = bf16[256,128]{1,0} parameter(2)
  %c.3 = bf16[16,64,32]{2,1,0} parameter(3)
  %c.4 = bf16[4,256]{1,0} parameter(4)
  %c.5 = s32[3,1]{1,0} parameter(5)
  %c.6 = s32[] parameter(6)
  %fusion-start = ((bf16[2,256,512]{2,1,0}, s32[]), bf16[1,256,512]{2,1,0}, u32[]) fusion-start(%c.0, %c.6), kind=kLoop, calls=%sliced
  %in_place = (bf16[4,512]{1,0}, s8[4194304]{0}) fusion(%c.4, %c.0, %c.6), kind=kCustom, calls=%address_computation
  %fusion-done = bf16[1,256,512]{2,1,0} fusion-done(%fusion-start)
  %gemm = f32[2,4,640]{2,1,0} fusion(%c.4, %c.1, %c.2), kind=kCustom, calls=%joined, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %columns = bf16[4,128]{1,0} fusion(%gemm), kind=kLoop, calls=%summed
  %row = bf16[256]{0} slice(%c.4), slice={[0:1], [0:256]}
  %written = bf16[256,128]{1,0} fusion(%row, %c.2), kind=kLoop, calls=%multiplied
  ROOT %experts = bf16[3,64,32]{2,1,0} fusion(%c.3, %c.5), kind=kLoop, calls=%chosen
}

ENTRY %main (a.0: bf16[2,256,512], a.1: bf16[256,512], a.2: bf16[256,128], a.3: bf16[16,64,32], a.4: bf16[4,256], a.5: s32[3,1], a.6: s32[]) -> bf16[3,64,32] {
  %a.0 = bf16[2,256,512]{2,1,0} parameter(0)
  %a.1 = bf16[256,512]{1,0} parameter(1)
  %a.2 = bf16[256,128]{1,0} parameter(2)
  %a.3 = bf16[16,64,32]{2,1,0} parameter(3)
  %a.4 = bf16[4,256]{1,0} parameter(4)
  %a.5 = s32[3,1]{1,0} parameter(5)
  %a.6 = s32[] parameter(6)
  ROOT %all = bf16[3,64,32]{2,1,0} call(%a.0, %a.1, %a.2, %a.3, %a.4, %a.5, %a.6), to_apply=%command_buffer
}
"""  # noqa: E501


def test_a_gpus_fusions_products_and_slices_move_what_they_name():
    program = hlo.read(GPU)
    moved = {m.step.instruction.name: m for m in hlo.traffic(program, program.call()).moves}
    layer, rows, choice = 2 * 256 * 512, 2 * 4 * 256, 2 * 3 * 64 * 32
    assert {name: (m.read, m.written) for name, m in moved.items()} == {
        "fusion-start": (layer, layer),
        "in_place": (rows + layer, 2 * 4 * 512),  # and none of cuBLAS's scratch memory
        "gemm": (rows + layer + 2 * 256 * 128, 4 * 2 * 4 * 640),
        "columns": (2 * 4 * 4 * 128, 2 * 4 * 128),
        "row": (2 * 256, 2 * 256),
        "written": (2 * 256 + 2 * 256 * 128, 2 * 256 * 128),
        "experts": (choice + 4 * 3, choice),
    }
    assert sum(map(hlo.is_run, program.call())) == len(moved)


def test_weights_that_a_gpu_writes_again_are_found():
    program = hlo.read(GPU)
    # "gemm" has more elements than "a.4", and writes a product.
    weights = {"a.0": 256 * 512, "a.1": 256 * 512, "a.2": 256 * 128, "a.3": 64 * 32}
    weights["a.4"] = 4 * 256
    found = {c.name: c.kind for c in hlo.rewrites(program, program.call(), weights)}
    assert found == {"fusion-start": "dynamic-slice", "written": "multiply", "experts": "gather"}


def test_a_copy_of_a_weight_is_none_of_a_cache_of_its_shape():
    program, layer = hlo.read(ALIASED), 4 * 32 * 128
    found = lambda caches: [c.name for c in hlo.cache_copies(program, program.call(), caches)]
    assert found({0: layer, 1: layer}) == ["turned.1"]
    assert found({0: layer}) == [] and found({1: 3 * layer}) == []
    assert found({2: layer}) == ["relaid"]


def test_a_program_of_this_jax_is_read_as_it_was_written():
    mesh, L, K, D = make_mesh("data:2,tensor:4"), 3, 2, 16

    def step(weights, x, n, is_wide):
        def layer(x, w):
            return jnp.tanh(x @ w[0]) @ w[1], None

        def one_round(carry):
            i, x = carry
            for _ in range(K):
                x, _ = jax.lax.scan(layer, x, weights)
            gathered = lambda x: jax.lax.all_gather(x, "data", axis=0).sum(0)
            rows = P("data")
            local = jax.shard_map(gathered, in_specs=rows, out_specs=rows, check_vma=False)
            return i + 1, jax.lax.cond(is_wide, local, lambda x: x, x)

        return jax.lax.while_loop(lambda c: (c[0] < n) & (c[1].max() < 9), one_round, (0, x))

    shape = lambda *s, spec: jax.ShapeDtypeStruct(
        s, jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec)
    )
    columns, rows = P(None, None, "tensor"), P(None, "tensor", None)
    weights = (shape(L, D, 4 * D, spec=columns), shape(L, 4 * D, D, spec=rows))
    x = shape(4, D, spec=P("data", None))
    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(weights, x, 7, True).compile()
    program = hlo.read(compiled.as_text())
    assert sorted(n for n in program.loops().values() if n is not None) == [L] * K
    moved = hlo.traffic(program, program.round())
    activations = [c for c in moved.collectives if c.num_bytes == 2 * D * 4]
    assert sum(c.times for c in activations) == K * L
    (gather,) = moved.in_branches
    assert (gather.kind, gather.num_bytes) == ("all-gather", 4 * D * 4)
    # Weights and their slices: at least read once a pass.
    assert moved.hbm_bytes >= K * L * 2 * D * D * 4
