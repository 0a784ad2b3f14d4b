"""Compilation is timed apart, said where it is long, done ahead by ``warmup``, and kept on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import threading
import time
import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import plain_tokens
from support.tiny_models import LLAMA, loaded

from spec_jax import DecodeQueue, compilation, progress, testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.decoding.loop import passes_of
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.engine import Engine
from spec_jax.engine.stats import Stats
from spec_jax.evaluation.bench import Bench
from spec_jax.evaluation.cells import Cell
from spec_jax.loading import LoadedModel, random_head
from spec_jax.testing.oracles import toy_logits

COMPILE, TRACE = (
    f"/jax/core/compile/{name}_duration" for name in ("backend_compile", "jaxpr_trace")
)

pytestmark = pytest.mark.usefixtures("programs_kept")


class Clock:
    """Stands in for the module ``time``: both of its clocks, moved by hand."""

    _starts = itertools.count(1000, 1000)  # no two tests share a second

    def __init__(self):
        self.now_s = float(next(self._starts))

    def time(self) -> float:
        return self.now_s

    perf_counter = time

    def compile(self, seconds: float, event: str = COMPILE) -> None:
        """Passes time as jax does when it compiles."""
        jax.monitoring.record_scalar(event, self.now_s)
        begin, self.now_s = self.now_s, self.now_s + seconds
        jax.monitoring.record_event_time_span(event, begin, self.now_s)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(compilation, "time", clock)
    return clock


@contextlib.contextmanager
def counted():
    """Yields the names of what jax compiles meanwhile, or reads from its cache."""
    names = []

    def listen(event, begin, end, **about):
        if event == COMPILE:
            names.append(about.get("fun_name"))

    jax.monitoring.register_event_time_span_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_time_span_listener(listen)


def test_compilation_is_no_part_of_the_time_of_a_run(clock):
    with compilation.Timed() as outer, compilation.Timed() as timed:
        clock.now_s += 1.0
        clock.compile(3.0, TRACE)
        clock.compile(50.0)
        clock.now_s += 2.0
    assert (timed.run_s, timed.compile_s) == (outer.run_s, outer.compile_s) == (3.0, 53.0)
    clock.compile(7.0)  # outside of any timing
    with compilation.Timed() as timed:
        clock.now_s += 1.0
        jax.monitoring.record_event_time_span("/jax/another", 0.0, clock.now_s)
    assert (timed.run_s, timed.compile_s) == (1.0, 0.0)


def test_a_span_within_another_counts_once(clock):
    with compilation.Timed() as timed:
        begin = clock.now_s
        clock.compile(4.0)
        clock.now_s += 2.0
        compilation.add_span(begin, clock.now_s)
    assert (timed.run_s, timed.compile_s) == (0.0, 6.0)
    assert compilation.union_s([(3, 5), (0, 1), (4, 9), (0.5, 1)]) == 7


@pytest.mark.parametrize("key, compile_s", [("same", 5.0), ("other", 0.0)])
def test_who_waits_for_another_thread_that_compiles_counts_it_too(clock, key, compile_s):
    def other_thread():
        with compilation.NamedProgram("a round", key):
            clock.compile(2.0)  # before this thread asks for it
            asked.set()
            begun.wait()
            clock.compile(5.0)

    asked, begun = threading.Event(), threading.Event()
    thread = threading.Thread(target=other_thread)
    thread.start()
    asked.wait()
    with compilation.Timed() as timed, compilation.NamedProgram("a round", "same"):
        begun.set()
        thread.join()
        clock.now_s += 1.0
    assert (timed.run_s, timed.compile_s) == (6.0 - compile_s, compile_s)


def test_what_takes_long_is_said_and_what_does_not_is_not(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(progress, "_stream", lambda: stream)
    long = progress.Notice("compiling a round", after_s=0.0)
    long._timer.join()
    short = progress.Notice("compiling a prefill", after_s=1e3)
    short.close()
    long.close()
    assert stream.getvalue().startswith("compiling a round … ")
    assert stream.getvalue().endswith(" s\n") and stream.getvalue().count("\n") == 1


def test_the_first_call_compiles_and_the_second_does_not():
    decoder = SpeculativeDecoder(testing.mock_model(9), testing.mock_model(9, 1))
    found = []
    for _ in range(2):
        decoder.reset_stats()
        with counted() as names:
            begin_s = time.perf_counter()
            decoder.generate([1, 2, 3], 20)
            found.append((decoder.stats, time.perf_counter() - begin_s, len(names)))
    (first, first_s, num), (second, _, none) = found
    assert first.compile_s > 0 and num > 0 and second.compile_s == none == 0
    assert first.prefill_s + first.decode_s + first.compile_s < first_s
    assert first.elapsed_s == first.prefill_s + first.decode_s
    assert first.to_dict()["compile_s"] == first.compile_s
    assert (Stats(compile_s=1.5) + Stats(compile_s=2.0)).compile_s == 3.5


def decoders(kind: str) -> SpeculativeDecoder:
    target, draft = testing.mock_model(11), testing.mock_model(11, 1)
    if kind == "plain":
        return SpeculativeDecoder(target)
    if kind == "suffix":
        return SpeculativeDecoder(target, config=SpeculativeConfig("suffix"))
    if kind == "eagle":
        target = loaded(LLAMA, "target")
        head = random_head(EagleConfig.of_target(LLAMA, 3), jax.random.key(0))
        return SpeculativeDecoder(target, head, SpeculativeConfig("eagle", 2))
    options = {"is_adaptive": True, "adaptive_buckets": (0, 1, 3)} if kind == "adaptive" else {}
    return SpeculativeDecoder(target, draft, SpeculativeConfig(**options))


@pytest.mark.representatives("standalone")
@pytest.mark.parametrize("kind", ["plain", "standalone", "suffix", "eagle", "adaptive"])
def test_after_a_warmup_nothing_is_compiled(kind):
    """Also for a shorter prompt, another length of output, other values of the sampler, rounds one
    by one, and every K."""
    decoder = decoders(kind)
    hot = functools.partial(SamplerConfig, 0.7, top_p=0.9)
    options = {"sampler": hot(), "logprobs": kind == "standalone"}
    assert decoder.warmup((3, 20), 40, batch=2, **options) > 0
    assert decoder.stats == Stats()
    if kind == "adaptive":
        assert decoder.adaptive.costs and decoder.adaptive.tuner.settled is None
    ids = np.arange(20) % 9
    with counted() as names:
        decoder.generate([ids.tolist(), [1]], 40, **options | {"sampler": hot(seed=3)})
        options |= {"sampler": SamplerConfig(1.1, top_p=0.5)}
        decoder.generate([[4, 5]] * 2, 30, rounds_per_sync=1, **options)
        assert decoder.warmup(np.int64(3), 40, batch=2, **options) == 0
    assert names == []
    assert decoder.stats.compile_s == 0


def test_a_warmup_compiles_several_samples_of_a_prompt():
    decoder, hot = decoders("plain"), functools.partial(SamplerConfig, 0.7)
    assert decoder.warmup(20, 40, num_samples=3, sampler=hot()) > 0
    with counted() as names:
        assert len(decoder.generate([1] * 18, 40, num_samples=3, sampler=hot(seed=3))) == 3
    assert names == []


@pytest.fixture
def jax_cache():
    """Puts jax's own settings of its cache back."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation.compilation_cache.reset_cache()


