"""`simfbo run`: train, and write a history, a figure and a summary."""

import argparse
import itertools
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simfbo.cli import arguments
from simfbo.cli.console import OUT, fetching, new_folder, print_json, progress_bar, resumable
from simfbo.cli.device import use_device
from simfbo.config.catalogue import METHODS
from simfbo.config.fields import TaskSettings
from simfbo.config.run import RunConfig, checked
from simfbo.config.tasks import (
    TABLES,
    FairSettings,
    HyperRepresentationSettings,
    PartitionedSettings,
)
from simfbo.errors import MissingExtra, UserError
from simfbo.runs.files import Json, write_atomic
from simfbo.runs.history import FILE, History
from simfbo.runs.trackers.tracking import Tracking, used_before

if TYPE_CHECKING:
    from simfbo.config.build import Built

_ARTEFACTS = ("figure.png", "figure.svg", "report.html", "card.md", "summary.txt", "variables.npz")
EPILOG = """examples:
  simfbo run hyper-representation                      digits, 20 clients, a few seconds
  simfbo run hyper-representation --dataset mnist --rounds 2000
  simfbo run hyper-representation --dataset mnist --partition shards --algorithm shrofbo --tau 1..10
  simfbo run label-cleaning                            half of the labels are wrong
  simfbo run regularisation --dataset schools          an L2 weight per feature, 160 schools
  simfbo run long-tail --dataset optdigits
  simfbo run fair
  simfbo run quadratic --set task.heterogeneity=3 --set algorithm.local.x=0.02
  simfbo run --config my.toml --seed 3                 flags override the file
  simfbo run my_package.tasks:mine --algorithm my_package.methods:mine

Every setting has a dotted key for --set; the same keys make up the TOML file. They are listed in
docs/reference-configuration.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    arguments.add_settings(parser)
    add = parser.add_argument
    add("--output", type=Path, metavar="DIR", help="folder for the run")
    add_or_digits(parser)
    add("--no-baselines", action="store_true", help="do not train the baselines")
    add(
        "--no-client-metrics",
        action="store_true",
        help="do not ask clients for metrics on their own data",
    )
    add("--quiet", action="store_true", help="print only the summary")
    add(
        "--device", metavar="D", help="cpu, gpu or tpu; cpu:4 divides the clients between 4 devices"
    )
    add(
        "--checkpoint-seconds",
        type=arguments.seconds_of,
        default=5.0,
        metavar="S",
        help="longest time between checkpoints (default 5)",
    )
    arguments.add_track(parser)
    arguments.add_json(parser)
    arguments.add_resume(parser)


def add_or_digits(parser: argparse.ArgumentParser) -> None:
    """Add `--or-digits`."""
    parser.add_argument(
        "--or-digits",
        action="store_true",
        help="if the data set cannot be fetched, use scikit-learn's digits instead",
    )


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    run_options: Json = {
        "data_dir": options.data_dir,
        "baselines": not options.no_baselines,
        "quiet": options.quiet,
        "checkpoint_seconds": options.checkpoint_seconds,
        "as_json": options.json,
    }
    if options.device:
        use_device(options.device)
    if options.resume:
        arguments.require_alone(options, add_arguments)
        return resume(options.resume, options.track, **run_options)
    config = arguments.configuration(options)
    if options.or_digits:
        config = config.model_copy(update={"task": or_digits(config.task, options.data_dir)})
    directory = options.output
    directory = directory or new_folder("", config, config.algorithm.name, f"seed{config.seed}")
    run_options["client_metrics"] = not options.no_client_metrics
    return train(config, directory, track=config.track, **run_options)


def resume(directory: Path, track: list[str] | None, **run_options: Any) -> int:
    """Continue a run unless it has ended; by default with its original trackers."""
    history = _load_history(directory)
    status = (history.end or {}).get("status")
    if status == "diverged" or (status == "finished" and (directory / "summary.txt").is_file()):
        OUT.print(f"{directory} has {status}: nothing left to do.")
        if run_options["as_json"]:
            print_json(_result(history, directory))
        return _exit_code(history)
    config = checked(history.header.get("config") or {}, {})
    run_options["client_metrics"] = "client_metrics" in history.header
    return train(
        config, directory, track=track or used_before(directory), resume=True, **run_options
    )


def train(
    config: RunConfig,
    directory: Path,
    *,
    data_dir: Path | None,
    baselines: bool,
    quiet: bool,
    checkpoint_seconds: float,
    as_json: bool,
    client_metrics: bool,
    track: Sequence[str] = (),
    resume: bool = False,
) -> int:
    """Run a configuration; write and print the result."""
    from simfbo.config.build import build
    from simfbo.config.build_task import build_task
    from simfbo.runs.checkpoint import save_variables
    from simfbo.runs.files import keep_compilations

    keep_compilations()
    with fetching(quiet):
        task = build_task(config, data_dir)
    built = build(config, task)
    _warn_of_unequal_work(built)
    _print_epsilon(built)
    with resumable(directory / FILE, "run"), Tracking(track, directory) as tracking:
        run_options: Json = {
            "resume": resume,
            "checkpoint_seconds": checkpoint_seconds,
            "track": tracking,
            "client_metrics": client_metrics,
        }
        history = _run_with_display(built, directory, quiet, run_options)
        save_variables(directory / "variables.npz", history.state.x, history.state.y)
        files = "History" if not _drawn(history, directory) else "Figure, page, history"
        text = history.summary()
        finished = (history.end or {}).get("status") == "finished"
        if finished and baselines and built.task.baselines:
            text += "\n" + _baselines(built, history, directory, quiet)
        write_atomic(directory / "card.md", history.card())
        write_atomic(directory / "summary.txt", text + "\n")
        OUT.print(f"{text}\n{files} and variables are in {directory}", markup=False)
        tracking.artefact(*(directory / name for name in _ARTEFACTS))
        if as_json:
            print_json(_result(history, directory))
        return _exit_code(history, directory)


def _result(history: History, directory: Path) -> Json:
    """Return the outcome of a run for programs."""
    from simfbo.tasks import baselines

    scores = history.client_scores
    return {
        "directory": directory,
        **(history.end or {"status": None}),
        **{key: history.header[key] for key in ("algorithm", "seed", "rounds", "config")},
        "last": history.records[-1] if history.records else None,
        "clients": None if scores is None else scores.as_json(),
        "verdict": history.verdict,
        "refused": len(history.refusals),
        "warnings": history.warnings,
        "baselines": [outcome._asdict() for outcome in baselines.load(directory)],
    }


def _run_with_display(built: "Built", directory: Path, quiet: bool, run_options: Json) -> History:
    """Run with a live display, or a line per evaluation."""
    from simfbo.config.build import about, run_built
    from simfbo.runs.beginnings import with_columns
    from simfbo.runs.progress import shown

    config = built.config
    goals: Any = {name: metric.goal for name, metric in built.task.client_metrics.items()}
    presentation = with_columns(about(built), goals)
    display = shown(not quiet, config.algorithm.name, config.rounds, presentation, OUT)
    with display as on_progress:
        return run_built(built, directory, on_progress, **run_options)


def _drawn(history: History, directory: Path) -> bool:
    """Write figure and page, if there are records and the libraries are installed."""
    from simfbo.runs import report

    try:
        return bool(history.records and report.save([history], directory))
    except MissingExtra as error:
        print(f"simfbo: no figure was drawn. {error}", file=sys.stderr)
        return False


def _baselines(built: "Built", history: History, directory: Path, quiet: bool) -> str:
    """Train and save the task's baselines; return them in a table with the run."""
    from simfbo.config.build import build_federation
    from simfbo.tasks import baselines

    task, config, last = built.task, built.config, history.records[-1]
    with progress_bar(quiet) as progress:
        bar = progress.add_task("baselines", total=len(task.baselines))

        done = itertools.count()

        def on_baseline(name: str) -> None:
            progress.update(bar, completed=next(done), description=f"baseline: {name}")

        outcomes = baselines.compare(
            task,
            lambda data: build_federation(config, data),
            rounds=config.rounds,
            budget=last["bytes_down"] + last["bytes_up"],
            seed=config.seed,
            on_baseline=on_baseline,
        )
    baselines.save(outcomes, directory)
    return baselines.table(outcomes, history.header["algorithm"], last, task.metric)


