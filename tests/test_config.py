"""Sampler and speculative configuration: what is taken, what is refused and how."""

import dataclasses
import json
import re

import numpy as np
import pytest

from spec_jax.config import (
    METHODS,
    AdaptiveConfig,
    NgramConfig,
    SamplerConfig,
    SpeculativeConfig,
    SuffixConfig,
    SyntheticConfig,
    TreeConfig,
    TypicalConfig,
    build,
    check_integer,
)
from spec_jax.errors import ConfigError

NAN, INF = float("nan"), float("inf")
INVALID_FIELDS = dict(temperature=[-0.1, NAN, INF, 2e20, "0.5", None, True])
INVALID_FIELDS |= dict(top_k=[-1, 1.5, True])
INVALID_FIELDS |= dict(top_p=[0.0, 1.01], min_p=[-0.1, 1.1])
INVALID_FIELDS |= dict(repetition_penalty=[0.0, 1e-39, 9e-11, 1.1e10])
INVALID_FIELDS |= dict(presence_penalty=[INF, 2e20], frequency_penalty=[NAN, -2e20])
INVALID_FIELDS |= dict(seed=[-1, 2**32, 1.0])
INVALID_FIELDS |= dict(
    logit_bias=[((-1, 1.0),), ((0, INF),), ((0, NAN),), ((3, 3e38),), (("a", 1.0),)]
)


@pytest.mark.parametrize("name", INVALID_FIELDS)
def test_a_wrong_sampler_value_is_an_error_that_names_it(name):
    for wrong in INVALID_FIELDS[name]:
        with pytest.raises(ConfigError, match=name) as error:
            SamplerConfig(**{name: wrong})
        assert isinstance(error.value, ValueError)


def test_the_edges_of_every_sampler_range_are_allowed():
    SamplerConfig(temperature=0, top_k=0, top_p=1, min_p=0, seed=0)
    SamplerConfig(temperature=1e-6, top_k=10**6, top_p=1e-6, min_p=1.0, seed=2**32 - 1)
    SamplerConfig(repetition_penalty=0.5, presence_penalty=-2.0, frequency_penalty=-2.0)
    SamplerConfig(repetition_penalty=1e10, presence_penalty=1e20, frequency_penalty=-1e20)
    bias = SamplerConfig(temperature=1e20, logit_bias={0: 1e20, 1: -1e20, 2: -2e20}).logit_bias
    assert bias == ((0, 1e20), (1, -1e20), (2, -INF))


def test_logit_bias_may_be_a_mapping_or_pairs_and_is_hashable():
    bias = {7: 1, 2: float("-inf")}
    config = SamplerConfig(logit_bias=bias)
    assert config.logit_bias == ((2, float("-inf")), (7, 1.0))
    assert config == SamplerConfig(logit_bias=[(7, 1.0), (2, float("-inf"))])
    assert hash(config) == hash(dataclasses.replace(config))


def test_configs_are_frozen():
    configs = (SamplerConfig(), "seed"), (SpeculativeConfig(), "ngram"), (NgramConfig(), "max")
    for config, name in configs:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 3)


def test_conditional_rates_may_rise_and_exceed_k():
    config = SpeculativeConfig(synthetic_conditional_rates=[0.2, 0.9, 0.4])
    assert config.synthetic.conditional_rates == (0.2, 0.9, 0.4)
    assert config.is_synthetic and not SpeculativeConfig().is_synthetic


def test_predicates_follow_the_method_and_the_strategy():
    for method in METHODS:
        config = SpeculativeConfig(speculative_method=method)
        assert [name for name in METHODS if getattr(config, f"is_{name}")()] == [method]
    ask = {
        "greedy": SpeculativeConfig.uses_greedy_rejection,
        "typical-acceptance": SpeculativeConfig.uses_typical_acceptance,
        "logit-comparison": SpeculativeConfig.uses_logit_comparison,
    }
    for strategy in (None, *ask):
        config = SpeculativeConfig(rejection_sampling_strategy=strategy)
        assert {name for name, holds in ask.items() if holds(config)} == {strategy} & {*ask}