def test_programs_are_kept_where_one_says(tmp_path, monkeypatch, jax_cache):
    given = jax.config.jax_compilation_cache_dir
    assert str(compilation.enable_compilation_cache()) == given  # one that is set stays
    folder = tmp_path / "programs"
    assert compilation.enable_compilation_cache(folder) == folder  # though jax has compiled before
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.jit(lambda x: jnp.sin(x) * 3)(jnp.ones(7))
    assert any(folder.iterdir())
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(compilation.pathlib.Path, "home", lambda: tmp_path)
    usual = tmp_path / ".cache" / "spec_jax" / f"jax-{jax.__version__}"
    assert compilation.enable_compilation_cache() == usual
    assert jax.config.jax_compilation_cache_dir == str(usual)


def test_a_damaged_program_among_those_that_are_kept_is_compiled_again(tmp_path, jax_cache):
    """A run that is killed leaves half a file, and one that reads may meet one that writes."""
    compilation.enable_compilation_cache(tmp_path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compiled = lambda: jax.jit(lambda x: jnp.sin(x) * 5)(jnp.ones(7))
    expected = compiled()
    for path in tmp_path.glob("*-cache"):
        path.write_bytes(path.read_bytes()[:100])
    np.testing.assert_array_equal(compiled(), expected)


@pytest.fixture
def kept(monkeypatch):
    """The bounded programs of one test: every set of them holds 100 maps, other things 1,000."""
    kept = compilation._Kept()
    monkeypatch.setattr(compilation, "_kept", kept)
    monkeypatch.setattr(compilation, "_count_maps", lambda: 1000 + 100 * len(kept.programs))
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(len(kept.programs)))
    cleared = kept.cleared = []
    return kept