def or_digits(task: TaskSettings, data_dir: Path | None) -> TaskSettings:
    """Return the settings of a task, with digits if its data set cannot be downloaded."""
    from simfbo import datasets

    if not isinstance(task, PartitionedSettings | FairSettings):
        return task
    if task.dataset in ("digits", *TABLES):
        return task
    try:
        with fetching():
            datasets.load(task.dataset, data_dir)
        return task
    except UserError:
        sentence = f"{task.dataset} could not be fetched (no network?), using digits instead."
        print(f"simfbo: {sentence}", file=sys.stderr)
    smaller: Json = {"dataset": "digits", "clients": 20}
    if isinstance(task, HyperRepresentationSettings):
        smaller["model"] = "mlp"
    return task.model_copy(update=smaller)


def _exit_code(history: History, directory: Path | None = None) -> int:
    """Return 0 for a finished run, 130 for an interrupted one, 1 for a failed one."""
    end = history.end or {}
    status = end.get("status")
    if status in ("diverged", "starved"):
        print(f"simfbo: {status} in iteration {end['round']}: {end['reason']}.", file=sys.stderr)
    if status == "diverged" and directory is not None:
        table = "steps" if "steps" in history.header["config"]["algorithm"] else "server"
        print(
            f"simfbo: try smaller steps, for example --set algorithm.{table}.x=0.01, or "
            "simfbo tune.",
            file=sys.stderr,
        )
    # With `gate.drop_out` the same replies would be missing again.
    starves_again = status == "starved" and history.header["config"]["gate"]["drop_out"] > 0
    if status in ("interrupted", "starved") and not starves_again:
        print(f"simfbo: resume with: simfbo run --resume {directory}", file=sys.stderr)
    return {"finished": 0, "interrupted": 130}.get(str(status), 1)


def _load_history(directory: Path) -> History:
    """Load the history of a run; a checkpoint's copy of the header takes precedence."""
    from simfbo.runs import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns of damage
        history = History.load(directory)
        header = checkpoint.newest(
            directory, lambda checkpoint_file: checkpoint_file.manifest["header"]
        )
    history.header = history.header if header is None else header
    return history


def _print_epsilon(built: "Built") -> None:
    """Print the epsilon of a private run at its end."""
    from simfbo.privacy import spent

    config = built.config
    if config.privacy is not None:
        delta = config.privacy.delta
        epsilon = spent(built.algorithm, built.federation, config.rounds, delta)
        OUT.print(f"Private: epsilon {epsilon:.3g} (delta {delta:g}) at the end.")


def _warn_of_unequal_work(built: "Built") -> None:
    """Warn if a method that adds up local work has fixed, unequal local work."""
    import jax

    from simfbo.diagnostics import work_warning

    config, federation = built.config, built.federation
    method = METHODS.find(config.algorithm.name)
    work = config.local_work
    if not method.adds_up_work or work.every_round or work.rules_every_round:
        return
    norms = federation.local_work(jax.random.key(config.seed), federation.n).norm
    if warning := work_warning(federation.data.p, norms, method.title):
        print(f"simfbo: {warning}.", file=sys.stderr)
