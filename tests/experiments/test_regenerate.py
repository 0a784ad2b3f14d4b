"""Regeneration: every prompt answered once, whatever happens in between."""

import itertools
import json
import shutil

import pytest
from support.files import tiny_config, tokenizer_of, write_lines
from support.runs import check_run_files, killed_at
from support.tiny_models import random_weights

from configs import regenerate_zoo
from experiments import regenerate as experiment
from experiments.regenerate import regenerate, said
from experiments.run.journal import Responses
from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, load_model, rng
from spec_jax.data import python_source
from spec_jax.data.first_words import load_words
from spec_jax.data.records import read_records
from spec_jax.data.splits import HeldOut
from spec_jax.data.user_turns import Opening, choose
from spec_jax.engine.queue import DecodeQueue
from spec_jax.errors import ConfigError
from spec_jax.models import checkpoint
from spec_jax.models.tokenizer import Tokenizer

NEW, COUNT = 8, 14


@pytest.fixture(scope="module")
def held_out():
    return python_source.documents("held_out")[:4]


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch, held_out):
    monkeypatch.setattr(python_source, "documents", lambda split, tests_share=1.0: held_out)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, held_out):
    """Directories of a target and a draft that share a tokenizer of 300 entries."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = tokenizer_of([text for _, text in held_out])
    config = tiny_config(max_position_embeddings=64, eos_token_id=tuple(range(5, 60)))
    for seed, name in enumerate(("target", "draft")):
        checkpoint.save_pretrained(folder / name, random_weights(config, seed), config, tokenizer)
    return folder


def small(pair, **changes):
    config = regenerate_zoo.get_config()
    config.update(target=str(pair / "target"), draft=str(pair / "draft"), num_prompts=COUNT)
    config.update(min_prompt_tokens=2, max_prompt_tokens=12, max_new_tokens=NEW, batch=3)
    config.update(log_every_s=0, temperatures=(1.0, 0.5))
    config.update(changes)
    return config


def lines(folder):
    return (folder / "responses.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def run(pair, tmp_path_factory, held_out):
    """Folder and report of one undisturbed run."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python_source, "documents", lambda split, tests_share=1.0: held_out)
        return folder, regenerate(small(pair), folder)


