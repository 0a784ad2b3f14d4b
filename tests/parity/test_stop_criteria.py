"""Stop strings with special tokens end a row at the token where transformers ends it."""

import numpy as np
import pytest
from needs import torch, transformers
from support.chat_templates import byte_level, metaspace

from spec_jax.decoding import Finish
from spec_jax.engine.text import TextTracker

STOPS = [["<|im_end|>"], ["and<|im_end|>"], ["</s>two", "</s> two"], ["e<s></s>", "is<|im_end|>t"]]
PIECES = ["and", "two", "e", "is", "<|im_end|>", "</s>", "<s>"]


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_a_row_ends_at_the_same_token(tmp_path, stops, make):
    ours, rng, num_stopped = make(), np.random.default_rng(0), 0
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    criteria = transformers.StopStringCriteria(theirs, stops)
    pieces = [ours.backend.encode(x, add_special_tokens=False).ids for x in PIECES]
    prompt = ours.backend.encode("a", add_special_tokens=False).ids
    for _ in range(30):
        ids = [i for k in rng.integers(len(PIECES), size=12) for i in pieces[k]]
        ends = [
            n for n in range(1, len(ids) + 1) if criteria(torch.tensor([prompt + ids[:n]]), None)
        ]
        tracker = TextTracker(ours, prompt, stops)
        tracker.look(ids, Finish.LENGTH)
        count, _, finish = tracker.result(ids, Finish.LENGTH)
        assert (finish == Finish.STOP_STRING, count) == (bool(ends), (ends or [len(ids)])[0])
        num_stopped += bool(ends)
    assert num_stopped
