"""Questions by name and from files: turns, categories, what is left out, and their batches."""

import functools
import json
import sys
import types

import pytest
from support.chat_templates import THINKING, byte_level

from configs import regenerate_zoo
from experiments.comparison.answers import pack
from experiments.comparison.run import categories
from experiments.comparison.setup import held_out_pieces
from experiments.regenerate import prompts_of
from spec_jax.data import python_source, questions, sources
from spec_jax.data.questions import CONVERSATION, Question
from spec_jax.errors import ConfigError
from spec_jax.evaluation.prompts import PromptEncoder, encodable
from spec_jax.models.tokenizer import Tokenizer


def user(text):
    return {"role": "user", "content": text}


def target_of(tokenizer):
    """What encodes prompts, without a model."""
    model = types.SimpleNamespace(last_id=tokenizer.num_ids - 1)
    return types.SimpleNamespace(tokenizer=tokenizer, model=model, name="toy")


def write(path, rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return str(path)


def test_every_form_of_a_row_becomes_a_question(tmp_path):
    said = lambda text: {"role": "assistant", "content": text}
    system = {"role": "system", "content": "s"}
    rows = [
        {"question_id": 7, "category": "writing", "turns": ["a", "b"]},
        {"task_id": "T/1", "prompt": "def f():\n"},
        {"messages": [system, user("a"), said("no"), user("b"), user("c"), said("no")]},
        {"question": "1 + 1?", "answer": "2", "id": "sum"},
        {"system": "s", "turns": ["a", "b"]},
    ]
    data = write(tmp_path / "rows.jsonl", rows)
    found = questions.load(data, 0).chosen
    assert [q.name for q in found] == ["7", "T/1", "rows.jsonl:3", "sum", "rows.jsonl:5"]
    assert [q.category for q in found] == ["writing", "rows", "rows", "rows", "rows"]
    assert [q.num_turns for q in found] == [2, 1, 2, 1, 2]
    assert found[0].turns == ((user("a"),), (user("b"),)) and found[1].text == "def f():"
    assert found[2].turns == ((system, user("a")), (user("b"), user("c")))  # answers are left out
    assert found[4].turns == ((system, user("a")), (user("b"),))
    lines = write(tmp_path / "lines.txt", ["one", "", "two"])
    assert [q.text for q in questions.load(lines, 0).chosen] == ["one", "two"]


def test_later_turns_hold_the_answers_before_them():
    question = Question("q", "c", ((user("a"),), (user("b"),)))
    chat = question.messages(["A"])
    assert [m["content"] for m in chat] == ["a", "A", "b"]
    assert [m["role"] for m in chat] == ["user", "assistant", "user"]
    assert question.plain_text(["A"]) == "a\n\nA\n\nb"
    assert question.plain_text() == "a" and question.messages() == [user("a")]


def test_a_malformed_row_is_named_by_its_line_and_the_rest_goes_on(tmp_path):
    rows = [{"prompt": "a"}, "{", {"turns": ["b", " "]}, {"x": 1}, {"prompt": " "}, {"prompt": "c"}]
    rows += [{"prompt": "\ud83d"}, {"prompt": "d", "category": ["x", "y"]}, {"turns": []}]
    data = write(tmp_path / "rows.jsonl", rows)
    found = questions.load(data, 0)
    assert [q.text for q in found.chosen] == ["a", "c"]
    assert len(found.notes) == 7 and not any("leave it out" in note for note in found.notes)
    for line, note in zip((2, 3, 4, 5, 7, 8, 9), found.notes):
        assert note.startswith(f"left out: {data}:{line}")
    for said in ("category is ['x', 'y']; expected a text", "turns is []; expected a list of"):
        assert said in "".join(found.notes)
    with pytest.raises(ConfigError, match=r"has no question \(.*:1: not JSON"):
        questions.load(write(tmp_path / "bad.jsonl", ["{"]), 0)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt"])
def test_one_file_is_the_same_prompts_in_every_experiment(tmp_path, name):
    """Where more are asked for than there are, and some lines are no prompts."""
    rows = ['{"prompt": "a"}', "{", '{"turns": ["b", " "]}', '{"prompt": "c"}', "\xff"]
    lines = "\n".join([*rows, ""] if name == "rows.jsonl" else ["a", "", "c", "\xff", "d"])
    path = tmp_path / name
    path.write_bytes(lines.encode("latin-1"))
    asked = questions.load(str(path), 16)
    config = regenerate_zoo.get_config()
    config.update({"prompts": str(path), "num_prompts": 16})
    target = target_of(byte_level())
    count, pairs, said = prompts_of(config, types.SimpleNamespace(target=target))
    answered = [target.tokenizer.decode(ids) for _, ids in pairs]
    expected = ["a", "c"] if name == "rows.jsonl" else ["a", "c", "d"]
    assert [q.text for q in asked.chosen] == answered == expected
    notes = [note.replace("questions", "prompts") for note in asked.notes]
    assert count == len(answered) and len(notes) == (4 if name == "rows.jsonl" else 2)
    assert notes == said
    assert notes[-1] == f"{path} has {count} prompts, not 16: all of them are used"


def test_conversations_that_the_chat_template_refuses_are_left_out(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    target = target_of(byte_level(template))
    talks = [[user("a")], [{"role": "system", "content": "s"}, user("b")], [user("c")]]
    path = write(tmp_path / "talks.jsonl", [{"messages": talk} for talk in talks])
    config = regenerate_zoo.get_config()
    config.update({"prompts": path, "num_prompts": 0, "held_out_share": 0.0})
    count, pairs, notes = prompts_of(config, types.SimpleNamespace(target=target))
    assert count == 3 and [index for index, _ in pairs] == [0, 2], "of those that stay"
    assert len(notes) == 1 and f"left out: {path}:2: " in notes[0] and "no system" in notes[0]
    kept, notes = encodable(questions.load(path, 3).chosen, PromptEncoder(target))
    assert [question.plain_text() for question in kept] == ["a", "c"]
    assert len(notes) == 1 and "no system" in notes[0]
    assert notes[0].startswith("left out: question talks.jsonl:2: ")
    with pytest.raises(ConfigError, match="talks.jsonl:2: .*no system"):
        encodable(questions.load(path, 3).chosen[1:2], PromptEncoder(target))


VARIABLES = [  # of a template, the prompts, and what is wrong with them
    (THINKING, {"enable_thinkng": False}, "talks.jsonl", "did you mean enable_thinking"),
    (None, {"enable_thinking": False}, "talks.jsonl", "has no chat template"),
    *((THINKING, {"tools": []}, name, "no conversation to render") for name in ("t.jsonl", "")),
    (THINKING, {"tools": []}, "t.txt", "no conversation to render"),
    (THINKING, {"enable_thinking": False}, "talks.jsonl", None),
]


@pytest.mark.parametrize(("template", "variables", "name", "words"), VARIABLES, ids=lambda x: "")
def test_variables_of_a_template_stop_a_run_that_they_do_not_fit(
    tmp_path, template, variables, name, words
):
    write(tmp_path / "talks.jsonl", [{"messages": [user("a")]}, {"prompt": "b"}])
    for other in ("t.jsonl", "t.txt"):
        write(tmp_path / other, [{"prompt": "b"}])
    target = target_of(byte_level(template).with_chat_template_kwargs(variables))
    config = regenerate_zoo.get_config()
    config.update(prompts=str(tmp_path / name) if name else "", num_prompts=2)
    config.update(chat_template_kwargs=json.dumps(variables))
    run = functools.partial(prompts_of, config, types.SimpleNamespace(target=target))
    if words is None:
        assert run()[0] == 2
        return
    with pytest.raises(ConfigError, match=words):
        run()


def test_categories_are_chosen_and_one_without_questions_is_named(tmp_path):
    names = ["writing", "qa", "coding", "qa"]
    data = write(tmp_path / "r.jsonl", [{"turns": [n, "and?"], "category": n} for n in names])
    chosen = lambda *wanted: [q.category for q in questions.load(data, 0, wanted).chosen]
    assert chosen("qa") == ["qa", "qa"] and chosen(CONVERSATION) == ["writing", "coding"]
    found = questions.load(data, 0, ["qa", "rag"])
    assert len(found.chosen) == 2 and "no question of the category 'rag'" in found.notes[0]
    with pytest.raises(ConfigError, match="no question of them; it has multi-turn conversation"):
        questions.load(data, 0, ["rag"])
    many = questions.load(data, 9)
    assert len(many.chosen) == 4 and "has 4 questions, not 9" in many.notes[0]
    assert [q.name for q in questions.load(data, 2).chosen] == ["r.jsonl:1", "r.jsonl:3"]


def test_conversations_are_one_group_of_several_categories(tmp_path):
    """Single questions of a category that has conversations too are none."""
    rows = [
        {"prompt": "f", "category": "math"},
        {"turns": ["a", "b"], "category": "writing"},
        {"turns": ["d", "e"], "category": "mine"},
        {"turns": ["a", "b"], "category": "math"},
        {"turns": ["a", "b"], "category": "coding"},
        {"turns": ["a", "b"], "category": "writing"},
        {"prompt": "c", "category": "stem"},
    ]
    found = questions.load(write(tmp_path / "r.jsonl", rows), 0).chosen
    groups = {name: members for name, (_, members) in categories(found).items()}
    expected = {"math": [0, 3], CONVERSATION: [1, 4, 5], "writing": [1, 5], "coding": [4]}
    expected |= {"mine": [2], "stem": [6]}
    assert groups == expected
    assert categories([Question("qa", "qa"), Question("qa", "qa")]) == {}


def test_questions_that_share_a_name_are_numbered(tmp_path):
    data = write(tmp_path / "r.jsonl", [{"prompt": x, "id": "q"} for x in "abc"])
    assert [q.name for q in questions.load(data, 0).chosen] == ["q", "q #2", "q #3"]
    rows = [{"prompt": "a", "id": name} for name in ("q", "q", "q #2", "q")]
    found = questions.load(write(tmp_path / "own.jsonl", rows), 0).chosen
    assert [q.name for q in found] == ["q", "q #3", "q #2", "q #4"]


def test_a_name_loads_by_datasets(monkeypatch):
    asked = []
    rows = [{"prompt": ["a", "b"], "prompt_id": 3, "category": "math", "reference": []}]
    load = lambda *names, split: asked.append((*names, split)) or rows
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    (question,) = questions.load("mtbench", 0).chosen
    assert question.turns == ((user("a"),), (user("b"),)) and question.name == "3"
    assert question.category == "math" and asked == [("HuggingFaceH4/mt_bench_prompts", "train")]
    rows[:] = [{"question": "1 + 1?", "answer": "2"}]
    assert questions.load("gsm8k", 1).chosen[0].plain_text() == "1 + 1?"
    assert asked[1] == ("openai/gsm8k", "main", "test")


@pytest.mark.parametrize("name", sources.SOURCES)
def test_a_name_that_cannot_be_loaded_says_what_to_fetch(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it is an ImportError
    url = sources.SOURCES[name].url
    with pytest.raises(ConfigError) as caught:
        sources.rows(name)
    said = str(caught.value)
    assert f"`curl -LO {url}`; then --config.data={url.rsplit('/')[-1]}" in said
    assert "pip install datasets" in said or name == "specbench"


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    """Its libraries would ask again for 23 seconds; offline they use their caches at once."""
    import huggingface_hub as hub
    from huggingface_hub import constants

    asked, offline, is_cached = [], [], False

    def probe(url, timeout):
        asked.append(url)
        raise OSError("no such host")

    def load(*names, split):
        offline.append(constants.HF_HUB_OFFLINE)
        if not is_cached:
            raise ConnectionError("no network")
        return [{"prompt": "a"}]

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_hf_file_metadata", probe)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    with pytest.raises(ConfigError, match=r"hub: it does not answer \(OSError: no such host\)"):
        sources.rows("mtbench")
    assert len(asked) == 1 and offline == [True] and constants.HF_HUB_OFFLINE is False
    is_cached = True
    assert sources.rows("humaneval") == [({"prompt": "a"}, "humaneval: row 1")]


def test_names_are_told_apart_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "gsm8k", ["one"])
    sources.check("gsm8k")
    assert sources.is_name("gsm8k") and not sources.is_name("./gsm8k")
    assert questions.load("./gsm8k", 0).chosen[0].text == "one"
    with pytest.raises(ConfigError, match=r"'humanevl'.*did you mean humaneval\?"):
        sources.check("humanevl")


def test_batches_hold_whole_questions():
    groups, layout = pack([[0], [1, 2], [3], [4], [5, 6]], 3)
    assert layout == [[0, 1, 2], [3, 4], [5, 6]]
    assert [group.questions for group in groups] == [(0, 1), (2, 3), (4,)]
    groups, layout = pack([[0, 1], [2]], 1)
    assert layout == [[0], [1], [2]]
    assert [tuple(g) for g in groups] == [((0,), (0, 1)), ((1,), (2,))]


def test_pieces_for_another_target_begin_as_its_tokenizer_begins_a_text(monkeypatch):
    foreign = byte_level(special=("<s>", "</s>"), eos_token="</s>")
    target = types.SimpleNamespace(tokenizer=foreign, config=types.SimpleNamespace(bos_token_id=0))
    pieces = held_out_pieces(target, 3, 9, seed=0)
    assert [(len(piece), piece[0], piece.count(0)) for piece in pieces] == [(9, 0, 1)] * 3
    target.tokenizer = byte_level(special=("<s>",), eos_token="<s>")
    target.config.bos_token_id = 0
    with monkeypatch.context() as patch:
        patch.setattr(python_source, "documents", lambda split: [("a", "xy"), ("b", "z<s>!")])
        (piece,) = held_out_pieces(target, 1, 8, seed=0)
    decode = target.tokenizer.backend.decode
    assert decode(piece, skip_special_tokens=False) == "<s><s>xy<s>z<s>!"
    target.tokenizer = foreign
    target.config.bos_token_id = 1  # not what the tokenizer puts first
    assert 0 not in held_out_pieces(target, 1, 9, seed=0)[0]
    target.tokenizer = Tokenizer(foreign.backend)
    with pytest.raises(ConfigError, match="separate documents.*--config.data=FILE"):
        held_out_pieces(target, 1, 9, seed=0)