VALUES = [
    ({}, 0.0, True, "greedy"),
    ({}, 0.8, True, "residual"),
    ({}, 0.8, False, "match"),
    ({"synthetic_mean_length": 2.0}, 0.8, False, "synthetic"),
    ({"rejection_sampling_strategy": "block"}, 0.0, True, "block"),
    ({"rejection_sampling_strategy": "logit-comparison"}, 0.8, True, "logit-comparison"),
]


@pytest.mark.parametrize(("values", "temperature", "is_sampled", "expected"), VALUES)
def test_resolve_fills_the_strategy_and_nothing_else(values, temperature, is_sampled, expected):
    config = SpeculativeConfig(num_speculative_tokens=4, **values)
    resolved = config.resolve(temperature, is_sampled=is_sampled)
    assert resolved.rejection_sampling_strategy == expected
    assert resolved == dataclasses.replace(config, rejection_sampling_strategy=expected)
    assert resolved.resolve(temperature, is_sampled=is_sampled) == resolved


def test_harmless_spellings_of_a_number_are_taken():
    values = dict(num_speculative_tokens="3", typical_epsilon="1e-2", typical_delta=1)
    values |= dict(ngram_max=4.0, synthetic_acceptance_rates=[0.5, 0.5, 0.25])
    config = SpeculativeConfig.from_dict(values)
    options = dict(typical_delta=1.0, ngram_max=4, synthetic_acceptance_rates=(0.5, 0.5, 0.25))
    assert config == SpeculativeConfig(num_speculative_tokens=3, typical_epsilon=0.01, **options)
    assert type(config.num_speculative_tokens) is type(config.ngram.max) is int
    assert type(config.typical.delta) is float
    sampler = build(SamplerConfig, {"temperature": "0.5", "top_k": 7.0, "logit_bias": [[3, -1]]})
    assert sampler == SamplerConfig(temperature=0.5, top_k=7, logit_bias=((3, -1.0),))


SECTION = dict(speculative_method="ngram", num_speculative_tokens=5, ngram_max=4)
SECTION |= dict(rejection_sampling_strategy="match")
AS_TOML = "[{}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in SECTION.items())
AS_YAML = "{}:\n" + "".join(f"  {k}: {v}\n" for k, v in SECTION.items())


@pytest.mark.parametrize(
    ("suffix", "text"), [(".toml", AS_TOML), (".yaml", AS_YAML), (".yml", AS_YAML), (".json", None)]
)
def test_a_section_of_a_file_is_read_in_every_format(tmp_path, suffix, text):
    file = tmp_path / f"config{suffix}"
    for name in ("speculative", "other"):
        file.write_text(json.dumps({name: SECTION}) if text is None else text.format(name))
        config = SpeculativeConfig(config_file=file, section_name=name)
        assert config == SpeculativeConfig(**SECTION, config_file=str(file), section_name=name)
        record = dict(config_file=None, section_name=None)
        assert dataclasses.replace(config, **record) == SpeculativeConfig(**SECTION)
    with pytest.raises(ConfigError, match="no section 'speculative'; its sections: other"):
        SpeculativeConfig(config_file=file)


