"""The process of the benchmark's part "peers" that decodes with transformers on torch.

It runs in its own interpreter, which has torch and transformers and needs no jax, see
``worker_lines``. Requests and answers:

    {"target": DIR, "draft": DIR or "", "dtype": NAME, "threads": N}      -> versions
    {"method": NAME, "k": K, "prompts": IDS, "max_new_tokens": N, "ngram_max": N,
     "is_counted": BOOL}                                                   -> seconds, tokens, tau

The methods are "plain", "assisted" (assisted generation) and "lookup" (prompt lookup). K is the
number of tokens that are drafted a round, at all times; null leaves that to transformers' own
defaults, which stop drafting where the assistant is unsure. tau is the mean number of tokens of a
target pass, where it is counted.
"""

from __future__ import annotations

import copy
import sys
import time

from experiments.benchmarks.worker_lines import serve


def load(setup: dict):
    """Returns the versions, and what answers requests."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(setup["threads"])

    def read(directory):
        return transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, setup["dtype"])
        ).eval()

    target = read(setup["target"])
    draft = read(setup["draft"]) if setup["draft"] else None
    own_defaults = draft and draft.generation_config
    passes = 0

    def count(*_) -> None:
        nonlocal passes
        passes += 1

    def options(method: str, k: int | None, ngram_max: int) -> dict:
        if method == "assisted":
            draft.generation_config = copy.deepcopy(own_defaults)
            if k is not None:
                draft.generation_config.num_assistant_tokens = k
                draft.generation_config.num_assistant_tokens_schedule = "constant"
                draft.generation_config.assistant_confidence_threshold = 0.0
            return {"assistant_model": draft}
        if method == "lookup":
            return {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": ngram_max}
        if method == "plain":
            return {}
        raise ValueError(f"method is {method!r}; expected plain, assisted or lookup")

    def generate(request: dict, ids: list[int]) -> list[int]:
        tokens = torch.tensor([ids])
        out = target.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            pad_token_id=0,
            max_new_tokens=request["max_new_tokens"],
            **options(request["method"], request["k"], request["ngram_max"]),
        )
        return out[0, len(ids) :].tolist()

    def answer(request: dict) -> dict:
        nonlocal passes
        passes = 0
        hook = target.register_forward_pre_hook(count) if request["is_counted"] else None
        begin = time.perf_counter()
        with torch.inference_mode():
            outputs = [generate(request, ids) for ids in request["prompts"]]
        seconds = time.perf_counter() - begin
        if hook is not None:
            hook.remove()
        tau = sum(map(len, outputs)) / passes if passes else None
        return {"seconds": seconds, "tokens": outputs, "tau": tau}

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
    }, answer


if __name__ == "__main__":
    serve(load)