def test_every_prompt_is_answered_as_the_decoder_answers_it_alone(run, pair):
    folder, report = run
    rows = {row["index"]: row for row in map(json.loads, lines(folder))}
    assert sorted(rows) == list(range(COUNT)) and len(lines(folder)) == COUNT
    target, draft = load_model(pair / "target"), load_model(pair / "draft")
    decoder = SpeculativeDecoder(target, draft, SpeculativeConfig(num_speculative_tokens=2))
    for index in (0, 1, COUNT - 1):
        row = rows[index]
        temperature, seed = (1.0, 0.5)[index % 2], rng.turn_seed(index % 2, index // 2)
        assert (row["temperature"], row["seed"]) == (temperature, seed)
        assert 2 <= len(row["prompt_ids"]) <= 12
        alone = decoder.generate(
            row["prompt_ids"], NEW, sampler=SamplerConfig(temperature, seed=seed)
        )
        assert tuple(row["response_ids"]) == alone.tokens and row["text"] == alone.text
        assert row["finish_reason"] == alone.finish_reason
    assert report["responses"] == report["prompts"] == COUNT and report["left_out"] == 0
    assert set(report["finish_reasons"]) == {"length", "stop_token"}
    assert report["tokens"] == sum(len(row["response_ids"]) for row in rows.values())
    assert report["session"]["useful_share"] == 1
    assert check_run_files(folder, "regenerate")["tokens"] == report["tokens"]


@pytest.mark.exhaustive
def test_a_draft_that_is_no_model_changes_no_answer(pair, tmp_path):
    config = tiny_config(max_position_embeddings=64, num_hidden_layers=2)
    tokenizer = Tokenizer.from_directory(pair / "target")
    checkpoint.save_pretrained(tmp_path / "target", random_weights(config), config, tokenizer)
    answers = {}
    for draft in ("", "self:1"):
        folder = tmp_path / f"run{draft}"
        greedy = dict(num_prompts=4, temperatures=(0.0,), draft=draft)
        assert regenerate(small(tmp_path, **greedy), folder)["responses"] == 4
        rows = map(json.loads, lines(folder))
        answers[draft] = {row["index"]: row["response_ids"] for row in rows}
    assert answers[""] == answers["self:1"]


@pytest.mark.exhaustive
@pytest.mark.landing
def test_a_killed_run_goes_on_to_the_same_lines(run, pair, tmp_path, capsys):
    with killed_at("responses.jsonl", 5):
        regenerate(small(pair), tmp_path)
    assert len(lines(tmp_path)) == 5
    with open(tmp_path / "responses.jsonl", "a") as file:
        file.write(lines(run[0])[-1][:40])  # what a process killed in mid-line leaves
    report = regenerate(small(pair, num_prompts=9, batch=2), tmp_path)
    assert report["session"]["responses"] == 4
    report = regenerate(small(pair), tmp_path)
    assert report["session"]["responses"] == COUNT - 9 and report["responses"] == COUNT
    assert sorted(lines(tmp_path)) == sorted(lines(run[0]))
    assert f"prompts {COUNT}/{COUNT}: " in capsys.readouterr().err


def test_a_finished_run_has_nothing_left_to_do(run, pair):
    before = lines(run[0])
    report = regenerate(small(pair), run[0])
    assert report["session"]["responses"] == 0 and report["responses"] == COUNT
    assert said(report)[1] == "this session: 0 responses, 0 tok/s", "no share of no round"
    assert lines(run[0]) == before


@pytest.mark.parametrize("change", [{"mesh": "data:2"}, {"batch": 2}])
def test_only_in_float32_a_run_goes_on_with_another_mesh_or_batch(run, pair, tmp_path, change):
    shutil.copytree(run[0], tmp_path / "run")
    assert regenerate(small(pair, **change), tmp_path / "run")["session"]["responses"] == 0
    saved = tmp_path / "run" / "config.json"
    saved.write_text(
        json.dumps(json.loads((run[0] / "config.json").read_text()) | {"dtype": "bfloat16"})
    )
    assert regenerate(small(pair, dtype="bfloat16"), tmp_path / "run")["responses"] == COUNT
    with pytest.raises(ConfigError, match=f"other values of {next(iter(change))} "):
        regenerate(small(pair, dtype="bfloat16", **change), tmp_path / "run")


def test_other_prompts_of_the_same_config_are_refused(pair, tmp_path):
    file = tmp_path / "prompts.jsonl"
    config = small(pair, prompts=str(file), num_prompts=0, draft="")
    texts = ["def f(x):", "import " * 30, "a = 1", "b"]
    write_lines(file, ({"prompt": text} for text in texts))
    report = regenerate(config, tmp_path / "run")
    assert (report["prompts"], report["responses"], report["left_out"]) == (4, 3, 1)
    assert sorted(json.loads(line)["index"] for line in lines(tmp_path / "run")) == [0, 2, 3]
    file.write_text(file.read_text().replace("a = 1", "a = 2"))
    with pytest.raises(ConfigError, match="answers another prompt 2 than .* today's date"):
        regenerate(config, tmp_path / "run")


def test_no_prompt_of_a_file_is_skipped_that_the_target_holds(pair, tmp_path):
    file = tmp_path / "prompts.jsonl"
    target = load_model(pair / "target")
    long = next(n for n in range(99) if len(target.tokenizer.encode("import " * n)) > 64 - NEW)
    write_lines(file, ({"prompt": "import " * n} for n in (1, long - 1, long)))
    config = small(pair, prompts=str(file), num_prompts=0, draft="", max_prompt_tokens=None)
    report = regenerate(config, tmp_path / "run")
    assert (report["responses"], report["left_out"]) == (2, 1)
    assert sorted(json.loads(line)["index"] for line in lines(tmp_path / "run")) == [0, 1]


@pytest.mark.parametrize("file", ["target/model.safetensors", "draft/model.safetensors"])
def test_a_run_does_not_go_on_with_other_weights(pair, tmp_path, monkeypatch, file):
    """Nothing is decoded: a queue that answers nothing, and a response that is there."""

    class Empty(DecodeQueue):
        def __iter__(self):
            return iter(())

    monkeypatch.setattr(experiment, "DecodeQueue", Empty)
    shutil.copytree(pair, tmp_path / "pair")
    regenerate(small(tmp_path / "pair"), tmp_path / "run")
    response = dict(index=999, prompt_ids=[1], response_ids=[2], finish_reason="length")
    write_lines(tmp_path / "run" / "responses.jsonl", [response])
    assert regenerate(small(tmp_path / "pair"), tmp_path / "run")["responses"] == 1
    path = tmp_path / "pair" / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"what is in \S*{} \(\w+\): {} \(".format(*file.split("/"))
    ):
        regenerate(small(tmp_path / "pair"), tmp_path / "run")
    assert len(lines(tmp_path / "run")) == 1


