"""A worker of the part "peers" that decodes nothing: ``python fake_peer.py SECONDS [FAULT]``.

Every run takes SECONDS times what is in ``COSTS``, by its own account.

FAULT: "no_torch" ends it at once, "no_lookup" refuses one method, "dies" ends it at its second
request of a run with drafts in float32, where "late" refuses that; "banner" prints a line first.
"""

import os
import sys

from experiments.benchmarks.worker_lines import serve

COSTS = {"plain": 4.0, "ngram": 3.0, "lookup": 3.0, "standalone": 2.0, "assisted": 2.0, "head": 1.0}


def tokens_of(prompts, num_tokens):
    """The tokens that every method returns."""
    return [[sum(ids) % 7] * num_tokens for ids in prompts]


def load(setup):
    scale, fault = float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    if fault == "no_torch":
        raise ModuleNotFoundError("No module named 'torch'")
    asked = []

    def answer(request):
        print("what a library prints is no answer")
        method = request["method"]
        if fault == "no_lookup" and method == "lookup":
            raise ValueError("no such method")
        asked.append(method)
        if fault == "dies" and setup["dtype"] == "float32" and asked.count("assisted") > 3:
            print("Killed", file=sys.stderr, flush=True)
            os._exit(137)
        if fault == "late" and setup["dtype"] == "float32" and asked.count("assisted") > 3:
            raise MemoryError("out of memory")
        tokens = tokens_of(request["prompts"], request["max_new_tokens"])
        if method == "assisted" and request["k"] is None:
            tokens[0] = tokens[0][:-1] + [99]
        return {"seconds": scale * COSTS[method], "tokens": tokens, "tau": 1.5}

    versions = dict.fromkeys(("transformers", "torch", "python", "threads"), "0")
    return versions, answer


if __name__ == "__main__":
    if "banner" in sys.argv:
        print("Welcome to a wrapper of python", flush=True)
    serve(load)