@functools.partial(compilation.bounded_jit, static_argnames="power")
def powered(x, *, power):
    return x**power


def test_the_programs_that_were_not_used_for_longest_are_dropped(kept):
    x = jnp.arange(3.0)
    for power in (2, 3, 4, 2):
        powered(x, power=power)
    assert powered.num_programs() == 3 and kept.cleared == []
    assert compilation.release_programs(1250) == 1200
    with counted() as names:
        for power in (4, 2):
            powered(x, power=power)
        assert names == []
        np.testing.assert_array_equal(powered(x, power=3), [0, 1, 8])
    assert names == ["jit(powered)"]


def test_all_programs_are_dropped_only_if_those_of_the_package_do_not_suffice(kept):
    kept.use((powered, 2), lambda: jax.jit(jnp.sin))
    assert compilation.release_programs(1100) == 1100 and len(kept.programs) == 1
    assert compilation.release_programs(900) == 1000
    assert kept.cleared == [0]


def test_a_process_keeps_programs_up_to_a_third_of_the_maps_that_it_may_have(kept, monkeypatch):
    """What others hold does not make it drop everything again and again."""

    def compile_many():
        sizes = []
        for _ in range(200):
            kept.use((object(),), types.SimpleNamespace)._cache_size = lambda: 1
            kept.num_compiled += 1
            kept.bound(None)
            sizes.append(len(kept.programs))
        return sizes

    monkeypatch.setattr(compilation, "_LIMIT", 9000)
    sizes = compile_many()
    assert 20 <= max(sizes) < 20 + compilation._LOOK_EVERY and min(sizes[20:]) >= 3
    assert kept.cleared == []
    monkeypatch.setattr(compilation, "_LIMIT", 3000)  # of which others hold a third
    sizes = compile_many()
    assert kept.cleared == [0] and 10 <= max(sizes[20:]) < 10 + compilation._LOOK_EVERY


def test_nothing_is_dropped_while_a_program_is_traced(kept, monkeypatch):
    monkeypatch.setattr(compilation, "_LOOK_EVERY", 0)
    released = []
    monkeypatch.setattr(compilation, "release_programs", lambda maps: released.append(maps) or 0)
    monkeypatch.setattr(compilation, "_count_maps", lambda: 10**9)
    jax.make_jaxpr(lambda x: powered(x, power=2))(1.0)
    assert released == []
    powered(1.0, power=2)
    assert len(released) == 1


@pytest.mark.exhaustive
def test_a_call_and_a_queue_go_on_after_their_programs_are_dropped(kept, monkeypatch):
    decoder = SpeculativeDecoder(testing.mock_model(9), testing.mock_model(9, 1))
    expected = decoder.generate([1, 2, 3], 5, sampler=SamplerConfig(1.0)).tokens
    generate = Engine.generate

    def dropping(*args):
        compilation.release_programs(0)
        return generate(*args)

    monkeypatch.setattr(Engine, "generate", dropping)
    options = dict(max_new_tokens=5, sampler=SamplerConfig(1.0))
    assert decoder.generate([1, 2, 3], rounds_per_sync=1, **options).tokens == expected
    rows = dict(DecodeQueue(decoder, [[1, 2, 3], [4, 5]], batch=1, **options))
    assert rows[0].tokens == expected and len(rows) == 2 and len(kept.cleared) > 3


