"""A prompt has the same ids and positions in training, regeneration, evaluation and decoding."""

import types

import numpy as np
import pytest
from support.chat_templates import CHATML, MISTRAL, TALK, byte_level
from support.files import write_lines
from tokenizers import processors

from configs import regenerate_zoo
from experiments import regenerate
from experiments.comparison import answers
from experiments.training import text as texts
from spec_jax.data.batches import Corpus
from spec_jax.data.conversations import Encoder, read_documents
from spec_jax.data.packed import write_packed
from spec_jax.data.questions import of_record
from spec_jax.data.records import Conversation, Text
from spec_jax.engine import request
from spec_jax.evaluation.prompts import PromptEncoder
from spec_jax.loading import LoadedModel

TEXT = "two and two is four, and a café is a café"


def target_of(template, has_bos) -> LoadedModel:
    """A target without weights, whose tokenizer puts ``<s>`` before a text or does not."""
    tokenizer = byte_level(template)
    if not has_bos:
        tokenizer.backend.post_processor = processors.ByteLevel()
    model = types.SimpleNamespace(last_id=tokenizer.num_ids - 1)
    return LoadedModel("target", model, None, tokenizer)


def begins_with(corpus, document, ids):
    """Whether a document of a corpus begins with ids, at the positions of decoding."""
    begin = corpus.starts[document]
    window = corpus.window(0, len(corpus.tokens))
    part = slice(begin, begin + len(ids))
    places = np.arange(part.start, part.stop) - window["begins"][part]
    return (window["tokens"][part].tolist(), places.tolist()) == (ids, [*range(len(ids))])


@pytest.mark.parametrize("has_bos", [True, False], ids=["BOS", "no BOS"])
@pytest.mark.parametrize("template", [CHATML, MISTRAL, None], ids=["ChatML", "Mistral", "plain"])
def test_a_prompt_has_the_same_ids_wherever_it_is_read(tmp_path, template, has_bos):
    target = target_of(template, has_bos)
    tokenizer, encoder = target.tokenizer, Encoder(target.tokenizer)
    record, row = Text(TEXT, "a:1"), {"text": TEXT}
    if template is not None:
        record, row = Conversation(TALK[:2], None, "a:1"), {"messages": TALK[:2]}
    ids = request.encode(target, TEXT if template is None else TALK[:1])
    has_first = has_bos if template is None else template == MISTRAL
    assert (ids[0] == tokenizer.token_id("<s>")) == has_first
    assert PromptEncoder(target)(of_record(record)) == ids

    path = write_lines(tmp_path / "a.jsonl", [row, row])
    config = regenerate_zoo.get_config()
    config.update(prompts=str(path), num_prompts=0, held_out_share=0.0)
    _, pairs, _ = regenerate.prompts_of(config, types.SimpleNamespace(target=target))
    assert [found for _, found in pairs] == [ids, ids]

    corpora = [write_packed(tmp_path, "train", read_documents([path], encoder), tokenizer)]
    ends_of = [5, 6], [5, encoder.separator_id]
    rows = [{"prompt_ids": ids, "response_ids": end} for end in ends_of]
    responses = write_lines(tmp_path / "responses.jsonl", rows)
    corpora.append(texts.load_responses(responses, tokenizer))
    if template is None:
        corpora.append(Corpus.of_documents("source", tokenizer, [("a", TEXT), ("b", TEXT)]))
    for corpus in corpora:
        assert all(begins_with(corpus, document, ids) for document in (0, 1)), corpus.name
    ends = corpora[1].tokens[corpora[1].starts[1:] - 1]
    assert [*ends] == [encoder.separator_id] * 2 and len(corpora[1].tokens) == 2 * len(ids) + 5
    if template is not None:
        assert texts.held_out_prompts(corpora[0], 1, 99) == [ids]


def test_the_text_of_a_prompt_that_is_saved_has_its_special_tokens():
    target = target_of(CHATML, has_bos=False)
    ids = request.encode(target, TALK[:1])
    text = answers.text_of(target, ids)
    assert text.startswith("<|im_start|>") and "<|im_end|>" in text
    assert target.tokenizer.encode(text) == ids


def test_a_held_out_prompt_that_is_cut_keeps_its_bos():
    corpus = Corpus("text", np.arange(1, 40, dtype=np.int32), None, np.asarray([0, 39]))
    found = texts.held_out_prompts(corpus, 3, 9, 1)
    assert found == [[*range(1, 10)], [1, *range(11, 19)], [1, *range(20, 28)]]
