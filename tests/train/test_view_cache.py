"""Views kept on disk: bit-equal, bounded, of one target alone."""

import jax
import numpy as np
import pytest
from support.tiny_models import LLAMA, random_tokens, random_weights

from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.train.objective import target_view
from spec_jax.train.placement import Placement
from spec_jax.train.view_cache import ViewCache

TAPS = (0, 2)


class Counted:
    """Computes views, and counts them."""

    def __init__(self, params):
        self.params, self.count = params, 0

    def __call__(self, tokens, begins=None):
        self.count += 1
        return target_view(self.params, tokens, begins, model=transformer.model(LLAMA), taps=TAPS)


def cache(folder, params, max_bytes=1 << 20, taps=TAPS, mesh=None):
    return ViewCache(folder, max_bytes, params, LLAMA, taps, Placement.of(mesh))


@pytest.mark.representatives("float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_view_is_computed_once_and_read_back_bit_equal(tmp_path, dtype):
    params = random_weights(LLAMA, dtype=dtype)
    compute, tokens = Counted(params), random_tokens(2, 9)
    first = cache(tmp_path, params).view(compute, tokens)
    again = cache(tmp_path, params).view(compute, tokens)
    assert compute.count == 1
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert again.hidden.dtype == first.hidden.dtype


@pytest.mark.parametrize("one, other", [(None, "data:2,tensor:2"), ("data:4", None)])
def test_a_view_that_one_mesh_stored_is_read_to_another(tmp_path, one, other):
    """On a mesh each device has its own rows; what lies on several devices is stored once."""
    params = random_weights(LLAMA)
    compute, tokens = Counted(params), random_tokens(4, 9)
    first = cache(tmp_path, params, mesh=one).view(compute, tokens)
    again = cache(tmp_path, params, mesh=other).view(compute, tokens)
    assert compute.count == 1 and len(list(tmp_path.iterdir())) == 4
    jax.tree.map(np.testing.assert_array_equal, first, again)
    if other is not None:
        rows = [shard.index[0] for shard in again.hidden.addressable_shards]
        assert {(row.start, row.stop) for row in rows} == {(0, 2), (2, 4)}


def test_rows_are_found_beside_others(tmp_path):
    """As in the next epoch, which draws the same windows in other batches."""
    params = random_weights(LLAMA)
    compute, tokens = Counted(params), np.asarray(random_tokens(4, 9))
    begins = np.tile(np.int32([0] * 5 + [5] * 4), (4, 1))
    views = cache(tmp_path, params)
    first = [views.view(compute, tokens[rows], begins[rows]) for rows in ([0, 1], [2, 3])]
    again = views.view(compute, tokens[[3, 0]], begins[[3, 0]])
    assert compute.count == 2
    for name in ("features", "hidden"):
        expected = [getattr(first[1], name)[1], getattr(first[0], name)[0]]
        np.testing.assert_array_equal(getattr(again, name), expected)
    views.view(compute, tokens[[3, 0]])  # of one document each
    assert compute.count == 3


def test_only_rows_that_are_not_there_take_room(tmp_path):
    params = random_weights(LLAMA)
    compute, tokens = Counted(params), np.asarray(random_tokens(3, 9))
    views = cache(tmp_path, params, 3 * (9 * (16 * len(TAPS) + 16) * 4 + 512))
    for rows in ([0, 1], [1, 2], [2, 2]):
        views.view(compute, tokens[rows])
    assert compute.count == 2 and len(list(tmp_path.iterdir())) == 3


def test_a_full_cache_keeps_the_oldest(tmp_path):
    params = random_weights(LLAMA)
    compute = Counted(params)
    views = [random_tokens(2, 9, seed=seed) for seed in range(5)]
    size = 2 * (9 * (16 * len(TAPS) + 16) * 4 + 512)
    for tokens in views:
        cache(tmp_path, params, 2 * size).view(compute, tokens)
    files = list(tmp_path.iterdir())
    assert len(files) == 2 * 2 and sum(path.stat().st_size for path in files) <= 2 * size
    cache(tmp_path, params).view(compute, views[0])
    assert compute.count == 5
    with pytest.raises(ConfigError, match="max_bytes is -1"):
        cache(tmp_path, params, -1)


def test_a_damaged_file_is_computed_anew(tmp_path):
    params = random_weights(LLAMA)
    compute, tokens = Counted(params), random_tokens(2, 9)
    expected = cache(tmp_path, params).view(compute, tokens)
    path = min(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:100])
    found = cache(tmp_path, params).view(compute, tokens)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    cache(tmp_path, params).view(compute, tokens)
    assert compute.count == 2