SPELLINGS = [
    (dict(ngram_max=4), dict(ngram=NgramConfig(max=4))),
    (dict(suffix_min_prob=0.5), dict(suffix=SuffixConfig(min_prob=0.5))),
    (dict(typical_delta=0.2), dict(typical=TypicalConfig(delta=0.2))),
    (dict(synthetic_mean_length=2), dict(synthetic=SyntheticConfig(mean_length=2))),
    (dict(synthetic_mean_length=None), {}),
    (dict(tree=[2, 1]), dict(tree=TreeConfig((2, 1)))),
    (dict(tree=[[0], [1], [0, 0]]), dict(tree=TreeConfig(ranks=((0,), (1,), (0, 0))))),
    (
        dict(num_speculative_tokens=8, tree_depth=3, tree_top_k=4),
        dict(num_speculative_tokens=8, tree=TreeConfig(depth=3, top_k=4)),
    ),
    (dict(is_adaptive=True), dict(adaptive=AdaptiveConfig())),
    (dict(adaptive=True, adaptive_buckets=[1, 3]), dict(adaptive=AdaptiveConfig((1, 3)))),
    (dict(adaptive_buckets=[1, 3]), dict(adaptive=AdaptiveConfig((1, 3)))),
    (dict(is_adaptive=False, tree_depth=None), dict(adaptive=None)),
]


@pytest.mark.parametrize(("flat", "nested"), SPELLINGS, ids=str)
def test_flat_names_mappings_and_records_say_the_same(flat, nested):
    config = SpeculativeConfig(**nested)
    assert SpeculativeConfig(**flat) == config == SpeculativeConfig.from_dict(flat)
    as_mappings = dataclasses.asdict(config)
    assert SpeculativeConfig.from_dict(json.loads(json.dumps(as_mappings))) == config
    assert SpeculativeConfig(**as_mappings) == config and hash(config) == hash(config)


