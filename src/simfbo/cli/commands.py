"""What the commands do, once their arguments are checked."""

import argparse
import importlib
import itertools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from simfbo import checks, datasets
from simfbo.algorithms._curvature import EXCHANGES
from simfbo.config.build import build_algorithm, build_federation, run_config
from simfbo.config.build_task import build_task
from simfbo.config.run import RunConfig, checked
from simfbo.config.tasks import TABLES, DealtConfig, FairConfig, HyperRepresentationConfig
from simfbo.core.federation import Engine, Traffic
from simfbo.diagnostics import work_warning
from simfbo.engines.compile_cache import keep_compilations
from simfbo.engines.counting import cost
from simfbo.errors import UserError
from simfbo.runs import checkpoint, report
from simfbo.runs.history import History
from simfbo.runs.variables import save_variables
from simfbo.tasks import Task, baselines

OUT = Console(highlight=False, soft_wrap=True)


def train(config: RunConfig | None, options: argparse.Namespace) -> int:
    """Run a configuration, or go on with a run; write and print what came out."""
    keep_compilations()
    if config is None:
        begun = begun_run(options.resume)
        status = (begun.end or {}).get("status")
        if status == "diverged" or (status == "finished" and _is_complete(options.resume)):
            OUT.print(f"{options.resume} has {status}: nothing is left to do.")
            return _exit_code(begun)
        config = checked(begun.header.get("config") or {}, {})
    if options.or_digits:
        config = _or_digits(config, options.data_dir)
    task = build_task(config, options.data_dir)
    _warn_of_unequal_work(config, build_federation(config, task.data))
    directory = options.resume or options.output
    directory = directory or fresh("", config, config.algorithm.name, f"seed{config.seed}")
    history = _watch(config, task, directory, options)
    save_variables(directory / "variables.npz", history.state.x, history.state.y)
    if history.records:
        report.save([history], directory)
    text = report.summary(history)
    if _wants_baselines(history, task, options):
        text += "\n" + _beside(config, task, history, directory, options.quiet)
    (directory / "summary.txt").write_text(text + "\n", encoding="utf-8")
    OUT.print(f"{text}\nFigure, page, history and variables are in {directory}", markup=False)
    return _exit_code(history, directory)


def _wants_baselines(history: History, task: Task, options: argparse.Namespace) -> bool:
    """Return whether a run is to be put beside what one would do without it."""
    finished = (history.end or {}).get("status") == "finished"
    return finished and bool(task.baselines) and not options.no_baselines


def _beside(config: RunConfig, task: Task, history: History, directory: Path, quiet: bool) -> str:
    """Return the table of a run and its baselines, after running those; write it down too."""
    last = history.records[-1]
    with progress_bar(quiet) as progress:
        bar = progress.add_task("baselines", total=len(task.baselines))

        def on_baseline(name: str) -> None:
            progress.update(bar, advance=1, description=f"baseline: {name}")

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


def show_cost(config: RunConfig, data_dir: Path | None) -> int:
    """Print the ledger of one iteration."""
    task = build_task(config, data_dir)
    algorithm = build_algorithm(config.algorithm, task.problem, config.rounds)
    ledger = cost(algorithm, build_federation(config, task.data), task.x0, task.y0)
    table = Table(title=f"One iteration of {algorithm.name} on {config.task.name}")
    for name in ("work", "rounds", "floats down", "floats up", "down", "up"):
        table.add_column(name, justify="left" if name == "work" else "right")
    for name, traffic in [*ledger.by_work.items(), ("in all", ledger.total)]:
        table.add_row(name, *_cells(traffic))
    OUT.print(table)
    if config.steps == "auto":
        OUT.print(f"Automatic steps: before the first, {EXCHANGES} exchanges or more to find them.")
    if varies := algorithm.biases.get("ledger is cost"):
        OUT.print(f"This is one draw of an iteration. {varies}")
    return 0


def check(name: str, single_loop: bool) -> int:
    """Try the laws on the factory at MODULE:FACTORY; return 1 if one is broken."""
    factory = checks.BUILT_IN.get(name) or _import(name)
    broken = 0
    laws = checks.LAWS + (checks.SINGLE_LOOP_LAWS if single_loop else ())
    for law in laws:
        try:
            finding = checks.examine(factory, law)
        except Exception as error:
            broken += 1
            OUT.print(f"FAILED  {law.name}: {type(error).__name__}: {error}", markup=False)
            continue
        broken += not finding.passed
        OUT.print(
            f"{'ok    ' if finding.passed else 'BROKEN'}  {checks.describe(finding)}", markup=False
        )
    OUT.print(f"{len(laws) - broken} of {len(laws)} laws hold or are broken as declared.")
    return 1 if broken else 0


def show_data(name: str | None, data_dir: Path | None) -> int:
    """List the data sets, or fetch one."""
    if name in datasets.TABLES:
        table = datasets.load_table(name, data_dir)
        rows, columns = table.features.shape
        held = "no clients" if table.clients is None else f"{table.clients.max() + 1} clients"
        OUT.print(f"{name}: {rows:,} rows of {columns} features, {held}.")
        return 0
    if name is not None:
        images = datasets.load(name, data_dir)
        train_shape, test_count = images.train_images.shape, len(images.test_labels)
        size = " x ".join(map(str, train_shape[1:]))
        OUT.print(f"{name}: {train_shape[0]:,} training and {test_count:,} test images of {size}.")
        return 0
    table = Table()
    for column in ("data set", "here", "where", "licence", "source"):
        table.add_column(column)
    for row in datasets.status(data_dir):
        ready = "yes" if row.ready else f"no: simfbo data {row.name}"
        table.add_row(row.name, ready, str(row.where), row.licence, row.package)
    OUT.print(table)
    return 0


