"""Arguments shared by several commands, and parsers of their values."""

import argparse
import math
import re
from pathlib import Path
from typing import Any, get_args

from simfbo.config.catalogue import METHODS, TASKS, TaskRecord, any_of
from simfbo.config.files import parse_override
from simfbo.config.run import PRESETS, RunConfig, load
from simfbo.errors import UserError, brief, plain
from simfbo.runs.files import Json
from simfbo.runs.history import FILE

# Flags with a name of their own, and their settings.
SHORTCUTS = {
    "task": "task.name",
    "dataset": "task.dataset",
    "partition": "task.partition",
    "clients": "task.clients",
    "algorithm": "algorithm.name",
    "cohort": "sampling.size",
    "rounds": "rounds",
    "every": "every",
    "seed": "seed",
    "engine": "engine",
    "steps": "steps",
    "codecs": "codecs.preset",
    "detect_anomalies": "detect_anomalies",
    "preset": "preset",
    "track": "track",
}


def whole(text: str) -> int:
    """Parse a whole number in any notation.

    Example:
        >>> [whole(text) for text in ("1000", "1_000", "1,000", "1e3", "1000.0")]
        [1000, 1000, 1000, 1000, 1000]
    """
    grouped = re.fullmatch(r"\d{1,3}(,\d{3})+", text.strip())
    try:
        return _whole(text.replace(",", "") if grouped else text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"give a whole number, got {brief(text)}") from None


def _whole(text: str) -> int:
    """Parse a whole number; raise ValueError for any other text."""
    try:
        return int(text)
    except ValueError:
        if (number := float(text)).is_integer():
            return int(number)
        raise


def encoded_bytes(text: str) -> int:
    """Parse a number of bytes, with or without a unit.

    Example:
        >>> encoded_bytes("1.5MB"), encoded_bytes("2000")
        (1500000, 2000)
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kMGT]?)B?", text.strip())
    count = 0 if match is None else int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " "))
    if not 0 < count < 10**18:
        raise argparse.ArgumentTypeError(f"give a number of bytes such as 50MB, got {brief(text)}")
    return count


def seconds_of(text: str) -> float:
    """Parse a number of seconds."""
    try:
        if (seconds := float(text)) >= 0:
            return seconds
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"give a number of seconds, got {brief(text)}")


def local_steps(text: str) -> Json:
    """Convert `--tau` to settings.

    Example:
        >>> local_steps("1..10")
        {'local_work.low': 1, 'local_work.high': 10}
    """
    try:
        if ".." in text:
            low, high = map(_whole, text.split(".."))
            return {"local_work.low": low, "local_work.high": high}
        taus = [_whole(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--tau takes 5, 1..10 or 1,2,3; got '{plain(text)}'.") from None
    tau = taus if len(taus) > 1 else taus[0]
    return {"local_work.tau": tau, "local_work.low": None, "local_work.high": None}


def span(text: str) -> tuple[str, tuple[float, float]]:
    """Parse KEY=LOW..HIGH to (key, (low, high)).

    Example:
        >>> span("algorithm.steps.y=0.01..1")
        ('algorithm.steps.y', (0.01, 1.0))
    """
    key, _, span = text.partition("=")
    try:
        low, high = map(float, span.split(".."))
    except ValueError:
        raise UserError(f"--range takes KEY=LOW..HIGH, got '{plain(text)}'.") from None
    return key, (low, high)


def seeds(text: str) -> int | list[int]:
    """Parse the seeds in 0..2 or 0,5,7; a single number is their count.

    Example:
        >>> seeds("3"), seeds("0..2"), seeds("0,5,7")
        (3, [0, 1, 2], [0, 5, 7])
    """
    from simfbo.studies.comparison import MOST_SEEDS

    try:
        if ".." not in text:
            values = [_whole(part) for part in text.split(",")]
            return values[0] if len(values) == 1 else values
        low, high = map(_whole, text.split(".."))
    except ValueError:
        raise UserError(f"--seeds takes 3, 0..2 or 0,5,7; got '{plain(text)}'.") from None
    if high - low >= MOST_SEEDS:
        raise UserError(f"--seeds takes up to {MOST_SEEDS:,} seeds, got '{plain(text)}'.")
    return list(range(low, high + 1))


def numbers(text: str, flag: str) -> list[float]:
    """Parse numbers such as 0.9,0.95."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(map(math.isfinite, values)):
        raise UserError(f"{flag} takes numbers as 0.9,0.95; got '{plain(text)}'.")
    return values