RATE = dict(synthetic_acceptance_rate=0.5)
REFUSED = [
    (dict(num_speculative_tokens=0), "num_speculative_tokens is 0; expected an integer of 1"),
    (dict(num_speculative_tokens="2.5"), "num_speculative_tokens"),
    (dict(num_speculative_token=3), r"\(did you mean num_speculative_tokens\?\)"),
    (dict(num_draft=3), r"unknown key 'num_draft' .*; known keys: .*ngram \(max, min\)"),
    (dict(method="eagle3", model="x/y"), r"'method' .*, 'model' \(a draft is .*load_draft"),
    (dict(speculative_method="eagle3"), r"'eagle3' \(did you mean eagle\?\); expected one of"),
    (dict(speculative_method="draft_model"), r"\(did you mean standalone\?\)"),
    (dict(rejection_sampling_strategy="blok"), r"'blok' \(did you mean block\?\); expected"),
    (dict(rejection_sampling_strategy="synthetic"), "synthetic.mean_length, none of them are"),
    (dict(typical_epsilon=0.0), "typical.epsilon is 0.0; expected a number above 0"),
    (dict(ngram_min=4, ngram_max=3), "ngram.max"),
    (dict(ngram=3), "ngram is 3; expected a NgramConfig or a mapping of max, min"),
    (dict(ngram=None), "ngram is None; expected a NgramConfig"),
    (dict(ngram={"maxx": 3}), r"'maxx' \(did you mean max\?\) in NgramConfig; known"),
    (dict(synthetic_acceptance_rate=1.1), "synthetic.acceptance_rate"),
    (dict(synthetic_acceptance_rates=(0.5,)), "at least 2 rates"),
    (dict(synthetic_acceptance_rates=(0.5, 0.6)), "non-increasing"),
    (dict(synthetic_conditional_rates=(0.5, -0.1)), "synthetic.conditional_rates"),
    (dict(synthetic_mean_length=3.5), r"synthetic.mean_length is 3.5; .* \[1, 3\]"),
    (dict(RATE, synthetic_mean_length=2.0), "acceptance_rate and synthetic.mean_length are given"),
    (dict(RATE, rejection_sampling_strategy="match"), "synthetic.acceptance_rate is given"),
    (dict(tree={}), "tree.children, tree.ranks and tree.depth, none of them are given"),
    (dict(tree=TreeConfig((2,)), tree_top_k=3), "tree.top_k is 3 without tree.depth"),
    (dict(tree={"children": [2, 0]}), r"the tree branches \(2, 0\)"),
    (dict(tree={"ranks": [[1]]}), r"the tree lists \[1\] and not \[0\]"),
    (dict(adaptive={"buckets": [0]}), r"adaptive.buckets is \(0,\); expected ascending"),
    (dict(is_adaptive=False, adaptive_buckets=(1,)), "None where adaptive is False"),
    (dict(section_name="x"), "section_name is 'x' without a config_file"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=str)
def test_what_cannot_be_is_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_dict(values)


def test_resolve_refuses_a_strategy_that_cannot_serve():
    greedy = SpeculativeConfig(rejection_sampling_strategy="greedy")
    with pytest.raises(ConfigError, match=r"'greedy' .* temperature is 0\.7"):
        greedy.resolve(0.7, is_sampled=True)
    compare = SpeculativeConfig("ngram", rejection_sampling_strategy="logit-comparison")
    with pytest.raises(ConfigError, match="ngram"):
        compare.resolve(0.7, is_sampled=False)


def test_a_flat_name_beside_its_record_changes_one_field():
    config = SpeculativeConfig(ngram=NgramConfig(max=5, min=2), ngram_max=6)
    assert config.ngram == NgramConfig(max=6, min=2)
    assert dataclasses.replace(config, ngram_min=1).ngram == NgramConfig(max=6, min=1)
    adaptive = SpeculativeConfig(is_adaptive=True)
    assert not dataclasses.replace(adaptive, is_adaptive=False).is_adaptive


def test_an_argument_given_twice_is_an_error():
    with pytest.raises(TypeError, match="multiple values for argument 'speculative_method'"):
        SpeculativeConfig("ngram", speculative_method="eagle")
    with pytest.raises(TypeError, match="too many"):
        SpeculativeConfig(*["ngram"] * 20)


def test_arguments_win_over_the_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "speculative:\n"
        "  {speculative_method: ngram, num_speculative_tokens: '5', ngram: {max: 4.0, min: 2},\n"
        "   synthetic_acceptance_rates: [0.5, 0.4, 0.3, 0.2, 0.1]}\n"
        "other: {num_speculative_tokens: 7}\n"
    )
    read = SpeculativeConfig(config_file=file)
    assert read == SpeculativeConfig(config_file=file)
    assert (read.speculative_method, read.num_speculative_tokens) == ("ngram", 5)
    assert read.ngram == NgramConfig(4, 2) and type(read.ngram.max) is int
    assert (read.config_file, read.section_name) == (str(file), "speculative")
    given = SpeculativeConfig(
        "suffix", ngram_max=6, synthetic_mean_length=2.0, config_file=str(file)
    )
    assert given.speculative_method == "suffix" and given.num_speculative_tokens == 5
    assert given.ngram == NgramConfig(6, 2)  # field by field
    assert given.synthetic == SyntheticConfig(mean_length=2.0)  # as a whole
    assert SpeculativeConfig(config_file=file, synthetic=None).synthetic is None
    other = SpeculativeConfig(config_file=file, section_name="other")
    assert other.num_speculative_tokens == 7
    file.unlink()  # a resolved copy does not read it again
    assert read.resolve(0.0, is_sampled=False).num_speculative_tokens == 5
    with pytest.raises(ConfigError, match="cannot be read"):
        SpeculativeConfig(config_file=file)


FILES = [
    ("a.toml", "[speculative"),
    ("a.json", "{"),
    ("a.yaml", "a: [1"),
    ("a.yaml", ""),
    ("a.json", '{"speculative": 3}'),
    ("a.ini", "[speculative]"),
    ("a.toml", None),
    ("a.json", '{"speculative": {"num_drafts": 3}}'),
]


