"""Renders chat templates, as a program that another process starts and may end at any time.

A chat template is a program of a stranger. Jinja's sandbox keeps it from everything but the values
that it is given; what it may still use up is time and memory. Memory is bounded here where the
system can do so; time by ``template_process``, which waits for the answer only so long.

The program reads one JSON object a line and answers with one. It is run by its path, so it imports
Jinja and the standard library alone, and starts in a tenth of a second.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import re
import signal
import sys

MARKS = "_marks_of_generation"
MAX_LENGTH = 1 << 24  # characters of a text
MAX_BYTES = 1 << 29  # of this process's memory, where the system can bound it
_TOO_LARGE = {"fault": f"takes more than {MAX_BYTES >> 20} MiB of memory"}
_MAX_BITS = 1 << 20  # of an integer; also the width to which a value may be padded
_WIDTHS = re.compile(r"%(?:\([^)]*\))?[-+ #0]*([0-9]*)(?:\.([0-9]*))?")


def main() -> None:
    """Answers requests until the input ends. The first line says where modules come from."""
    requests = sys.stdin.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one

    def reply(answer: dict) -> None:
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()

    def alarm(seconds: int) -> None:
        """Ends this process after so much time, where the one that waits for it has gone."""
        if hasattr(signal, "alarm"):
            signal.alarm(seconds)

    sys.path[:] = json.loads(requests.readline())["path"]
    try:
        _sandbox()
        _limit_memory()
    except Exception as error:
        return reply({"fault": f"{type(error).__name__}: {error}"})
    reply({})
    for line in iter(requests.readline, b""):
        request = json.loads(line)
        alarm(int(request["seconds"]) + 2)
        answer = answer_of(request)
        alarm(0)
        reply(answer)


def answer_of(request: dict) -> dict:
    """Returns the text of a template, or what is known of it, or what is wrong.

    Args:
      request: has ``source``, ``variables`` (None: the template is not rendered) and ``now``, a
        time in ISO format.
    """
    try:
        template, has_generation, names = compiled(request["source"])
    except MemoryError:
        return _TOO_LARGE
    except Exception as error:  # also of Python, for what Jinja lets through
        line = f"line {error.lineno}: " if getattr(error, "lineno", None) else ""
        return {"unreadable": line + _message(getattr(error, "message", None) or error)}
    if request["variables"] is None:
        return {"has_generation": has_generation, "names": names}
    try:
        show = {"strftime_now": datetime.datetime.fromisoformat(request["now"]).strftime}
        pieces = []
        length = 0
        for piece in template.generate({**show, **request["variables"]}):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_LENGTH:
                return {"refusal": f"it writes more than {MAX_LENGTH} characters"}
        return {"text": "".join(pieces)}
    except MemoryError:
        return _TOO_LARGE
    except Exception as error:  # a template is a program and may fail in any way
        return {"refusal": _message(error)}


def _message(error: Exception | str) -> str:
    return (str(error) or type(error).__name__)[:2000]


# ------------------------------------------------------------------------------------ the limits


def _limit_memory() -> None:
    """Bounds the memory of this process. Linux enforces it; other systems may not."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for kind, limit in (("RLIMIT_AS", MAX_BYTES), ("RLIMIT_CORE", 0)):
        try:
            number = getattr(resource, kind)
            _, hard = resource.getrlimit(number)
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(number, (limit, hard))
        except (AttributeError, OSError, ValueError):  # a system without this limit
            continue


def _check_size(operator: str, left, right) -> None:
    """Refuses products, powers and paddings that no text needs, before they are computed."""
    size = 0
    limit = _MAX_BITS
    has_length = [hasattr(x, "__len__") for x in (left, right)]
    if operator == "%" and isinstance(left, str):
        widths = _WIDTHS.findall(left)
        taken = [right, *right] if isinstance(right, tuple) else [right]
        stars = [str(x) for x in taken if isinstance(x, int) and "*" in left]
        size = max((int(x) for pair in [*widths, stars] for x in pair if x), default=0)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        size = left.bit_length() * max(right, 0)
    elif operator == "*" and isinstance(left, int) and isinstance(right, int):
        size = left.bit_length() + right.bit_length()
    elif operator == "*" and has_length[0] != has_length[1]:
        sequence, count = (left, right) if has_length[0] else (right, left)
        size = len(sequence) * count if isinstance(count, int) else 0
        limit = MAX_LENGTH
    if size > limit:
        raise OverflowError(f"{operator} makes a value of size {size:g}; expected at most {limit}")


# -------------------------------------------------------------------------------- Jinja's sandbox


@functools.lru_cache(maxsize=1)
def _sandbox():
    """Returns Jinja's sandbox with the functions that chat templates expect."""
    import jinja2.ext
    import jinja2.sandbox
    from jinja2 import nodes

    class Generation(jinja2.ext.Extension):
        """``{% generation %} … {% endgeneration %}``; the marks around the text are variables."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        @jinja2.pass_context
        def _marked(self, context, caller) -> str:
            begin, end = context[MARKS]
            return begin + caller() + end

    class Namespace(jinja2.utils.Namespace):
        """Refuses names with a leading underscore, through which a template could reach inside."""

        def __init__(*args, **values):
            self, *rest = args  # not a named argument, as a template may set a name "self"
            jinja2.utils.Namespace.__init__(self)
            for name, value in dict(*rest, **values).items():
                self[name] = value

        def __setitem__(self, name, value):
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")
            super().__setitem__(name, value)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Jinja's sandbox, which also checks what operators ask for."""

        intercepted_binops = frozenset(["*", "**", "%"])

        def call_binop(self, context, operator, left, right):
            _check_size(operator, left, right)
            return super().call_binop(context, operator, left, right)

    def fail(message):
        raise jinja2.exceptions.TemplateError(message)

    sandbox = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {"raise_exception": fail, "dict": _dict, "namespace": Namespace}
    return sandbox


def _dict(*args, **values) -> dict:
    return dict(*args, **values)


_dict.fromkeys = dict.fromkeys


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=32)
def compiled(source: str):
    """Returns the template of a text, whether it has generation blocks, and the names it reads."""
    from jinja2 import meta, nodes

    sandbox = _sandbox()
    tree = sandbox.parse(source)
    has_generation = any(node.name == "_marked" for node in tree.find_all(nodes.ExtensionAttribute))
    names = sorted(meta.find_undeclared_variables(tree))
    return sandbox.from_string(source), has_generation, names


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the caller has gone
        os._exit(0)