@flax.struct.dataclass
class UnpaddedCache(testing.TokenCache):
    """Keeps the whole window, however much of it is committed."""

    width: jax.Array  # i32[B], of the window

    def commit(self, n, path=None):
        return super().commit(jnp.where(n > 0, self.width, 0))


def unpadded(target: LoadedModel) -> LoadedModel:
    """Returns a toy model that cannot forget padding."""
    toy = target.model

    def init_cache(*args):
        cache = toy.init_cache(*args)
        return UnpaddedCache(cache.tokens, cache.length, cache.length)

    def forward(params, tokens, cache, **options):
        output = toy.forward(params, tokens, cache, **options)
        width = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
        return output._replace(cache=output.cache.replace(width=width))

    model = toy._replace(init_cache=init_cache, forward=forward, can_rewind=False)
    return dataclasses.replace(target, model=model)


def test_prompts_cost_what_they_hold_and_one_program_a_size_of_pass():
    """Beside the longest of their set: in a call, and in a queue whatever rows are free at once."""
    decoder = SpeculativeDecoder(testing.mock_model(7))
    lengths = (3, 40, 70, 130, 200, 700)
    prompts = [[i * n % 7 for i in range(n)] for n in lengths]
    alone = [decoder.generate(ids, 4).tokens for ids in prompts]
    fed = [sum(n for _, n in passes_of(length, 1024, decoder.system())) for length in lengths]
    assert fed == [32, 64, 96, 160, 224, 704]
    for batch in (1, 4):
        with counted() as names:
            rows = dict(DecodeQueue(decoder, prompts * 2, batch=batch, max_new_tokens=4))
            for ids, tokens in zip(prompts, alone):
                assert decoder.generate(ids, 4, pad_to=700).tokens == tokens
        assert [rows[i].tokens for i in range(12)] == alone * 2
        sizes = 3 * (2 if batch > 1 else 1)  # of one row, and of all
        assert names.count("_feed_chunk") + names.count("prefill_target") <= sizes
        assert all(names.count(name) <= 2 for name in ("_start_chunks", "init_state"))
    bench = Bench(testing.mock_model(7), {}, prompts, SamplerConfig(), 4)
    bench.warm_up(cell := Cell("plain", 0, 0.0))
    with counted() as names:
        assert [bench.run(cell, i).rows[0].tokens for i in bench.batches] == alone
    assert names == []


def test_prompts_that_cannot_be_padded_share_programs_whatever_their_lengths():
    target = testing.mock_model(7)
    logits_of = functools.partial(toy_logits, target.params)
    decoder = SpeculativeDecoder(unpadded(target))
    decoder.warmup(9, 4)
    prompts = [[i * n % 7 for i in range(n)] for n in range(1, 17)]
    expected = [plain_tokens(logits_of, ids, 4) for ids in prompts]
    with counted() as names:
        assert [list(decoder.generate(ids, 4).tokens) for ids in prompts] == expected
    assert names == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunk", [20, 600])
def test_long_prompts_that_cannot_be_padded_are_fed_in_few_passes(chunk):
    """By a call, with samples and between the rounds of a queue."""
    target = testing.mock_model(7)
    decoder = SpeculativeDecoder(unpadded(target), prefill_chunk=chunk)
    prompts = [[i * n % 7 for i in range(n)] for n in (1, 19, 20, 41, 150, 600, 700)]
    logits_of = functools.partial(toy_logits, target.params)
    expected = [tuple(plain_tokens(logits_of, ids, 30)) for ids in prompts]
    assert [decoder.generate(ids, 30).tokens for ids in prompts] == expected
    rows = decoder.generate([prompts[3]] * 2, 30, num_samples=2)
    assert {row.tokens for row in rows} == {expected[3]}
    rows = dict(DecodeQueue(decoder, prompts, batch=3, max_new_tokens=30))
    assert [rows[i].tokens for i in range(len(prompts))] == expected
    passes = [n for _, n in passes_of(1407, 2048, decoder.system())]
    assert sum(passes) == 1407 and set(passes) <= {chunk, 512, 64, 8, 1} and len(passes) < 90
