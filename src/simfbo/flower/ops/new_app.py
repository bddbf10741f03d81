"""A new app: a folder with a model, synthetic rows, tests and a README, ready to run.

The files are the templates in `app/`, with placeholders such as $name.
"""

import json
import re
from importlib import resources
from pathlib import Path
from string import Template
from typing import NamedTuple

import numpy as np

from simfbo.errors import UserError, plain

_CLIENTS, _ROWS = 6, 40
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
_COLUMNS = ("age", "weight", "dose", "day", "outcome")
_USE = """
## The model

    from task import trained

    model = trained("runs/...")  # the folder that `simfbo flower run` named
    model.predict(rows), model.coef_

With 50 rounds, enough to try the app, the L2 weights `model.regularisation_` have hardly left
their first value. For a result set `rounds` in `pyproject.toml` to some hundreds, and read the
verdict that the run ends with."""


class Kind(NamedTuple):
    """One kind of app.

    Attributes:
        task: the templates of task.py and of its test are task_TASK.txt and test_TASK.txt.
        words: the values of the placeholders in all templates.
        numbers: the outcome is a number rather than yes or no.
    """

    task: str
    words: dict[str, str]
    numbers: bool


_MODEL = {"task": "the model and the run's settings", "use": _USE}
KINDS = {
    "FederatedLogistic": Kind(
        "estimator",
        {
            **_MODEL,
            "estimator": "FederatedLogistic",
            "what": "A logistic regression that learns how strongly to regularise every feature",
            "labels": '\nCLASSES = ["no", "yes"]\n',
            "classes": "\n        classes=CLASSES,",
            "loaded": ", classes=CLASSES",
            "own": ", and `CLASSES` in `task.py`",
        },
        numbers=False,
    ),
    "FederatedRidge": Kind(
        "estimator",
        {
            **_MODEL,
            "estimator": "FederatedRidge",
            "what": "A ridge regression that learns how strongly to regularise every feature",
            **dict.fromkeys(("labels", "classes", "loaded", "own"), ""),
        },
        numbers=True,
    ),
    "losses": Kind(
        "losses",
        {
            "what": "Two losses, of which one tunes the penalties of the other",
            "task": "the two losses, their data and the run's settings",
            "own": ", and `CENTRE` and `SCALE` in `task.py`",
            "use": "",
        },
        numbers=True,
    ),
}


def create(folder: Path, kind: str) -> list[str]:
    """Write a new app; return the names of its files.

    Args:
        folder: to be created, named like the app.
        kind: a key of `KINDS`.
    """
    name, template = folder.name, KINDS[kind]
    if not _NAME.fullmatch(name):
        raise UserError(
            f"An app cannot be called '{plain(name)}': use letters, digits, - and _, and begin "
            "with a letter."
        )
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another name, or delete it.")
    data = folder.resolve() / "data"
    if not _is_text(str(data)):
        raise UserError(
            "An app's configuration holds UTF-8 only, and the path of this folder is "
            "none: choose another folder."
        )
    # A JSON string is a TOML string.
    path = json.dumps(str(data), ensure_ascii=False)
    words = {**template.words, "name": name, "data": path}
    files = _files(template, words) | _rows(template.numbers)
    try:
        data.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write to {folder}: {error.strerror}.") from None
    return sorted(files)


def _is_text(path: str) -> bool:
    """Check whether a path can be encoded as UTF-8."""
    try:
        return bool(path.encode())
    except UnicodeEncodeError:
        return False


def _files(kind: Kind, words: dict[str, str]) -> dict[str, str]:
    """Return the files of an app except its data, by name."""
    templates = {
        "README.md": "README",
        "pyproject.toml": "pyproject",
        "task.py": f"task_{kind.task}",
        "test_task.py": f"test_{kind.task}",
        **{f"{name}.py": name for name in ("client_app", "records", "server_app")},
    }
    source = resources.files("simfbo.flower.ops") / "app"
    return {
        file: Template((source / f"{name}.txt").read_text(encoding="utf-8")).substitute(words)
        for file, name in templates.items()
    }


def _rows(numbers: bool) -> dict[str, str]:
    """Generate synthetic tables; the outcome depends on age and dose."""
    rng = np.random.default_rng(0)
    centre, scale = np.array([50.0, 75.0, 10.0, 180.0]), np.array([12.0, 14.0, 4.0, 100.0])
    tables: dict[str, str] = {}
    for client in range(_CLIENTS):
        standardised = rng.normal(size=(_ROWS, 4)) + 0.3 * rng.normal(size=4)
        score = 1.5 * standardised[:, 0] - 2.0 * standardised[:, 2] + 0.5 * rng.normal(size=_ROWS)
        rows = np.round(centre + scale * standardised, 1).astype(str)
        outcome = np.round(score, 2).astype(str) if numbers else np.where(score > 0, "yes", "no")
        lines = [",".join(row) for row in (_COLUMNS, *np.column_stack([rows, outcome]).tolist())]
        tables[f"data/client-{client}.csv"] = "\n".join(lines) + "\n"
    return tables
