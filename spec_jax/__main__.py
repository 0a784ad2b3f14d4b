"""The command line: ``python -m spec_jax generate | certify | inspect``."""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spec_jax.config.sampler import options
from spec_jax.engine.request import ambiguous_limit
from spec_jax.errors import ConfigError, SpecJaxError, did_you_mean
from spec_jax.version import __version__

if TYPE_CHECKING:
    from spec_jax.engine.stream import Stream


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; each sets ``run``."""
    parser = argparse.ArgumentParser(
        "python -m spec_jax",
        description="Speculative decoding in JAX. Whole comparisons: python -m experiments.decode.",
    )
    parser.add_argument("--version", action="version", version=f"spec_jax {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_generate(commands)
    _add_certify(commands)
    _add_inspect(commands)
    return parser


def _add_generate(commands) -> None:
    command = commands.add_parser(
        "generate",
        help="continue a prompt; the text streams to stdout, a summary to stderr",
        description="Continues a prompt. The text streams to stdout, a summary to stderr.",
        epilog='example: %(prog)s zoo/target "def binary_search(" --draft zoo/eagle3',
    )
    add = command.add_argument
    add("target", help="a zoo name, a directory or a hub id, such as zoo/target")
    add("prompt", help="a text, or - for stdin")
    add(
        "--draft",
        metavar="NAME",
        help="a smaller model or a head, by name or directory; or ngram, suffix or self:N; "
        "default: none, plain decoding",
    )
    add("--drafter", metavar="MODULE:MAKE", help="a drafter of your own, in place of --draft")
    add(
        "--rule",
        metavar="NAME",
        help="a rule's name, or MODULE:NAME of your own; default: greedy at temperature 0, else "
        "block for block drafters' chains, residual for other sampled drafts and match for others",
    )
    add(
        "--k",
        "--num-speculative-tokens",
        type=int,
        default=4,
        metavar="K",
        help="drafted tokens a round; default: %(default)s",
    )
    limit = command.add_mutually_exclusive_group()
    limit.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="maximum output tokens; default: 128"
    )
    limit.add_argument(
        "--max-length", type=int, metavar="N", help="maximum tokens of prompt and output together"
    )
    limit.add_argument("--max-tokens", help=argparse.SUPPRESS)  # refused, with both choices
    for name, field in options().items():
        add(
            f"--{name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            metavar="N",
            help=f"{field.metadata['help']}; default: %(default)s",
        )
    add(
        "--dtype",
        default="float32",
        help="of the weights: float32, bfloat16 or float16; default: %(default)s",
    )
    add("--mesh", help="devices to run on together, such as data:2,tensor:4; default: one")
    add("--logprobs", action="store_true", help="print the log-probability of each token to stderr")
    add(
        "--chat",
        action="store_true",
        help="the prompt is a user's message, put into the target's chat template",
    )
    command.set_defaults(run=generate, command=command)


def _add_certify(commands) -> None:
    command = commands.add_parser(
        "certify",
        help="prove that a rule and a drafter leave the target's distribution as it is",
        description="Proves by enumeration that a rule, with a drafter, emits exactly the target's "
        "distribution, and lists what it did not prove. With --target, checks a model instead.",
    )
    add = command.add_argument
    add(
        "--target",
        metavar="NAME",
        help="a model to check, without rule and drafter: a path, a zoo name, a hub id, or "
        "MODULE:MAKE of your own",
    )
    add(
        "--rule",
        metavar="NAME",
        help="a rule's name, or MODULE:NAME of your own; default: the "
        "usual rule of such drafts, residual",
    )
    add(
        "--drafter",
        metavar="MODULE:MAKE",
        help="a drafter of your own: a Drafter, or a function make(target); default: toy drafters",
    )
    add("--seed", type=int, default=0, help="of the toy models; default: %(default)s")
    add(
        "--trials",
        type=int,
        default=4000,
        help="texts that the loop decodes for each setting; default: %(default)s",
    )
    add(
        "--has-memory",
        action="store_true",
        help="the drafter's state depends on more than the "
        "text: do not compare it with the state after a prefill",
    )
    command.set_defaults(run=certify, command=command)


def _add_inspect(commands) -> None:
    command = commands.add_parser(
        "inspect",
        help="say what a checkpoint is, without reading its weights",
        description="Says what a checkpoint is, from its config and the headers of its weights.",
    )
    command.add_argument("directory", help="a directory, a zoo name or a hub id")
    command.set_defaults(run=inspect, command=command)


def generate(args: argparse.Namespace) -> int:
    """Streams a continuation to stdout; prints one line of statistics to stderr."""
    import spec_jax
    from spec_jax.config import METHODS
    from spec_jax.config.checks import check, is_integer

    if args.max_tokens is not None:
        raise ConfigError(ambiguous_limit("--max-tokens", "--max-new-tokens", "--max-length"))
    if args.draft or args.drafter:
        flag = "--draft" if args.draft else "--drafter"
        expected = f"an integer of 1 or more (for plain decoding, leave out {flag})"
        check(is_integer(args.k, 1), "--k", args.k, expected)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    spec_jax.enable_compilation_cache()
    target = spec_jax.load_model(args.target, args.dtype, mesh=args.mesh)
    draft = None
    config = None
    if args.drafter:
        if args.draft:
            raise ConfigError("--draft and --drafter are both given; expected one")
        config = spec_jax.SpeculativeConfig(num_speculative_tokens=args.k)
    elif METHODS.get(args.draft):  # it copies tokens, and so needs no draft
        config = spec_jax.SpeculativeConfig(args.draft, args.k)
    elif args.draft:
        draft = spec_jax.load_draft(args.draft, target, args.dtype, mesh=args.mesh)
        config = spec_jax.SpeculativeConfig(draft.method, args.k)
    decoder = spec_jax.SpeculativeDecoder(
        target,
        draft,
        config,
        drafter=args.drafter,
        rule=args.rule,
        target_sampler=spec_jax.SamplerConfig(**{name: getattr(args, name) for name in options()}),
    )
    call = {"messages": [{"role": "user", "content": prompt}]} if args.chat else {"prompts": prompt}
    limits = {"max_new_tokens": args.max_new_tokens, "max_length": args.max_length}
    begin_s = time.monotonic()
    with decoder.stream(**call, **limits, logprobs=args.logprobs) as stream:
        if sys.stdout.isatty():
            _show_live(prompt + "\n" * args.chat, stream)
        else:
            for piece in stream:
                print(piece, end="", flush=True)
    print(flush=True)
    stats = decoder.stats
    row = stream.result
    if row.logprobs is not None:
        pieces = row.trace.pieces(row.tokens)
        print(f"{'raw':>9} {'processed':>9}  token (log-probabilities in nats)", file=sys.stderr)
        for piece, raw, processed in zip(pieces, *row.logprobs):
            print(f"{raw:9.4f} {processed:9.4f}  {piece!r}", file=sys.stderr)
    drafts = ""
    if stats.drafted:
        drafts = (
            f"; {stats.tau:.2f} tokens per target pass, {stats.acceptance_rate:.0%} of drafts "
            f"accepted (rule: {decoder.config.rejection_sampling_strategy})"
        )
    if stats.undrafted_rounds:
        drafts += (
            f"; {stats.undrafted_rounds} target passes without drafts, past the draft's maximum "
            f"length of {decoder.system().drafter.max_length}"
        )
    print(
        f"{stats.emitted} tokens in {time.monotonic() - begin_s:.1f} s, of which "
        f"{stats.compile_s:.1f} s to compile; finish reason: {row.finish_reason}{drafts}",
        file=sys.stderr,
    )
    return 0


def _show_live(prompt: str, stream: Stream) -> None:
    """Shows a prompt, dimmed, and its continuation, with accepted and corrected tokens coloured."""
    from spec_jax.show.terminal import DIM, STYLES, Terminal

    has_colors = not os.getenv("NO_COLOR") and os.getenv("TERM") != "dumb"
    send = functools.partial(print, end="", flush=True)
    terminal = Terminal(send, shutil.get_terminal_size().columns, has_colors=has_colors)
    pieces = stream.with_origins()
    first = list(itertools.islice(pieces, 2))  # what is said of compilation precedes the text
    terminal.write(prompt, DIM)
    try:
        for piece, kind in itertools.chain(first, pieces):
            terminal.write(piece, STYLES.get(kind, ""))
    finally:
        terminal.flush()
    for kind, style in STYLES.items() if has_colors else ():
        terminal.write(f"\n{kind}", style)
    terminal.flush()


def certify(args: argparse.Namespace) -> int:
    """Prints a certificate; returns 1 if there is none."""
    testing = importlib.import_module("spec_jax.testing.certificate.certify")
    try:
        print(
            testing.certify(
                args.rule,
                args.drafter,
                target=args.target,
                trials=args.trials,
                seed=args.seed,
                has_memory=args.has_memory,
            )
        )
    except testing.CertificateError as error:
        print(getattr(error, "certificate", None) or error)
        return 1
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Prints what a checkpoint is."""
    print(importlib.import_module("spec_jax.inspection").inspect(args.directory))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    Args:
      argv: the arguments; by default those of the process.

    Returns:
      0, or 1 for a failed certificate, 2 for bad input, 130 if interrupted, and 141 if the reader
      of stdout has gone, as in ``| head``.
    """
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command = getattr(args, "command", parser)
        known = [flag for action in command._actions for flag in action.option_strings]
        flag = unknown[0].partition("=")[0]
        hint = did_you_mean(flag, known) if flag.startswith("-") else ""
        command.error(f"unexpected argument {flag}{hint}")
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    logging.getLogger("jax").setLevel(logging.ERROR)  # it names every back end that is missing
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141
    except SpecJaxError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
