"""The models that ship: their sizes, layers and vocabulary, and that the card tells the truth."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.smollm2 import HAS_SMOLLM2

from configs import train_zoo_draft, train_zoo_target
from experiments import train_lm
from spec_jax import zoo
from spec_jax.config import SpeculativeConfig
from spec_jax.data import python_source, questions, tokens
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.evaluation.prompts import PromptEncoder
from spec_jax.loading import load_draft, load_model
from spec_jax.models import transformer
from spec_jax.train import losses

ROOT = pathlib.Path(__file__).resolve().parents[1]
CARD = zoo.path("zoo/target").parent / "MODEL_CARD.md"
PAIR, HEADS, BLOCKS, OF_SMOLLM2 = zoo.NAMES[:2], zoo.NAMES[2:5], zoo.NAMES[5:7], zoo.NAMES[7:]


@pytest.fixture(scope="module")
def models():
    return {name: load_model(name) for name in PAIR}


SHIPPED = [
    (PAIR, {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}, 12_000_000),
    (HEADS, set(), 6_000_000),
    (BLOCKS, set(), 7_000_000),
    (OF_SMOLLM2, set(), 20_000_000),
]
IDS = ["pair", "heads", "blocks", "smollm2"]


@pytest.mark.parametrize(("names", "files", "most_bytes"), SHIPPED, ids=IDS)
def test_what_ships_is_small(names, files, most_bytes):
    found = [file for name in names for file in zoo.path(name).iterdir()]
    assert {file.name for file in found} == {"config.json", "model.safetensors"} | files
    assert sum(file.stat().st_size for file in found) <= most_bytes
    assert zoo.path("zoo/other") is None


def test_weights_are_stored_in_bfloat16_and_shapes_are_the_configs():
    for name, module in (("zoo/target", train_zoo_target), ("zoo/draft", train_zoo_draft)):
        stored = json.loads((zoo.path(name) / "config.json").read_text())
        assert stored["dtype"] == "bfloat16"
        config = module.get_config()
        assert {key: stored[key] for key in config.model} == dict(config.model)
        train_lm.validate(config)


def test_the_draft_is_small_and_shares_the_targets_vocabulary(models):
    target, draft = models.values()
    assert draft.num_params < 0.1 * target.num_params
    assert target.tokenizer.has_same_vocab(draft.tokenizer)
    assert target.tokenizer.vocab_size == target.config.vocab_size == 2048
    assert target.stop_tokens == draft.stop_tokens == (0,)
    assert target.tokenizer.token_id(tokens.END_OF_TEXT) == 0


@pytest.mark.exhaustive
def test_held_out_text_is_predicted_and_the_draft_agrees(models):
    """Coarse bounds: the modules differ a little between versions of Python."""
    target, draft = models.values()
    text, _ = tokens.pack(target.tokenizer, python_source.documents("held_out"))
    windows = jnp.asarray([text[i : i + 257] for i in range(0, len(text) - 257, 25 * 256)])
    run = jax.jit(transformer.logits, static_argnames="config")
    p, q = (run(m.params, windows[:, :-1], config=m.config) for m in (target, draft))
    loss_p, loss_q = (float(losses.cross_entropy(x, windows[:, 1:]).mean()) for x in (p, q))
    assert loss_p < loss_q < np.log(2048) - 3
    assert float(losses.expected_acceptance(p, q).mean()) > 0.45
    assert float(losses.expected_acceptance(p, q, temperature=0.0).mean()) > 0.35


def test_the_card_names_what_was_held_out_and_how_to_reproduce_it():
    card = CARD.read_text(encoding="utf-8")
    for module in python_source.HELD_OUT:
        assert f"`{module}`" in card
    for word in ("Licence", "bits a byte", "looping", "CPU-minutes", "experiments.train_lm"):
        assert word in card
    target = load_model("zoo/target")
    for name in (*PAIR, *HEADS, *BLOCKS):
        assert f"{load_draft(name, target).num_params:,}" in card


@pytest.fixture(scope="module")
def greedy(models):
    """Held-out functions as ids, and what the target goes on with by itself."""
    target = models["zoo/target"]
    prompts = [target.tokenizer.encode(p.text) for p in python_source.held_out_prompts(8, seed=1)]
    rows = SpeculativeDecoder(target).generate(prompts, 32, stop_tokens=())
    return prompts, [row.tokens for row in rows]


def check_drafts(target, name, num_draft, num_tokens, prompts, expected, **options) -> float:
    """Asserts that decoding with a head that the card describes is the target's; returns tau."""
    head = load_draft(name, target)
    assert head.notes is not None and f"{head.num_params:,}" in CARD.read_text(encoding="utf-8")
    decoder = SpeculativeDecoder(target, head, SpeculativeConfig(head.method, num_draft))
    rows = decoder.generate(prompts, num_tokens, **options)
    assert [row.tokens for row in rows] == expected
    return decoder.stats.tau


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*HEADS, *BLOCKS])
def test_heads_draft_what_the_target_says(models, greedy, name):
    """Coarse bounds, from real decoding of held-out functions; greedy tokens are the target's."""
    tau = check_drafts(models["zoo/target"], name, 5, 32, *greedy, stop_tokens=())
    assert tau > (1.8 if name == "zoo/dflash" else 2.2 if name in BLOCKS else 2.5)


@pytest.mark.exhaustive
@HAS_SMOLLM2
def test_the_head_of_smollm2_drafts_what_its_target_says():
    """A coarse bound, on the first of each kind of the questions that ship."""
    target = load_model(zoo.SMOLLM2)
    chosen, _, _ = questions.load(ROOT / "configs" / "smollm2_questions.jsonl", 0)
    prompts = [PromptEncoder(target)(question) for question in chosen[::6]]
    expected = [row.tokens for row in SpeculativeDecoder(target).generate(prompts, 48)]
    assert check_drafts(target, *OF_SMOLLM2, 3, 48, prompts, expected) > 1.3
