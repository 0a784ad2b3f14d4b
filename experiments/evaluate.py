"""Measures drafts by real speculative decoding: tau and acceptance by position, with intervals.

    python -m experiments.evaluate
    python -m experiments.evaluate --config.target=PATH --config.drafts=HEAD1,HEAD2
    python -m experiments.evaluate --config.drafter=docs.examples.my_drafter:make

Every draft decodes the same prompts in chains of K. The intervals are 95 % confidence intervals
from resampling the prompts, since rounds of one text are not independent; differences to the
first draft are taken prompt by prompt. In greedy decoding, the unrolling that trains a head is
compared with its real drafting at the same round starts ("teacher-forced"): each tests the
other. A drafter of your own is one more draft, which has real acceptance only; a rule of your own
accepts in place of the default one, of every draft.
A run leaves config.json, environment.json, report.json, report.md and acceptance.png.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import evaluate_zoo
from experiments.common import cli, evaluation, plots, report
from experiments.common.own import Own
from experiments.common.prompts import fit, load_prompts
from spec_jax.errors import ConfigError
from spec_jax.loading import load_draft, load_model
from spec_jax.progress import Progress


def validate(config: ConfigDict) -> None:
    """Raises ConfigError if a key is unknown or a value is out of range."""
    cli.check_keys(config, evaluate_zoo.get_config())
    cli.require_positive(config, "num_prompts prompt_tokens num_draft batch")
    cli.require(config.max_new_tokens >= 2, config, "max_new_tokens", "2 or more")
    has_draft = bool(config.drafts) or bool(config.drafter)
    cli.require(has_draft, config, "drafts", "names or directories, with commas")


def evaluate(config: ConfigDict, workdir: str | None = None) -> dict:
    """Runs the experiment and returns its report.

    Args:
      config: See ``configs/evaluate_zoo.py``.
      workdir: The run's folder; by default runs/evaluate/TIME.

    Raises:
      SpecJaxError: A config, a model or a prompt that cannot be used.
    """
    validate(config)
    where = cli.MeshOptions.of(config)
    target = load_model(config.target, config.dtype, mesh=where.mesh)
    names = [name.strip() for name in config.drafts.split(",")]
    lies = {"mesh": where.mesh, "rules": where.draft_rules}
    drafts = {name: load_draft(name, target, config.dtype, **lies) for name in names if name}
    own = Own.of(config, target, drafts)
    if own.tree:
        raise ConfigError(f"drafter {own.drafter.name} drafts a tree; expected chains, see decode")
    if config.prompts:
        found = load_prompts(config.prompts, config.num_prompts, config.seed)
        models = [target, *drafts.values(), *own.limits]
        prompts, num_cut = fit(found, models, config.max_new_tokens, config.prompt_tokens)
    else:
        num_cut, prompts = 0, evaluation.held_out_pieces(
            target, config.num_prompts, config.prompt_tokens, config.seed
        )
    folder = cli.open_workdir("evaluate", workdir)
    rep = report.begin("evaluate", folder, config.to_dict())
    rows, counts = [], []
    measured = drafts | ({} if own.drafter is None else {own.drafter.name: None})
    with Progress(len(measured) + config.has_costs, "evaluating") as bar:
        for name, draft in measured.items():
            bar.now(name)
            row, count = evaluation.measure(name, draft, target, prompts, config, where, own)
            if counts:
                row["difference"] = evaluation.differences(count, counts[0])
            rows, counts = [*rows, row], [*counts, count]
            bar.step(f"{name}: tau {row['tau']}")
        if config.has_costs:
            bar.now("passes")
            found = evaluation.pass_costs(target, drafts, config)
            rows = [row | {"cost": found.get(row["draft"])} for row in rows]
            bar.step("passes")
    rep |= {
        "rows": rows, "num_cut": num_cut,
        "own": own.facts(), "mesh": where.facts(target, [*drafts.values()], config.batch),
    }  # fmt: skip
    text = evaluation.markdown(rep)
    report.finish(folder, rep, text)
    plots.plot_intervals(folder / "acceptance.png", rows)
    print(f"\n{text}\n{folder / 'report.md'} written")
    return rep


def main() -> None:
    cli.enable_compilation_cache()
    evaluate(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        evaluate_zoo, "Folder of this run, a new one; by default runs/evaluate/TIME."
    )
    cli.run(main)