def _or_digits(config: RunConfig, data_dir: Path | None) -> RunConfig:
    """Return the configuration, on digits where its data set cannot be had."""
    task = config.task
    if not isinstance(task, DealtConfig | FairConfig) or task.dataset in ("digits", *TABLES):
        return config
    try:
        datasets.load(task.dataset, data_dir)
        return config
    except UserError:
        sentence = f"{task.dataset} could not be fetched (no network?), so this runs on digits."
        print(f"simfbo: {sentence}", file=sys.stderr)
    smaller = {"dataset": "digits", "clients": 20}
    if isinstance(task, HyperRepresentationConfig):
        smaller["model"] = "mlp"
    small = task.model_copy(update=smaller)
    return config.model_copy(update={"task": small})


def _watch(config: RunConfig, task: Task, directory: Path, options: argparse.Namespace) -> History:
    """Return the history of the run, shown as it goes."""
    quiet = options.quiet
    with progress_bar(quiet) as progress:
        bar = progress.add_task(config.algorithm.name, total=config.rounds)

        def on_round(t: int, record: dict[str, Any] | None) -> None:
            progress.update(bar, completed=t)
            if record is not None and not quiet:
                progress.update(bar, description=f"{task.metric} {record[task.metric]:.4g}")
                progress.console.print(_line(record, task.metric))

        resume = options.resume is not None
        return run_config(config, task, directory, on_round, resume, options.checkpoint_seconds)


def progress_bar(quiet: bool = False) -> Progress:
    """Return the bar that long work shows."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
    return Progress(*columns, console=OUT, transient=True, disable=quiet)


def _line(record: dict[str, Any], metric: str) -> str:
    """Return one evaluation as a line of text."""
    sent = report.size(record["bytes_up"] + record["bytes_down"])
    return (
        f"round {record['round']:>6,}   {metric.replace('_', ' ')} {record[metric]:<9.4g} "
        f"sent {sent:>8}   {record['seconds']:7.2f} s"
    )


def _cells(traffic: Traffic) -> list[str]:
    floats = f"{traffic.floats_down:,}", f"{traffic.floats_up:,}"
    sizes = report.size(traffic.bytes_down), report.size(traffic.bytes_up)
    return [str(traffic.rounds), *floats, *sizes]


def _exit_code(history: History, directory: Path | None = None) -> int:
    """Return 0 for a finished run, 130 for an interrupted one, 1 for one that failed."""
    end = history.end or {}
    if end.get("status") in ("diverged", "starved"):
        print(f"simfbo: {end['status']} in round {end['round']}: {end['reason']}.", file=sys.stderr)
    if end.get("status") == "diverged" and directory is not None:
        table = "steps" if "steps" in history.header["config"]["algorithm"] else "server"
        print(f"simfbo: try smaller steps, as --set algorithm.{table}.x=0.01, or simfbo tune.",
              file=sys.stderr)  # fmt: skip
    if end.get("status") in ("interrupted", "starved") and not _is_rehearsed(history):
        print(f"simfbo: to go on: simfbo run --resume {directory}", file=sys.stderr)
    return {"finished": 0, "interrupted": 130}.get(str(end.get("status")), 1)


def _is_rehearsed(history: History) -> bool:
    """Return whether replies were missing because the settings say so, and will be again."""
    starved = (history.end or {}).get("status") == "starved"
    return starved and history.header["config"]["gate"]["drop_out"] > 0


def begun_run(directory: Path) -> History:
    """Return the history of a run that was begun; a checkpoint's word on the header is better."""
    begun = History.load(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damage the run itself will tell
        header = checkpoint.newest(directory, lambda found: found.manifest["header"])
    begun.header = begun.header if header is None else header
    return begun


def _is_complete(directory: Path) -> bool:
    """Return whether everything that follows a run was written too."""
    return (directory / "summary.txt").is_file()


def _warn_of_unequal_work(config: RunConfig, federation: Engine) -> None:
    """Print the warning where fixed, unequal local work meets a method that adds it up."""
    redrawn = config.local_work.every_round
    names = {"simfbo": "SimFBO", "fedbio": "FedBiO", "memfbo": "MemFBO"}
    if config.algorithm.name not in names or redrawn:
        return
    norms = federation.local_work(jax.random.key(config.seed), federation.n).norm
    if warning := work_warning(federation.data.p, norms, names[config.algorithm.name]):
        print(f"simfbo: {warning}.", file=sys.stderr)


def fresh(prefix: str, config: RunConfig, *suffixes: str) -> Path:
    """Return a folder under runs/ that does not exist yet, named by what is run."""
    data = [getattr(config.task, "dataset", None), getattr(config.task, "partition", None)]
    base = Path("runs") / "-".join(filter(None, [prefix, config.task.name, *data, *suffixes]))
    others = (base.with_name(f"{base.name}-{i}") for i in itertools.count(2))
    return next(path for path in itertools.chain([base], others) if not path.exists())


def _import(name: str) -> Any:
    """Return the object at MODULE:NAME."""
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise UserError(f"'{name}' is no factory: write MODULE:FACTORY, as my_module:mine.")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"'{name}' cannot be imported: {error}.") from None
