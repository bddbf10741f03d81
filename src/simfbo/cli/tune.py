"""`simfbo tune`: step sizes within a budget."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simfbo.cli import arguments
from simfbo.cli.console import (
    OUT,
    fetch_first,
    new_folder,
    print_table,
    progress_bar,
    resumable,
    workers,
)
from simfbo.config.files import as_toml
from simfbo.config.run import RunConfig, checked
from simfbo.runs.files import Json
from simfbo.runs.lines import flattened
from simfbo.runs.trackers.tracking import Tracking, used_before

if TYPE_CHECKING:
    from simfbo.studies.tuning import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tune`."""
    arguments.add_settings(parser)
    add = parser.add_argument
    add(
        "--budget",
        type=arguments.whole,
        default=20_000,
        metavar="B",
        help="exchanges for all trials together (default 20,000)",
    )
    add(
        "--budget-bytes",
        type=arguments.encoded_bytes,
        metavar="B",
        help="bytes for all trials together, such as 500MB, in place of exchanges",
    )
    add(
        "--trials",
        type=arguments.whole,
        default=27,
        metavar="N",
        help="number of trials in the first stage (default 27)",
    )
    add(
        "--range",
        action="append",
        default=[],
        metavar="KEY=LOW..HIGH",
        help="setting to tune; repeatable (default: the step sizes)",
    )
    add("--metric", help="criterion (default: the task's own)")
    arguments.add_many_runs(parser)


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    run_options: Json = {
        "jobs": options.jobs,
        "quiet": options.quiet,
        "data_dir": options.data_dir,
    }
    if options.resume:
        arguments.require_alone(options, add_arguments)
        return resume(options.resume, options.track or used_before(options.resume), **run_options)
    config = arguments.configuration(options)
    space = dict(map(arguments.span, options.range)) or None
    return tune(
        config,
        space,
        options.budget,
        options.trials,
        options.metric,
        options.output,
        budget_bytes=options.budget_bytes,
        track=config.track,
        **run_options,
    )


def tune(
    config: RunConfig,
    space: Mapping[str, tuple[float, float]] | None,
    budget: int,
    trials: int,
    metric: str | None,
    output: Path | None,
    *,
    jobs: int | None,
    quiet: bool,
    data_dir: Path | None,
    track: Sequence[str],
    budget_bytes: int | None = None,
) -> int:
    """Search step sizes; print the best as TOML."""
    from simfbo.studies import folder, tuning

    if space is not None:
        tuning.candidates(config, space, trials)  # rejects a wrong range before creating a folder
    directory = output or new_folder("tune", config, config.algorithm.name)
    with resumable(directory / folder.STUDY, "tune"), Tracking(track, directory) as tracking:
        folder.save_search(directory, config, space, budget, trials, metric, budget_bytes)
        settings = dict(flattened(config.model_dump(mode="json"))) | {"budget": budget}
        tracking.begin(directory.resolve().name, settings, {"study": "tune"})
        OUT.print(f"{trials} trials into {directory}", markup=False)
        fetch_first([config], data_dir, quiet)
        with progress_bar(quiet) as progress:
            bar = progress.add_task("", total=None)

            def show(stage: int, stages: int, done: int, total: int) -> None:
                text = f"stage {stage + 1} of {stages}, iterations"
                progress.update(bar, description=text, completed=done, total=total)

            tuned = tuning.tune(
                config,
                directory,
                budget=budget,
                budget_bytes=budget_bytes,
                trials=trials,
                space=space,
                metric=metric,
                workers=workers(jobs),
                data_dir=data_dir,
                on_progress=show,
                tracking=tracking,
            )
        print_table(_rows(tuned.results), f"Trials, judged by {tuned.metric.replace('_', ' ')}")
        OUT.print(f"# The best one, also in {directory / 'best.toml'}\n", markup=False)
        OUT.print(as_toml(tuned.best), markup=False)
        tracking.artefact(directory / "best.toml", directory / "trials.jsonl")
        tracking.finish("finished")
    return 0


def resume(directory: Path, track: Sequence[str], **run_options: Any) -> int:
    """Continue a search for step sizes."""
    from simfbo.studies import folder

    study = folder.load(directory, "tune")
    space = study["space"] and {key: tuple(span) for key, span in study["space"].items()}
    return tune(
        checked(study["config"], {}),
        space,
        study["budget"],
        study["trials"],
        study["metric"],
        directory,
        track=track,
        budget_bytes=study["budget_bytes"],
        **run_options,
    )


def _rows(results: Sequence["Result"]) -> list[dict[str, str]]:
    """Return the results of all trials as a table."""
    return [
        {
            "stage": str(result.stage + 1),
            "trial": str(result.trial),
            **{k.removeprefix("algorithm."): f"{v:g}" for k, v in result.settings.items()},
            "iterations": f"{result.iterations:,}",
            "result": result.status if result.score is None else f"{result.score:.4g}",
        }
        for result in results
    ]
