"""The public names are documented, and the reference pages agree with the code."""

import ast
import importlib
import inspect
import itertools
import re
import sys
import threading
import tomllib
from pathlib import Path
from typing import get_args

import api_pages as API
import numpy as np
import pytest
from pydantic import BaseModel

import simfbo
from simfbo.config.catalogue import METHODS, TASKS, settings_model
from simfbo.config.run import RunConfig, checked

ROOT = Path(__file__).parent.parent
DOCS, PACKAGE = ROOT / "docs", ROOT / "src" / "simfbo"


def text_of(name):
    return (DOCS / name).read_text(encoding="utf-8")


# The public names


def test_the_page_has_a_section_for_every_namespace():
    assert re.findall("^## `(.+)`$", text_of("reference-api.md"), re.M) == list(API.NAMESPACES)


@pytest.mark.parametrize("title", API.NAMESPACES)
def test_every_public_name_is_documented(title):
    module = importlib.import_module(API.NAMESPACES[title])
    names = module.__all__
    assert len(set(names)) == len(names) > 0
    missing = [name for name in names if len(API.documentation(module, name)) < 20]
    assert missing == []
    assert module.__doc__


def test_a_value_without_a_text_below_it_has_no_documentation():
    sampling = importlib.import_module("simfbo.core.sampling")
    assert API.documentation(sampling, "AnySampler") == ""


def test_what_a_method_is_written_with_is_public():
    imported = re.findall("^from (simfbo.*) import", text_of("how-to-write-an-algorithm.md"), re.M)
    assert set(imported) <= set(API.NAMESPACES)


@pytest.mark.parametrize("name", ["fedmsa", "lfednest", "fedmbo", "aggitd"])
def test_a_method_is_named_in_its_file_in_the_list_and_in_its_record(name):
    files = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if re.search(rf"\b{name}\b", file.read_text(encoding="utf-8"))
    }
    assert files == {"algorithms/__init__.py", f"algorithms/_{name}.py", "config/methods.py"}
    assert (DOCS / f"reference-{name}.md").is_file()


def test_every_namespace_has_a_section():
    modules = {n for n in dir(simfbo) if isinstance(getattr(simfbo, n), type(simfbo))}
    assert modules == {"aggregation", "algorithms", "checks", "codecs", "datasets", "diagnostics",
                       "estimators", "flower", "local_work", "partition", "privacy", "sampling",
                       "tasks", "torch", "trackers"}  # fmt: skip
    assert {f"simfbo.{name}" for name in modules} <= set(API.NAMESPACES)
    for name in modules:
        module = importlib.import_module(API.NAMESPACES[f"simfbo.{name}"])
        assert module is getattr(simfbo, name)


def test_dir_shows_the_one_list():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    listed = [ast.literal_eval(s.value) for s in stub.body if isinstance(s, ast.Assign)]
    assert sorted(simfbo.__all__) == sorted(*listed)
    assert dir(simfbo) == sorted([*listed[0], "torch"])  # which a star import leaves out
    assert len(simfbo.__all__) < 40
    assert not hasattr(simfbo, "simfbo")


# The settings


def keys(model, path=()):
    """Yield all dotted keys of a model of settings."""
    for name, field in model.model_fields.items():
        inner = [found for found in models(field.annotation) if found.__name__ != "TaskSettings"]
        if not inner or name in ("task", "algorithm"):
            yield ".".join((*path, name))
        for found in inner:
            yield from keys(found, (*path, name))