@pytest.mark.parametrize(("name", "text"), FILES)
def test_a_file_that_cannot_serve_is_an_error(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    named = r"num_drafts|a\.(toml|json|yaml|ini)"
    with pytest.raises(ConfigError, match=named):
        SpeculativeConfig(config_file=tmp_path / name)


def test_a_switch_keeps_the_record_that_is_there(tmp_path):
    given = SpeculativeConfig(adaptive={"buckets": (0, 4)}, is_adaptive=True)
    assert given.adaptive.buckets == (0, 4)
    assert dataclasses.replace(given, is_adaptive=False).adaptive is None
    file = tmp_path / "c.yaml"
    file.write_text("speculative: {is_adaptive: true, adaptive_buckets: [0, 2, 6]}")
    assert SpeculativeConfig(config_file=file, is_adaptive=True).adaptive.buckets == (0, 2, 6)
    assert SpeculativeConfig(config_file=file, is_adaptive=False).adaptive is None


def test_an_explicit_none_wins(tmp_path):
    chosen = SpeculativeConfig(is_adaptive=True, adaptive_buckets=(0, 4))
    assert dataclasses.replace(chosen, adaptive_buckets=None).adaptive.buckets is None
    file = tmp_path / "c.yaml"
    file.write_text("speculative: {num_speculative_tokens: 8, tree_depth: 3, tree_top_k: 2}")
    assert SpeculativeConfig(config_file=file).tree.top_k == 2
    config = SpeculativeConfig(config_file=file, tree_top_k=None)
    assert (config.tree.depth, config.tree.top_k) == (3, None)


def test_flat_names_are_attributes():
    config = SpeculativeConfig(synthetic_acceptance_rate=0.5, ngram_max=4)
    assert config.synthetic_acceptance_rate == 0.5 and config.ngram_max == 4
    assert SpeculativeConfig().synthetic_acceptance_rate is None
    with pytest.raises(AttributeError, match="ngram_most"):
        _ = config.ngram_most


SAMPLED = {"do_sample": True}
GENERATION = [  # the object of generation_config.json
    ({}, {}),
    ({"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]}, {}),  # without do_sample: greedy
    (SAMPLED, dict(temperature=1.0, top_k=50)),
    ({**SAMPLED, "temperature": 0.6, "top_k": 0}, dict(temperature=0.6)),
    ({**SAMPLED, "top_p": None, "typical_p": 1.0}, dict(temperature=1.0, top_k=50)),
    ({"repetition_penalty": 1.1, "num_beams": 1}, dict(repetition_penalty=1.1)),
    ({"chat_format": "chatml", "max_window_size": 9, "trust_remote_code": True}, {}),
    ({"penalty_alpha": 0, "low_memory": False, "return_legacy_cache": True}, {}),
]
UNSUPPORTED = [
    {"typical_p": 0.9},
    {"num_beams": 4},
    {"no_repeat_ngram_size": 3},
    {"suppress_tokens": [1]},
    {"penalty_alpha": 0.6},
    {**SAMPLED, "temperature": "hot"},
    {**SAMPLED, "top_p": 2.0},
]


@pytest.mark.parametrize(("stated", "expected"), GENERATION)
def test_the_sampling_of_a_generation_config_is_that_of_transformers(stated, expected):
    assert SamplerConfig.from_generation_config(stated) == SamplerConfig(**expected)


@pytest.mark.parametrize("stated", UNSUPPORTED, ids=json.dumps)
def test_what_a_generation_config_states_and_we_lack_is_refused_by_name(stated):
    name, value = [*stated.items()][-1]
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}")):
        SamplerConfig.from_generation_config(stated)


def test_stop_strings_of_a_generation_config_are_an_option_of_the_call():
    with pytest.raises(ConfigError, match=r"stop_strings is \['x'\], .*; pass stop="):
        SamplerConfig.from_generation_config({"stop_strings": ["x"]})


def test_an_array_without_dimensions_is_an_integer():
    assert check_integer("x", np.array(3), 1) == 3 == check_integer("x", np.int64(3), 1)
    with pytest.raises(ConfigError, match=r"x is array\(\[1, 2\]\); expected an integer of 1"):
        check_integer("x", np.array([1, 2]), 1)