def add_settings(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the flags of a configuration, or of the part that several methods share."""
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help=f"{any_of(TASKS.names())}, or package.module:task")
    add("--config", type=Path, metavar="FILE", help="TOML file; flags override it")
    add(
        "--preset",
        metavar="NAME",
        help=f"predefined settings: {any_of(PRESETS)}; they override the file, and flags them",
    )
    add("--dataset", help="for example digits, mnist or schools; simfbo data lists them")
    add("--partition", help="iid (default), shards, dirichlet or natural")
    add("--clients", type=whole, metavar="N", help="number of clients")
    if not several:
        add(
            "--algorithm",
            metavar="NAME",
            help=f"{any_of(METHODS.names())}, or package.module:method",
        )
        add("--seed", type=whole, help="seed of every random draw (default 0)")
    add(
        "--cohort",
        type=whole,
        metavar="P",
        help="clients per exchange (default 10; everyone for practical tasks)",
    )
    add(
        "--tau",
        metavar="T",
        help="local steps: a number, LOW..HIGH for a draw per client, or a list such as 1,2,3",
    )
    add(
        "--rules",
        metavar="R",
        help="local optimisers: sgd, momentum:0.9, proximal:0.1 or "
        "coefficients:1:0.5, one for all clients or a list with one for each",
    )
    add("--rounds", type=whole, metavar="T", help="iterations (default 500)")
    add("--every", type=whole, metavar="K", help="evaluate every K iterations (default: 20 times)")
    add("--engine", help="simulated (default, fast) or debug")
    add(
        "--steps",
        help="auto: choose step sizes automatically; tuning-free: from the sizes of "
        "directions (S-TFBO, our reading of the abstract); given: those set",
    )
    add(
        "--codecs",
        metavar="NAME",
        help="small: send coded messages, in a few per cent of the bytes",
    )
    add(
        "--detect-anomalies",
        action="store_true",
        default=None,
        help="warn of clients whose messages stand out, as deployments do",
    )
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting; repeatable")
    add_data_dir(parser)


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    """Add `--data-dir`."""
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="folder of the data sets (or SIMFBO_DATA_DIR)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as JSON; everything else goes to standard error",
    )


def add_track(parser: argparse.ArgumentParser) -> None:
    """Add `--track`."""
    parser.add_argument(
        "--track",
        action="append",
        metavar="TRACKER",
        help="also log to csv, tensorboard, mlflow or wandb, as in mlflow or "
        "tensorboard:FOLDER; repeatable",
    )


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add `--resume`."""
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="resume the work in this folder, with its settings",
    )


def add_many_runs(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands with many runs."""
    add = parser.add_argument
    add("--jobs", type=whole, metavar="J", help="parallel runs (default: one per two cores)")
    add("--output", type=Path, metavar="DIR", help="folder for the runs")
    add("--quiet", action="store_true", help="show no progress")
    add_track(parser)
    add_resume(parser)


def overrides(options: argparse.Namespace) -> Json:
    """Return the settings given by flags, by dotted key."""
    settings = {
        key: getattr(options, flag)
        for flag, key in SHORTCUTS.items()
        if getattr(options, flag, None) is not None
    }
    settings |= local_steps(options.tau) if options.tau is not None else {}
    settings |= {} if options.rules is None else {"local_work.rules": options.rules.split(",")}
    settings |= dict(map(parse_override, options.set))
    if not options.config and "task.name" not in settings:
        raise UserError(f"Name a task ({any_of(TASKS.names())}), or give --config FILE.")
    if options.task is not None:
        _require_no_data(options.task)
    return settings


def _require_no_data(task: str) -> None:
    """Raise if a data set, a file or a folder is given as a task."""
    if ":" in task or TASKS.known(task) in TASKS.names():
        return
    if mistaken := _data_set(task.lower()) or _file(Path(task)):
        kind, advice = mistaken
        raise UserError(f"'{plain(task)}' is a {kind}, not a task: {advice}.")


def _data_set(name: str) -> tuple[str, str] | None:
    """Return kind and advice if a name is a data set's; else None."""
    from simfbo import datasets

    if name not in (*datasets.NAMES, *datasets.FRAMES):
        return None
    accepting_tasks = [task for task in TASKS.names() if name in _data_sets(TASKS.find(task))]
    in_python = f"load it in Python by simfbo.datasets.load_frame('{name}')"
    return (
        "data set",
        f"write {accepting_tasks[0]} --dataset {name}" if accepting_tasks else in_python,
    )


def _file(path: Path) -> tuple[str, str] | None:
    """Return kind and advice if a text looks like a path; else None."""
    if (path / FILE).is_file():
        return "run", f"continue it with simfbo run --resume {path}"
    if path.suffix == ".toml":
        return "file", f"write --config {path}"
    if path.suffix == ".py":
        return "file", f"write {path.stem}:NAME, with the name of the task in it"
    if not path.suffix and (not path.name or not path.exists()):
        return None
    return "folder" if path.is_dir() else "file", (
        "a table of yours is fitted in Python, as in FederatedLogistic().fit(df, y, "
        "clients='hospital') (docs/how-to-tune-clean-repair.md)"
    )


def _data_sets(task: TaskRecord) -> tuple[str, ...]:
    """Return the names of the data sets of a built-in task."""
    fields = {} if task.settings is None else task.settings.model_fields
    return get_args(fields["dataset"].annotation) if "dataset" in fields else ()


def configuration(options: argparse.Namespace) -> RunConfig:
    """Build the configuration from file and flags."""
    return load(options.config, overrides(options))


# Flags that may accompany --resume, since they do not affect the result.
_ALLOWED_WITH_RESUME = (
    "resume",
    "command",
    "data_dir",
    "quiet",
    "jobs",
    "checkpoint_seconds",
    "no_baselines",
    "device",
    "track",
    "json",
)


def require_alone(options: argparse.Namespace, add_arguments: Any) -> None:
    """Raise if settings accompany `--resume`, which takes them from the folder."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = parser.parse_args([])
    for name, value in vars(options).items():
        if name not in _ALLOWED_WITH_RESUME and value != getattr(defaults, name):
            flag = name.upper() if name in ("task", "name") else f"--{name.replace('_', '-')}"
            raise UserError(f"--resume takes the settings in the folder: omit {flag}.")