@pytest.mark.parametrize("line", ["{}", "[1]", "no JSON", "twice"])
def test_a_line_that_is_no_response_is_named(run, tmp_path, line):
    first = lines(run[0])[0]
    path = tmp_path / "responses.jsonl"
    path.write_text(f"{first}\n{first if line == 'twice' else line}\n")
    with pytest.raises(ConfigError, match=r"responses\.jsonl, line 2 is not a response: "):
        Responses(path)
    assert len(path.read_text().splitlines()) == 2


def test_a_piece_depends_on_its_index_alone_and_begins_at_a_line(pair, held_out):
    config = small(pair, draft="")
    decoder = experiment.load_decoder(config)
    few, many = (
        list(experiment.prompts_of(small(pair, num_prompts=n), decoder)[1]) for n in (5, 40)
    )
    assert few == many[:5] and len({len(ids) for _, ids in many}) > 5
    pieces = lambda seed: [*itertools.islice(python_source.train_pieces(seed, max_chars=80), 40)]
    texts = pieces(0)
    assert texts == pieces(0) != pieces(1)
    whole = ["\n" + text for _, text in held_out]
    assert all(any("\n" + text in one for one in whole) for text in texts)
    assert max(map(len, texts)) == 80 and len(set(texts)) > 30


@pytest.mark.exhaustive
def test_every_answer_of_a_conversation_is_written_anew(pair, tmp_path, capsys):
    """By the chat template, the conversations apart that training holds out."""
    target = tmp_path / "target"
    shutil.copytree(pair / "target", target)
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}a:{{ mark }}{% endif %}"
    )
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    say = lambda *turns: {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)
        ]
    }
    chats = [say("x", "y", "z", "w"), say("u"), *(say(f"{i}", "v") for i in range(40))]
    path = tmp_path / "chats.jsonl"
    write_lines(path, chats)
    options = dict(held_out_share=0.3, max_prompt_tokens=24, max_new_tokens=2, temperatures=(0.0,))
    options |= dict(chat_template_kwargs='{"mark": "!"}', num_prompts=0)
    config = small(pair, target=str(target), draft="", prompts=str(path), **options)
    regenerate(config, tmp_path / "run")
    rows = sorted(map(json.loads, lines(tmp_path / "run")), key=lambda row: row["index"])
    tokenizer = Tokenizer.from_directory(target)
    found = {tokenizer.decode(row["prompt_ids"]) for row in rows}
    held_out = HeldOut.of(read_records(path), 0.3)
    kept = [i for i, r in enumerate(read_records(path)) if held_out.part(r, "train")]
    assert 20 < len(kept) < 40
    said = f"{42 - len(rows) + (0 in kept)} conversations are left out: 0.3 of the records are held"
    assert said in capsys.readouterr().out
    several = {"u:x;a:!", "u:x;a:y;u:z;a:!"} if 0 in kept else set()
    assert found == several | {"u:u;a:!"} | {f"u:{i - 2};a:!" for i in kept if i > 1}


CHAT = "<|endoftext|>u:{{ messages[0].content }}<|endoftext|>a:"