def models(annotation):
    """Yield the models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models(part)


def actual_keys():
    """Return all dotted keys that a configuration can have."""
    found = {key for key in keys(RunConfig) if key not in ("task", "algorithm")}
    for shelf, table in ((METHODS, "algorithm"), (TASKS, "task")):
        for name in shelf.names():
            found |= set(keys(settings_model(shelf.find(name)), (table,)))
    return found


def documented_keys():
    """Return the keys in code spans of the reference, with braces expanded."""
    found = set()
    for span in re.findall(r"`([\w.{},]+)`", text_of("reference-configuration.md")):
        parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", span) if part]
        found |= {"".join(choice) for choice in itertools.product(*parts)}
    return found


def test_the_reference_lists_every_setting():
    assert len(actual_keys()) > 60
    assert actual_keys() - documented_keys() == set()


def test_the_reference_lists_no_setting_that_does_not_exist():
    tables = {key.partition(".")[0] for key in actual_keys() if "." in key}
    claimed = {key for key in documented_keys() if key.partition(".")[0] in tables and "." in key}
    groups = {key.rpartition(".")[0] for key in actual_keys()}
    assert claimed - actual_keys() - groups == set()


def test_defaults_of_the_reference():
    """Numbers in the tables of the run and of what protects it."""
    config = checked({"task": {"name": "quadratic"}, "privacy": {"delta": 1e-5}}, {})
    rows = re.findall(r"^\| `([\w.]+)` \|(?:[^|]*\|)? ([\d,.]+) \|", reference_tables(), re.M)
    assert len(rows) > 8
    for key, default in rows:
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        assert float(default.replace(",", "")) == value, key


def reference_tables():
    return text_of("reference-configuration.md").partition("## Methods")[0]


# The pages of the methods


def test_every_method_has_a_page():
    for name in METHODS.names():
        page = text_of(f"reference-{name}.md")
        assert page.startswith(f"# {METHODS.find(name).title}\n")
        assert f"--algorithm {name}" in page


@pytest.mark.parametrize("name", METHODS.names())
def test_cost_tables_are_the_ledgers(name, single_precision):
    from simfbo.config.build import build_algorithm, build_federation
    from simfbo.runs.report import size

    config = checked({"task": {"name": "hyper-representation", "dataset": "mnist"}},
                     {"algorithm.name": name})  # fmt: skip
    task = mnist_like()
    problem = task.problem._replace(
        lower_level="private" if METHODS.find(name).private else "shared"
    )
    algorithm = build_algorithm(config.algorithm, problem, config.rounds)
    ledger = simfbo.cost(algorithm, build_federation(config, task.data), task.x0, task.y0)
    rows = [
        f"| {label} | {sent.rounds} | {sent.floats_down:,} | {sent.floats_up:,} "
        f"| {size(sent.bytes_down)} | {size(sent.bytes_up)} |"
        for label, sent in [*((f"`{step}`", sent) for step, sent in ledger.by_step.items()),
                            ("total", ledger.total)]
    ]  # fmt: skip
    lines = text_of(f"reference-{name}.md").splitlines()
    first = lines.index("| client step | exchanges | floats down | floats up | down | up |")
    assert lines[first + 2 : first + 2 + len(rows) + 1] == [*rows, ""]


def mnist_like():
    """Return the MNIST task with other images: messages have the same size."""
    from simfbo.datasets import ImageData
    from simfbo.tasks import hyper_representation

    pixels = np.random.default_rng(0).integers(0, 256, (400, 28, 28), np.uint8)
    images = pixels, np.arange(400, dtype=np.int32) % 10
    parts = simfbo.partition.iid(400, 100)
    return hyper_representation(ImageData(*images, *images, name="mnist"), parts)


# The architecture


def test_the_layers_are_the_contract():
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    drawn = text_of("explanation-architecture.md").partition("## Layers")[2].partition("\n\n    ")
    layers = [line.strip() for line in drawn[2].partition("\n\n")[0].splitlines()]
    assert layers == contracts[0]["layers"]


def test_every_room_is_in_the_table():
    rooms = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    rooms |= {path.name for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    table = text_of("explanation-architecture.md").partition("## Layers")[0]
    assert set(re.findall(r"^\| `([\w./]+)` \|", table, re.M)) == rooms


def walk():
    """Return the files of the walk, in order, and the others that the page names."""
    page = text_of("explanation-architecture.md").partition("## One run")[2]
    drawn, _, rest = page.partition("## One round")[0].partition("These are the files")
    stops = re.findall(r"^ +(\d+)  ([\w/.]+) ", drawn, re.M)
    assert [int(number) for number, _ in stops] == list(range(1, len(stops) + 1))
    return [file for _, file in stops], set(re.findall(r"`([\w/]+\.py)`", rest))


def test_the_walk_visits_files_that_exist_each_once():
    stops, others = walk()
    assert len(stops) == len(set(stops)) <= 25
    assert not set(stops) & others
    assert [file for file in [*stops, *others] if not (PACKAGE / file).is_file()] == []
    assert f"there are {len(stops) + len(others)}." in text_of("explanation-architecture.md")


@pytest.mark.slow
def test_a_run_visits_the_files_of_the_walk(tmp_path, capsys, single_precision):
    from simfbo.cli.main import main

    entered: dict[str, None] = {}

    def note(frame, event, arg):
        code = frame.f_code
        ours = code.co_filename.startswith(str(PACKAGE)) and code.co_flags & inspect.CO_NEWLOCALS
        named = event == "call" and not code.co_name.startswith("<")
        if ours and named and not while_importing(frame):
            entered.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        argv = [
            "run",
            "hyper-representation",
            "--rounds",
            "2",
            "--quiet",
            "--set",
            "strategy=lanes",
        ]
        assert main([*argv, "--output", str(tmp_path / "out")]) == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    stops, others = walk()
    # Here the digits that come with scikit-learn; there MNIST from the data folder.
    digits, mnist = "datasets/digits.py", {"datasets/cache.py", "datasets/formats.py"}
    found = {file for file in entered if file.endswith(".py")}
    for_the_test = {digits, "config/files.py"}  # which reads --set
    assert found - for_the_test == set(stops) | others - mnist
    assert [file for file in entered if file in stops] == stops


def while_importing(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            return True
        frame = frame.f_back
    return False
