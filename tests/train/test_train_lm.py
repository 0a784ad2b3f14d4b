"""The training experiment: learns, resumes bit for bit, distils, refuses bad configs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.runs import check_run_files, stopped_at
from support.tiny_models import QWEN35

from configs import train_zoo_draft, train_zoo_target
from experiments import train_lm
from experiments.training import text as texts
from experiments.training.lm import LmExperiment
from spec_jax.data import python_source
from spec_jax.errors import ConfigError
from spec_jax.models import checkpoint, transformer
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.train import losses, optimizer


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch):
    """A few documents, so that a run takes seconds."""
    text = {"held_out": python_source.documents("held_out")}
    few = {"held_out": text["held_out"][:2], "train": text["held_out"][2:6]}
    monkeypatch.setattr(python_source, "documents", lambda split, **options: few[split])


def tiny(module=train_zoo_target, **changes):
    config = module.get_config()
    settings = dict(
        log_every=1, eval_every=4, checkpoint_every_s=10_000, eval_prompts=2, eval_new_tokens=8
    )
    options = dict(long_length=64, long_share=0.25, eval_length=64, eval_windows=4, **settings)
    config.update(vocab_size=300, steps=12, batch=4, length=32, long_batch=2, **options)
    config.model.update(hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    config.model.update(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    config.model.update(max_position_embeddings=64)
    config.optimizer.update(name="adamw", lr=1e-2, warmup=2)  # compiles faster than Muon
    with config.unlocked():
        config.update(changes)
    return config


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_loss_falls_and_the_export_is_the_trained_model(tmp_path, capsys):
    final = train_lm.train(tiny(), tmp_path)
    *_, last_line = capsys.readouterr().out.splitlines()
    summary = f"{final['bits_per_byte']:.3f} bits per byte at step 12; exported to "
    assert last_line == f"{summary}{tmp_path / 'export'}"
    assert check_run_files(tmp_path, "train_lm")["final"] == final
    lines = metrics(tmp_path)
    first, last = (next(x["loss"] for x in ls if "loss" in x) for ls in (lines, lines[::-1]))
    assert last < first - 0.3
    assert final["loss"] == lines[-1]["final_loss"] < 5.7  # log(300) = 5.70
    assert 0 < final["bits_per_byte"] < 8
    assert [x["step"] for x in lines if "held_out_loss" in x] == [4, 8, 12]
    params, config = checkpoint.load_pretrained(tmp_path / "export")
    assert (config.vocab_size, config.eos_token_id, config.bos_token_id) == (300, (0,), 0)
    tokenizer = Tokenizer.from_directory(tmp_path / "export")
    ids = jnp.asarray([tokenizer.encode("def __init__(self):\n        return 1234\n")])
    got = losses.cross_entropy(transformer.logits(params, ids[:, :-1], config=config), ids[:, 1:])
    assert np.isfinite(got).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", optimizer.OPTIMIZERS)
def test_resuming_is_bit_exact(tmp_path, name):
    """Even with other ``steps``, until the rates depend on them."""
    config = tiny(steps=6, checkpoint_every_s=0, eval_every=100)
    config.optimizer.update(name=name, decay_share=0.4)
    train_lm.train(config, tmp_path / "whole")
    longer = config.copy_and_resolve_references()
    longer.steps = 9
    with stopped_at(LmExperiment, 3):
        train_lm.train(longer, tmp_path / "halves")
    train_lm.train(config, tmp_path / "halves")
    with pytest.raises(ConfigError, match="only up to step 4"):
        train_lm.train(longer, tmp_path / "halves")
    whole, halves = (
        checkpoint.load_pretrained(tmp_path / name / "export")[0] for name in ("whole", "halves")
    )
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), whole, halves))
    drop = lambda line: {k: v for k, v in line.items() if k not in ("cpu_s", "tok_s", "eta_min")}
    lines = [[drop(x) for x in metrics(tmp_path / name)] for name in ("whole", "halves")]
    assert lines[0] == lines[1]
    cpu_s = [line["cpu_s"] for line in metrics(tmp_path / "halves")]
    assert cpu_s == sorted(cpu_s)


@pytest.mark.exhaustive
def test_a_draft_approaches_its_teacher_on_a_mesh_as_on_one_device(tmp_path):
    train_lm.train(tiny(steps=8), tmp_path / "teacher")
    changes = dict(teacher=str(tmp_path / "teacher" / "export"), steps=8)
    finals, lines = {}, {}
    for name, mesh in (("one", ""), ("mesh", "data:2,tensor:2")):
        config = tiny(train_zoo_draft, **changes, mesh=mesh, is_fully_sharded=bool(mesh))
        config.update(own_batches=2, own_batch=4, own_prompt=8)
        finals[name] = train_lm.train(config, tmp_path / name)
        lines[name] = metrics(tmp_path / name)
    assert len(lines["one"]) == len(lines["mesh"])
    for a, b in zip(lines["mesh"], lines["one"]):
        for figure in {"loss", "kl", "held_out_loss", "final_loss", "tau"} & b.keys():
            assert a[figure] == pytest.approx(b[figure], abs=1e-5)
    written = [np.load(*(tmp_path / name).glob("continuations.*.npy")) for name in lines]
    np.testing.assert_array_equal(*written)
    first, final = lines["one"][0], finals["one"]
    assert final["kl"] < first["kl"] and final["acceptance"] > first["acceptance"]
    assert 0 <= final["top1_agreement"] <= 1 and final["loss"] == pytest.approx(final["kl"])
    assert [line["tau"] >= 1 for line in lines["one"] if "tau" in line] == [True] * 2
    same = [(tmp_path / n / "export" / "tokenizer.json").read_text() for n in ("teacher", "one")]
    assert same[0] == same[1]


def test_a_text_of_ones_own_gives_the_same_windows_after_a_restart(tmp_path):
    text = "".join(text for _, text in python_source.documents("train"))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    config = tiny(own_share=0.0)
    config.data.text = str(tmp_path / "a.txt")
    first, again = (LmExperiment(config, tmp_path / "run") for _ in range(2))
    assert texts.fingerprint(first.trained) == texts.fingerprint(again.trained)
    found = [[x.batch_at(step) for step in range(12)] for x in (first, again)]
    jax.tree.map(np.testing.assert_array_equal, *found)
    shapes = [x.shape for x in found[0]]
    assert shapes == [(4, 33)] * 9 + [(2, 65)] * 3  # the last quarter is longer
    rows = {row.tobytes() for batch in found[0][:9] for row in batch}
    assert len(rows) == 36  # every window is another one
    train, held_out = (texts.usage(*pair) for pair in first.windows)
    assert 0 <= train["tokens_read"] - train["tokens_used"] < train["window_tokens"] == 33
    assert held_out["windows"] > 0 and "the last" in held_out["notes"][0]


CHANGES = [
    ("steps", 0, "steps is 0"),
    ("length", 65, "max_position_embeddings 64"),
    ("data.tests_share", 1.5, "data.tests_share is 1.5"),
    ("stepz", 3, "no key .stepz."),
    ("mesh", "data:8", "batch is 4, which the mesh axis data:8 does not divide"),
    ("is_fully_sharded", True, "is_fully_sharded is True, but there is no mesh"),
    ("optimizer.name", "sgd", "'sgd'; expected one of muon, adamw"),
]


@pytest.mark.parametrize(("key", "value", "message"), CHANGES)
def test_bad_values_are_clear_errors(tmp_path, key, value, message):
    config = tiny()
    with config.unlocked():
        config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=message):
        train_lm.train(config, tmp_path)


def test_schedule_rises_stays_and_falls_to_zero():
    schedule = optimizer.warmup_stable_decay(2.0, steps=100, warmup=10, decay_share=0.4)
    values = [float(schedule(s)) for s in (0, 5, 10, 60, 80, 100)]
    np.testing.assert_allclose(values, [0, 1, 2, 2, 1, 0], atol=1e-6)
    longer = optimizer.warmup_stable_decay(2.0, steps=200, warmup=10, decay_share=0.4)
    assert all(float(schedule(s)) == float(longer(s)) for s in range(61))


@pytest.mark.exhaustive
def test_a_config_json_of_another_family_is_trained(tmp_path):
    """Its vocabulary and stop tokens are those of the tokenizer that is trained."""
    hf = {**QWEN35.to_hf(), "max_position_embeddings": 64, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = tiny(model_json=str(tmp_path / "config.json"))
    train_lm.train(config, tmp_path / "run")
    losses = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert losses[-1] < losses[0] - 0.3
    _, trained = checkpoint.load_pretrained(tmp_path / "run" / "export")
    changes = dict(vocab_size=300, bos_token_id=0, eos_token_id=(0,), tie_word_embeddings=True)
    assert trained == dataclasses.replace(QWEN35, max_position_embeddings=64, **changes)
    (tmp_path / "config.json").write_text(json.dumps(hf | {"model_type": "qwen4_exp"}))
    with pytest.raises(ConfigError, match="'qwen4_exp' is not supported"):
        train_lm.train(config, tmp_path / "other")
