"""Files of conversations and texts: every layout gives the same messages, and a fault is named."""

import gzip
import json

import pytest
from support.chat_templates import TALK, byte_level, sharegpt
from support.files import write_lines

from spec_jax.data import records
from spec_jax.data.conversations import Encoder, read_documents
from spec_jax.data.records import parse_record, read_records
from spec_jax.errors import ConfigError


def test_every_layout_gives_the_same_messages(tmp_path):
    messages = [{"role": "system", "content": "S\u2028"}, *TALK]
    parts = [
        {"role": m["role"], "content": [{"type": "text", "text": c} for c in m["content"]]}
        for m in messages
    ]
    records = [
        {"messages": messages},
        sharegpt(messages),
        {"messages": parts},
        {"conversations": messages},
        {"system": "S\u2028", **sharegpt(TALK)},
        {"text": "unused", "messages": messages, "tools": ""},
    ]
    lines = write_lines(tmp_path / "a.jsonl", records)
    whole = tmp_path / "b.json"
    whole.write_text("\ufeff\n " + json.dumps(records, indent=1, ensure_ascii=False), "utf-8")
    misnamed = write_lines(tmp_path / "c.json", records)
    packed = tmp_path / "d.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    for path in (lines, whole, misnamed, packed):
        found = list(read_records(path))
        assert len(found) == 6
        assert all(f.messages == messages and f.tools is None for f in found)
    assert [f.source for f in read_records(lines)][-1] == f"{lines}:6"
    assert [f.source for f in read_records(whole)][-1] == f"{whole}: object 6"


USER, ASKED = {"role": "user", "content": "Q"}, [{"role": "user", "content": "Q"}]
SYSTEM, ANSWER = {"role": "system", "content": "S"}, {"role": "assistant", "content": "A"}
ANSWERED = [USER, ANSWER]


ROWS = [
    ({"question": "Q", "answer": "A"}, ANSWERED),
    ({"question": "Q", "answer": ["A"]}, ASKED),
    ({"instruction": "Q", "input": "", "output": "A", "text": "Below is"}, ANSWERED),
    ({"instruction": "Q", "input": "x", "output": "A"}, [USER | {"content": "Q\n\nx"}, ANSWER]),
    ({"system_prompt": "S", "question": "Q", "response": "A"}, [SYSTEM, *ANSWERED]),
    ({"data": ["Q", "A", "Q"], "id": "0"}, [*ANSWERED, USER]),
    ({"prompt": "unused", "prompt_id": "0", "messages": ANSWERED}, ANSWERED),
    ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, ANSWERED),
    ({"question_id": 1, "category": "c", "turns": ["Q", "more"]}, ASKED),
    ({"prompt": "Q", "completion": "A"}, ANSWERED),
    ({"prompt": "Q", "canonical_solution": "A"}, "Q"),
    ({"messages": None, "text": "Q"}, "Q"),
    ("Q", "Q"),
]


@pytest.mark.parametrize(("row", "expected"), ROWS)
def test_rows_of_the_usual_data_sets_are_known(row, expected):
    record = parse_record(row, "here:1")
    assert (record.text if isinstance(expected, str) else record.messages) == expected


def test_blank_lines_and_marks_of_order_are_no_records(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert [(r.text, r.source[-2:]) for r in read_records(file)] == [("a", ":1"), ("b", ":4")]
    with pytest.raises(ConfigError, match="the path is ''; expected a file or folder"):
        list(read_records(""))  # which is no name of the current folder


def test_other_files_are_one_text_and_folders_are_read_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("two\n{}\n", encoding="utf-8")
    (tmp_path / "z.txt").write_text("three", encoding="utf-8")
    (tmp_path / ".hidden").write_text("no", encoding="utf-8")
    for name in (".git", "__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.pyc").write_bytes(b"\xff")
    write_lines(tmp_path / "a.jsonl", [{"text": "one"}])
    assert [r.text for r in read_records(tmp_path)] == ["one", "two\n{}\n", "three"]


LINES = [
    ('{"messages": [', "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("3", "3 is not an object"),
    ("{}", "the keys none"),
    ('{"query": "a", "answer": "b"}', "the keys 'query', 'answer'.*messages, .*question"),
    ('{"turns": "hello"}', "turns is 'hello'; expected a list of texts"),
    ('{"text": null, "prompt": 5}', "prompt is 5; expected a text"),
    ('{"messages": ["hi"]}', "a turn is 'hi'"),
    ('{"messages": [{"content": "a"}]}', "the role None"),
    ('{"messages": [{"role": "user", "content": 3}]}', "the content 3"),
    ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "text only"),
    ('{"conversations": [{"from": "bot", "value": "a"}]}', "from 'bot'.*one of human"),
    ('{"conversations": [{"from": ["gpt"], "value": "a"}]}', r"from \['gpt'\]"),
    ('{"messages": [], "tools": 3}', "tools are 3"),
    ('{"messages": [], "tools": "[1"}', "not JSON"),
]


@pytest.mark.parametrize(("line", "message"), LINES)
def test_a_malformed_line_is_named_with_its_remedy(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"a\.jsonl:2: .*{message}.*leave it out"):
        list(read_records(file))


def test_a_malformed_list_names_the_line_or_the_object(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('[{"text": "a"},\n{"text": }]')
    with pytest.raises(ConfigError, match=r"a\.json: not JSON .*line 2"):
        list(read_records(file))
    file.write_text('[{"text": "a"},\n{"txt": "b"}]')
    with pytest.raises(ConfigError, match=r"a\.json: object 2: .*'txt'"):
        list(read_records(file))


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: byte 11 is not UTF-8"):
        list(read_records(tmp_path / "a.jsonl"))
    (tmp_path / "b.jsonl").write_text('{"text": "ab\\ud83d"}\n')
    with pytest.raises(ConfigError, match=r"b\.jsonl:1: character 3 is half"):
        list(read_documents([tmp_path / "b.jsonl"], Encoder(byte_level())))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    with pytest.raises(ConfigError, match=r"c\.jsonl\.gz cannot be read"):
        list(read_records(tmp_path / "c.jsonl.gz"))
    with pytest.raises(ConfigError, match=r"no file .*none\.jsonl"):
        list(read_records(tmp_path / "none.jsonl"))


def test_a_compressed_file_is_unpacked_up_to_a_limit(tmp_path, monkeypatch):
    """Of one line without an end no more than the limit is held."""
    monkeypatch.setattr(records, "MAX_UNPACKED_BYTES", 1 << 16)
    row = b'{"text": "%s"}\n' % (b"a" * 50)
    for name, data in (("lines.jsonl.gz", row * 2000), ("line.txt.gz", b"a" * (1 << 20))):
        (tmp_path / name).write_bytes(gzip.compress(data))
        with pytest.raises(ConfigError, match=r"unpacks to more than 65,536 bytes; .*gunzip -k"):
            list(read_records(tmp_path / name))
    (tmp_path / "fits.jsonl.gz").write_bytes(gzip.compress(row * 1000))
    (tmp_path / "plain.jsonl").write_bytes(row * 2000)
    assert len(list(read_records(tmp_path / "fits.jsonl.gz"))) == 1000
    assert len(list(read_records(tmp_path / "plain.jsonl"))) == 2000
