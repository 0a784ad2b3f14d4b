"""The process of the benchmark's part "transformers" that runs assisted generation.

It runs in its own interpreter, which has torch and transformers and needs no jax. It reads one JSON
request per line and answers each with one line:

    {"target": DIR, "draft": DIR, "threads": N}           -> versions
    {"prompts": IDS, "k": K, "max_new_tokens": N}         -> seconds, output ids

K is the number of assistant tokens per round; 0 decodes without an assistant.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Serves requests from stdin until it closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print goes to stderr

    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    setup = json.loads(sys.stdin.readline())
    torch.set_num_threads(setup["threads"])
    load = lambda directory: transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    ).eval()
    target, draft = load(setup["target"]), load(setup["draft"])

    def answer(value) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    def generate(ids, k: int, max_new_tokens: int) -> list[int]:
        draft.generation_config.num_assistant_tokens = k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        tokens = torch.tensor([ids])
        out = target.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
            max_new_tokens=max_new_tokens, pad_token_id=0, assistant_model=draft if k else None,
        )  # fmt: skip
        return out[0, len(ids) :].tolist()

    answer({"torch": torch.__version__, "transformers": transformers.__version__,
            "threads": torch.get_num_threads(), "python": sys.version.split()[0]})  # fmt: skip
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            begin = time.perf_counter()
            outputs = [
                generate(ids, request["k"], request["max_new_tokens"])
                for ids in request["prompts"]
            ]
            answer({"seconds": time.perf_counter() - begin, "tokens": outputs})


if __name__ == "__main__":
    main()
