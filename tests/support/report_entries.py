"""Entries of a report and lines of answers.jsonl, made by hand."""

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\"'&<!--",
    "{{ 7*7 }}",
    "\u202egnp.exe",
    "日本語 🎉",
    "",
    "\ud83d",
    "\u2028",
    "x" * 50_000,
    "\x00\x07",
)


def result(method="eagle-3", k=3, temperature=0.0, **changes):
    """An entry of a report's results; None removes a key."""
    entry = dict(method=method, k=k, temperature=temperature, rule="greedy", tree=None)
    entry |= dict(is_lossless=True, speedup=1.4321, speedup_interval=[1.2111, 1.6543])
    entry |= dict(plain_tokens_per_s=512.0, tokens_per_s=733.0, tau=2.765)
    entry |= dict(acceptance_by_position=[0.8, 0.71, None], predicted_speedup=1.5678)
    entry |= dict(identical_to_plain=True, identical_rows=16, rows=16, differences=[])
    entry |= changes
    return {key: value for key, value in entry.items() if key not in changes or value is not None}


def plain(temperature=0.0, **changes):
    fields = dict(speedup=1.0, tau=1.0, acceptance_by_position=None, speedup_interval=None)
    fields |= dict(predicted_speedup=None, identical_to_plain=True)
    return result("plain", 0, temperature, **fields, **changes)


def answer(question="q1", cell="eagle-3 K=3 T=0", pieces=("def", " f", "(", "x"), **changes):
    """A line of answers.jsonl: the first token, then a round that accepts one draft of two."""
    n = len(pieces)
    turn = dict(prompt="Write f.", prompt_tokens=3, tokens=list(range(n)), pieces=list(pieces))
    turn |= dict(kinds=["first", *(("accepted", "corrected")[i % 2] for i in range(n - 1))])
    turn |= dict(offered=[-1, *((2, -1)[i % 2] for i in range(n - 1))])
    turn |= dict(rejected=[None, *((None, " bad")[i % 2] for i in range(n - 1))])
    turn |= dict(decode_s=[0.012, 0.011, 0.010], finish="length", probs=[0.5] * n)
    turn |= dict(alternatives=[[[pieces[i], 0.5], ["other", 0.25]] for i in range(n)])
    line = dict(cell=cell, method="eagle-3", k=3, tree=None, temperature=0.0, batch=1)
    line |= dict(question=question, category="writing", turns=[turn | changes.pop("turn", {})])
    return line | changes
