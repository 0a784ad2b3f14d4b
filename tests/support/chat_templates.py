"""Chat templates in the manner of model families, and tokenizers small enough for a test.

The texts are ours: each does what its family's template does where rendering, spans or
refusals depend on it.
"""

import dataclasses
import functools

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from spec_jax import SpeculativeDecoder, testing
from spec_jax.models.tokenizer import Tokenizer

CHATML = """\
{%- if messages[0].role != 'system' %}<|im_start|>system
You are useful.<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set head = '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' %}
    {{- head + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\\n\\n' %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set first = '' %}{%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if (turn.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if turn.role == 'user' %}
        {{- '[INST] ' + (first if loop.first else '') + turn.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + turn.content + eos_token }}
    {%- endif %}
{%- endfor %}"""

GENERATION = """\
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{ '<|im_start|>assistant\\n' }}{% generation %}{{ message.content }}<|im_end|>
{% endgeneration %}
    {%- else -%}
        {{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif -%}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}{{ '<tool>' ~ call.function | tojson }}{% endfor %}
    {%- else %}{{ message.content }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Reasoning is kept after the last user's message only; its tags are always written there.
REASONING = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}{% if is_open %}{{ '<think>\\nHm' }}{% endif %}
{%- endif %}"""

# Reasoning is left out where a variable says so, as in Qwen3; and there may be tools.
THINKING = """\
{%- if tools %}{{ '<|im_start|>system\\n' ~ tools | tojson ~ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

TEMPLATES = {
    "ChatML": CHATML,
    "Llama 3": LLAMA3,
    "Mistral": MISTRAL,
    "generation": GENERATION,
    "tools": TOOLS,
    "reasoning": REASONING,
}

SPECIAL = (
    "<s> </s> <|endoftext|> <|im_start|> <|im_end|> <|start_header_id|> "
    "<|end_header_id|> <|eot_id|> <start_of_turn> <end_of_turn> <unk>"
).split()
TEXT = "What is two and two? That is four, \n\n and a café is a café. user assistant system 数 🙂 "


def byte_level(template=None, *, trim=False, special=tuple(SPECIAL), **config) -> Tokenizer:
    """A byte-level BPE whose post-processor also puts ``<s>`` before what it encodes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    options = dict(show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        [TEXT * 3], trainers.BpeTrainer(vocab_size=330, special_tokens=list(special), **options)
    )
    start = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim), start])
    return _with_config(backend, template, config)


def metaspace(template=None, **config) -> Tokenizer:
    """A SentencePiece-like BPE: a space put in front, unknown characters as bytes."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    alphabet = [*'abcdefghijklmnopqrstuvwxyzTWYB▁ ?,.!:{}[]"|_\n']
    options = dict(show_progress=False, initial_alphabet=alphabet)
    options |= dict(special_tokens=SPECIAL + [f"<0x{i:02X}>" for i in range(256)])
    words = TEXT.encode("ascii", "ignore").decode().split()
    backend.train_from_iterator(words, trainers.BpeTrainer(vocab_size=360, **options))
    return _with_config(backend, template, config)


def _with_config(backend, template, config) -> Tokenizer:
    names = {"bos_token": "<s>", "eos_token": "</s>", **config}
    if template is not None:
        names["chat_template"] = template
    return Tokenizer(backend, names)


@functools.cache
def decoder_of(template=CHATML, **config) -> SpeculativeDecoder:
    """Of a mock model with a byte-level tokenizer."""
    tokenizer = byte_level(template, **config)
    target = testing.mock_model(tokenizer.vocab_size, contexts=7)
    return SpeculativeDecoder(dataclasses.replace(target, tokenizer=tokenizer))


def talk(*contents, first="user"):
    """Messages whose roles take turns."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


ANSWERS = ["That is four, is it?", "A café 数 🙂", "\nand\n"]
TALK = talk("What is 2 + 2?", ANSWERS[0], "And a café?", ANSWERS[1], "more", ANSWERS[2])


def sharegpt(messages):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
    return {"id": "x", "conversations": turns}
