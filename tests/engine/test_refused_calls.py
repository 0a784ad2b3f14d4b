"""What the engine refuses before anything is compiled: a call, its error, the words that matter."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from support.chat_templates import CHATML, THINKING, decoder_of
from support.eagle_heads import CONFIGS, TARGET, head_of
from support.tiny_models import loaded
from support.tiny_tokenizers import letters

from spec_jax import (
    AsyncSpecConfig,
    DecodeQueue,
    SamplerConfig,
    SpeculativeConfig,
    SpeculativeDecoder,
)
from spec_jax.drafters.mtp.model import MtpConfig, init_mtp
from spec_jax.errors import ConfigError, PromptError, WeightsError
from spec_jax.loading import LoadedHead, load_draft, load_model
from spec_jax.models import transformer
from spec_jax.rules import make_rule
from spec_jax.testing import mock_model

MOCK = mock_model(8)
LETTERS = dataclasses.replace(MOCK, tokenizer=letters(8))
SHORT = dataclasses.replace(mock_model(7), tokenizer=letters(8))  # never resized for the last
OTHERS = dataclasses.replace(LETTERS, tokenizer=letters(7))
TINY = loaded(TARGET)
FEW = dataclasses.replace(TINY, model=transformer.model(TARGET, num_tokens=30))
WIDE = dataclasses.replace(TARGET, hidden_size=32, head_dim=8)
WIDE = loaded(WIDE, "wide")
HEAD = LoadedHead("head", CONFIGS["eagle-3"], head_of(CONFIGS["eagle-3"]))
GREEDY = make_rule(SpeculativeConfig(rejection_sampling_strategy="greedy"))
WARM = SamplerConfig(temperature=1.0)
ASYNC = AsyncSpecConfig()
HELLO = [{"role": "user", "content": "What is two and two?"}]
ANSWERED = [*HELLO, {"role": "assistant", "content": "four"}]
QUICK = {"enable_thinking": False}


def config(method="standalone", rule=None, **options):
    return SpeculativeConfig(method, rejection_sampling_strategy=rule, **options)


def call(prompts=(1,), new=5, target=LETTERS, **options):
    prompts = list(prompts) if isinstance(prompts, tuple) else prompts
    return SpeculativeDecoder(target).generate(prompts, new, **options)


def chat(template=CHATML, **arguments):
    return decoder_of(template).generate(**arguments)


def thinking(variables):
    return decoder_of(THINKING).encode(HELLO, variables)


def queue(prompts=(), target=MOCK, **options):
    return DecodeQueue(SpeculativeDecoder(target), prompts, **{"batch": 2, **options})


def limited(**options):
    return queue(target=TINY, **{"max_prompt_tokens": 200, "max_new_tokens": 9, **options})


def decoder(draft=None, of=None, target=TINY, **options):
    return SpeculativeDecoder(target, draft, of, **options)


def one_a_pass(*args, **options):
    return SpeculativeDecoder.new_n1(MOCK, *args, **options)


def modules(num_modules):
    changes = {"protocol": "sequential", "num_modules": num_modules}
    config = MtpConfig.of_target(TARGET, **changes)
    return LoadedHead("modules", config, init_mtp(config, jax.random.key(0)))


def with_params(**changes):
    return SpeculativeDecoder(TINY).with_params(target={**TINY.params, **changes})


def head_with(**changes):
    params = {n: w for n, w in {**HEAD.params, **changes}.items() if w is not None}
    return decoder(dataclasses.replace(HEAD, params=params))


def adaptive(**options):
    return config(is_adaptive=True, **options)


PROMPTS = [
    (lambda: call([]), r"prompts is \[\], a batch without rows; expected at least one prompt"),
    (lambda: call([[1, 2], []]), "empty"),
    (lambda: call([1, 8]), "id 8"),
    (lambda: call([-1]), "id -1"),
    (lambda: call([30], target=FEW), "ids 0 to 29"),
    (lambda: call([0.5, 1.5]), "integer ids"),
    (lambda: call([1] * 250, 10, TINY), "maximum length of the target is 256"),
    (lambda: call("a\ud800b"), "character 2 of the prompt is half of a surrogate pair"),
    (lambda: call("hello", target=MOCK), "no tokenizer"),
    (lambda: queue("a text"), r"prompts is one prompt, 'a text'; .* list of them, \[prompt\]"),
    (lambda: queue([{"role": "user", "content": "Hi"}]), "prompts is one prompt"),
    (lambda: queue([[1], []]), "prompt 1: the prompt is empty"),
    (lambda: queue(None), "prompts is None; expected a list or an iterator of prompts"),
    (lambda: queue([(1, [0, 1]), [1, 2]]), r"item 1 .*, \[1, 2\], lacks an index, unlike"),
    (lambda: queue([[1, 2, 3], (0, [0, 1])]), r"item 1 .*, \(0, \[0, 1\]\), has an index"),
    (lambda: queue([[7, [0, 1]]]), r"integer ids; an index .* are a tuple: \(7, prompt\)"),
    (lambda: limited(max_new_tokens=60), "a prompt of 200 tokens and 60 new ones are 260"),
    (lambda: chat(prompts="Hi", messages=HELLO), "prompts and messages are both given"),
    (lambda: chat(), "both missing; expected one of them"),
    (lambda: chat(messages="Hi"), "messages is 'Hi'; expected a list of objects"),
    (lambda: chat(messages=[HELLO, "Hi"]), "expected a list of objects"),
    (lambda: chat(messages=[]), r"messages is \[\], a batch without rows; expected at least"),
    (lambda: chat(messages=ANSWERED), "last message is the assistant's"),
    (lambda: list(queue([ANSWERED], decoder_of().target)), "prompt 0: the last message is the ass"),
    (lambda: decoder(target=MOCK).generate(messages=HELLO), "no tokenizer: give the prompt as ids"),
]
WEIGHTS = [
    (lambda: load_model("no/such/model"), "zoo/target"),
    (lambda: load_model(""), "name of a model or head is ''; expected a zoo name, a directory"),
    (lambda: head_with(fc=HEAD.params["fc"][:16]), r"fc has shape \[16, 16\]; .*\[48, 16\]"),
    (lambda: head_with(d2t=None), "head head: d2t is missing"),
]
CONFIGS_REFUSED = [
    (lambda: call(new=0), "max_new_tokens is 0; expected"),
    (lambda: call(new=None, max_length=0), "max_length is 0"),
    (lambda: call(stop=""), "stop string is empty"),
    (lambda: call(stop="x", target=MOCK), "no tokenizer"),
    (lambda: call(stop=["x", 3]), r"stop is \['x', 3\]; expected a text or a list of texts"),
    (lambda: decoder(target=MOCK).stream([1]), "no tokenizer"),
    (lambda: decoder().warmup(0, 8), "a prompt's length is 0; expected"),
    (lambda: decoder().warmup(4, 8, num_samples=0), "num_samples is 0; expected"),
    (lambda: call(stop_tokens=2), "stop_tokens is 2; expected a list"),
    (lambda: call(stop_tokens=[2.7]), "a stop token is 2.7"),
    (lambda: call(seeds=[1, 2]), "seeds is .*; expected 1 integers"),
    (lambda: call(seeds=[1.5]), "seeds is"),
    (lambda: call(num_samples=0), "num_samples"),
    (lambda: call(rounds_per_sync=0), "rounds_per_sync is 0"),
    (lambda: queue(iter([[1]])), "list_iterator and max_prompt_tokens is None: name the length"),
    (lambda: limited(batch=0), "batch is 0; expected an integer of 1 or more"),
    (lambda: limited(sampler=[]), "the list of sampler configs is empty"),
    (lambda: limited(draft_sampler=[WARM, None]), "^draft_sampler is .*expected a SamplerConfig"),
    (lambda: call(sampler={"temperature": 1}), "^sampler is .*expected a SamplerConfig"),
    (lambda: decoder(target_sampler="greedy"), "^target_sampler is .*expected a SamplerConfig"),
    (lambda: chat(messages=[{"content": "Hi"}]), "a message has the role None"),
    (lambda: chat(messages=HELLO, sampler="model"), "mock-0 has no generation_config.json"),
    (lambda: chat(messages=HELLO, sampler="file"), "sampler is 'file'; expected a SamplerConfig"),
    (lambda: chat(None, messages=HELLO), "has no chat template, which messages need; pass plain"),
    (lambda: chat("{{ raise_exception('take turns') }}", messages=HELLO), "take turns"),
    (lambda: chat(prompts="Hi", chat_template_kwargs=QUICK), "is no conversation; give messages"),
    (lambda: MOCK.with_chat_template_kwargs(QUICK), "mock-0 has no tokenizer, so it has no chat"),
    (lambda: thinking({"enable_thinkng": 0}), r"'enable_thinkng' \(did you mean enable_thinking"),
    (lambda: thinking({"messages": HELLO}), "'messages'.*; it reads enable_thinking, tools"),
    (lambda: thinking({"tools": ["add"]}), r"tools of .* are \['add'\]; expected objects"),
    (lambda: thinking({"documents": [{"text": "x"}]}), "does not read the variable 'documents'"),
    (lambda: thinking({"enable_thinking": {3}}), "a variable holds what JSON cannot"),
    (lambda: thinking(["x"]), r"chat_template_kwargs is \['x'\]; expected an object"),
    # parts
    (lambda: load_model("zoo/draft", "int8"), "int8"),
    (lambda: decoder(config("ngram")), "draft is a SpeculativeConfig"),
    (lambda: decoder(None, {"num_speculative_tokens": 2}), "config is .*SpeculativeConfig"),
    (lambda: decoder(target_sampler=WARM, rule=GREEDY), "temperature 0"),
    (lambda: decoder(None, config("ngram", "greedy"), target_sampler=WARM), "argmax"),
    (lambda: decoder(None, config("ngram", "logit-comparison")), "logit-comparison"),
    (lambda: decoder(None, config()), "needs a draft"),
    (lambda: decoder(None, config("eagle")), "'eagle' needs a head; load_draft gives one"),
    (lambda: decoder(modules(2), config("eagle")), "is 'eagle'; the draft modules is for 'mtp'"),
    (lambda: decoder(HEAD, config()), "is 'standalone'; the draft head is for 'eagle'"),
    (
        lambda: decoder(modules(2), config("mtp", num_speculative_tokens=3)),
        "num_draft is 3, but sequential drafting .* there are 2",
    ),
    (lambda: decoder(modules(6), config("mtp", tree=(2, 2))), "sequential modules draft chains"),
    (
        lambda: decoder(TINY, config("standalone", "block", tree=(2,))),
        "rule 'block' accepts chains only; trees need 'residual', 'traversal' or 'match'",
    ),
    (lambda: decoder(TINY, config("ngram")), "'ngram' copies tokens; leave the draft tiny out"),
    (lambda: decoder("suffix"), r"'suffix' copies .*write .*SpeculativeConfig\('suffix'\)\)"),
    (lambda: load_draft("ngram", TINY), r"'ngram' copies .*write .*SpeculativeConfig\('ngram'\)\)"),
    (
        lambda: decoder(FEW, config(tree=(31,)), FEW),
        "31 children .*; the draft's vocabulary has 30",
    ),
    (lambda: decoder(HEAD, target=WIDE), "for a target of width 16 and 31 ids; wide is of width"),
    (lambda: decoder(mock_model(5), target=MOCK), "mock-0 has 8 tokens, draft mock-0 has 5"),
    (
        lambda: decoder(OTHERS, target=LETTERS),
        "have 1 different tokens, such as 'H' of id 7 in the one and none in the other",
    ),
    (lambda: decoder(SHORT, target=LETTERS), "mock-0 has 8 tokens, draft mock-0 has 7"),
    (lambda: with_params(more=TINY.params["embed"]), r"params have other names: \['more'\]"),
    (lambda: with_params(embed=TINY.params["embed"][:-1]), r"are float32\[30, 16\]; expected"),
    (
        lambda: with_params(embed=TINY.params["embed"].astype("bfloat16")),
        "are bfloat16.*; expected fl",
    ),
    (lambda: decoder().with_params(draft={}), "params of a draft are given; this decoder has none"),
    (lambda: one_a_pass(mock_model(13)), "vocabularies differ"),
    (lambda: decoder(TINY, ASYNC, draft_sampler=WARM), "stand in the AsyncSpec"),
    (lambda: decoder(ASYNC), "draft is a AsyncSpecConfig; name it"),
    (lambda: decoder(prefill_chunk=0), "prefill_chunk is 0"),
    (lambda: decoder(prefill_chunk=257), "prefill_chunk is 257.*holds 256"),
    # configs
    (lambda: config(tree=(2, 1), num_speculative_tokens=5), "is 5; the tree has 4 nodes"),
    (lambda: config(tree=(2, 1), tree_depth=2), "name one of them"),
    (lambda: config(tree=(2, (1,))), "children by depth, or nodes by their ranks"),
    (lambda: config(tree=()), "children by depth"),
    (lambda: config(tree=[[0], ["a"]]), "children by depth, or nodes by their ranks"),
    (lambda: config(tree_depth=0), "tree.depth is 0"),
    (lambda: config("ngram", tree=(2,)), "'ngram' drafts chains"),
    (lambda: config(num_speculative_tokens="5", tree_depth=2), "num_speculative_tokens is '5'"),
    (lambda: config(num_speculative_tokens=99, tree_depth=2, tree_top_k=2), "have 2 to 6"),
    (lambda: adaptive(adaptive_buckets=(2, 1)), "ascending integers"),
    (
        lambda: adaptive(adaptive_buckets=(0, 4), num_speculative_tokens=3),
        "num_speculative_tokens is 3; adaptive.buckets end with 4",
    ),
    (lambda: adaptive(tree=(2, 1)), "adaptive K drafts chains"),
    (lambda: config(is_adaptive="yes"), "adaptive is 'yes'; expected a bool"),
    (lambda: config(confidence_threshold=1.5), "confidence_threshold is 1.5"),
    (lambda: config(confidence_threshold=0.4, tree=(2, 1)), "drafts a tree"),
    (lambda: config("suffix", confidence_threshold=0.4), "copies tokens"),
]
REFUSED = [
    (error, *row)
    for error, rows in (
        (PromptError, PROMPTS),
        (WeightsError, WEIGHTS),
        (ConfigError, CONFIGS_REFUSED),
    )
    for row in rows
]


@pytest.mark.parametrize(("error", "run", "words"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_it_is_refused(error, run, words):
    with pytest.raises(error, match=words):
        run()