@pytest.fixture(scope="module")
def chat_target(pair, tmp_path_factory):
    """The target with a chat template, whose turns end with a special token."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(pair / "target", folder)
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    return folder


def of_self(target, **changes):
    options = dict(target=str(target), draft="", prompt_source="self", num_prompts=40)
    options |= dict(max_prompt_tokens=48, **{"turns.max_tokens": 12})
    config = small(target.parent, draft="")
    config.update_from_flattened_dict(options | changes)
    return config


def jsonl(path):
    return [*map(json.loads, path.read_text(encoding="utf-8").splitlines())]


@pytest.fixture(scope="module")
def written(chat_target, tmp_path_factory):
    """Folder and report of a run whose target wrote the prompts."""
    folder = tmp_path_factory.mktemp("written")
    return folder, regenerate(of_self(chat_target), folder)


def test_the_target_writes_prompts_that_depend_on_their_index_alone(written, chat_target):
    folder, report = written
    decoder = SpeculativeDecoder(load_model(chat_target))
    tokenizer = decoder.target.tokenizer
    opening = Opening.of(tokenizer, decoder.target.stop_tokens, load_words("english"))
    turns = {row["index"]: row for row in jsonl(folder / "turns.jsonl")}
    assert sorted(turns) == [*range(40)] and opening.before == "<|endoftext|>u:"
    for index in (0, 17):
        sampler = SamplerConfig(1.0, top_p=0.95, seed=(1 << 31) + index)
        stops = dict(stop_tokens=opening.stop_tokens)
        alone = decoder.generate(opening.begin(index)[1], 12, sampler=sampler, **stops)
        assert tuple(turns[index]["response_ids"]) == alone.tokens
    chosen = choose(turns.values(), opening, tokenizer, 2)
    assert {*chosen.left_out} >= {"unfinished"} and len(chosen.texts) > 5
    prompts = jsonl(folder / "prompts.jsonl")
    assert prompts == [opening.row(i, text) for i, text in chosen.texts.items()]
    rows = {row["index"]: row for row in map(json.loads, lines(folder))}
    assert {i: opening.prompt(x, tokenizer) for i, x in chosen.texts.items()} == {
        i: row["prompt_ids"] for i, row in rows.items()
    }
    assert report["written"]["left_out"] == dict(chosen.left_out)
    said = (folder / "report.md").read_text(encoding="utf-8")
    assert "the target wrote 40 prompts" in said and "did not end within the limit: '" in said


def test_more_prompts_are_written_by_a_run_that_goes_on(written, chat_target, tmp_path):
    shutil.copytree(written[0], tmp_path / "run")
    report = regenerate(of_self(chat_target, num_prompts=46), tmp_path / "run")
    before, after = (jsonl(folder / "prompts.jsonl") for folder in (written[0], tmp_path / "run"))
    assert after[: len(before)] == before and len(after) == report["responses"]


def test_a_target_whose_prompts_are_all_noise_is_refused(written, chat_target, tmp_path):
    shutil.copytree(written[0], tmp_path / "run")
    for name in ("responses.jsonl", "config.json"):
        (tmp_path / "run" / name).unlink()
    saved = json.loads((written[0] / "config.json").read_text()) | {"min_prompt_tokens": 48}
    (tmp_path / "run" / "config.json").write_text(json.dumps(saved))
    config = of_self(chat_target, min_prompt_tokens=48)
    with pytest.raises(ConfigError, match="none of 40 prompts .*shorter.* give prompts"):
        regenerate(config, tmp_path / "run")
    assert len(jsonl(tmp_path / "run" / "turns.jsonl")) == 40


def test_the_first_prompts_are_judged_once_they_are_written(chat_target, tmp_path, monkeypatch):
    """Not when they are asked for, nor by those that end first, which are the shortest."""
    judged = []

    def noted(turns, *args):
        turns = [*turns]
        judged.append({turn["index"] for turn in turns})
        return choose(turns, *args)

    monkeypatch.setattr("experiments.regenerate._ENOUGH", 4)
    monkeypatch.setattr("experiments.regenerate.choose", noted)
    regenerate(of_self(chat_target, num_prompts=12, refill=3), tmp_path)
    assert judged == [{*range(4)}, {*range(12)}]
    refused = of_self(chat_target, min_prompt_tokens=48)
    with pytest.raises(ConfigError, match="none of 4 prompts"):
        regenerate(refused, tmp_path / "noise")
    assert 4 <= len(jsonl(tmp_path / "noise" / "turns.jsonl")) < 40


@pytest.mark.exhaustive
@pytest.mark.parametrize("file, count", [("turns.jsonl", 9), ("responses.jsonl", 3)])
def test_a_killed_run_writes_the_same_prompts(written, chat_target, tmp_path, file, count):
    with killed_at(file, count):
        regenerate(of_self(chat_target), tmp_path)
    regenerate(of_self(chat_target, batch=5, refill=4), tmp_path)
    prompts = [(folder / "prompts.jsonl").read_bytes() for folder in (tmp_path, written[0])]
    assert prompts[0] == prompts[1]
    for name in ("turns.jsonl", "responses.jsonl"):
        assert sorted(jsonl(tmp_path / name), key=str) == sorted(jsonl(written[0] / name), key=str)


@pytest.mark.exhaustive
def test_a_model_without_a_template_writes_from_its_own_start(pair, tmp_path):
    regenerate(of_self(pair / "target", min_prompt_tokens=2), tmp_path)
    tokenizer = Tokenizer.from_directory(pair / "target")
    start = tokenizer.token_id("<|endoftext|>")
    turns = jsonl(tmp_path / "turns.jsonl")
    assert all(row["prompt_ids"] == [start] for row in turns)
    prompts = {row["index"]: row["prompt"] for row in jsonl(tmp_path / "prompts.jsonl")}
    whole = {row["index"] for row in turns if row["finish_reason"] == "length"}
    assert prompts and {*prompts} <= whole
    rows = jsonl(tmp_path / "responses.jsonl")
    assert all(tokenizer.encode(prompts[row["index"]]) == row["prompt_ids"] for row in rows)


def test_a_run_ends_when_its_time_is_over(pair, tmp_path):
    report = regenerate(small(pair, minutes=1e-6), tmp_path)
    assert 0 < report["responses"] < COUNT
    assert regenerate(small(pair), tmp_path)["responses"] == COUNT
