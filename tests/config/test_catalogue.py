"""The catalogue: one record per method and task, of the library's, of yours and of plug-ins."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import simfbo
from simfbo import algorithms
from simfbo.config.catalogue import (
    METHODS,
    TASKS,
    MethodRecord,
    Shelf,
    TaskRecord,
    any_of,
    colour_of,
)
from simfbo.config.run import checked
from simfbo.errors import UserError
from simfbo.studies import comparison
from simfbo.studies.figures import looks_of

SOURCE = Path(simfbo.__file__).parent
OURS = ("simfbo", "shrofbo", "fednest", "lfednest", "aggitd", "fedbio", "fedmbo", "memfbo",
        "fedmsa", "fedbioacc", "mimefbo", "fedbioacc_local")  # fmt: skip


@pytest.fixture(autouse=True)
def restored(monkeypatch, tmp_path):
    """Forget after a test what it added to the catalogue or imported."""
    for shelf in (METHODS, TASKS):
        monkeypatch.setattr(shelf, "_records", dict(shelf._records))
        monkeypatch.setattr(shelf, "_places", {})
        monkeypatch.setattr(shelf, "_registered", shelf._registered)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def named_in(file: Path) -> set[str]:
    """Return the methods that a file names in string literals, docstrings left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    texts = {node.value.value for node in ast.walk(tree)
             if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}  # fmt: skip
    literals = {node.value for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip
    return {name for name in OURS for text in literals - texts if re.search(rf"\b{name}\b", text)}


def test_methods_are_listed_by_hand_in_one_place():
    """Adding a method is its file and its record: everything else derives from the records."""
    files = {str(file.relative_to(SOURCE)): named_in(file) for file in SOURCE.rglob("*.py")}
    lists = {file for file, names in files.items() if len(names) >= 6}
    assert lists == {"config/methods.py", "algorithms/__init__.py"}
    assert files["config/methods.py"] == set(OURS)


def test_the_library_s_methods():
    assert METHODS.names()[: len(OURS)] == list(OURS)
    assert [TASKS.find(name).practical for name in TASKS.names()[:6]] == 2 * [False] + 4 * [True]
    colours = [colour_of(name) for name in OURS]
    assert len(set(colours)) == len(OURS)
    for name in OURS:
        assert METHODS.find(name).factory == f"simfbo.algorithms:{name}"
        assert callable(getattr(algorithms, name))


@pytest.mark.parametrize(
    ("names", "text"), [(["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c"], "a, b or c")]
)
def test_a_choice(names, text):
    assert any_of(names) == text


def mine(problem, local, server=None, damping: float = 1.0):
    """Return SimFBO with another name."""
    return algorithms.simfbo(problem, local, server)._replace(name="Mine")


@pytest.mark.parametrize("name", ["mien", "Mien", "mines"])
def test_unknown_names_are_answered_with_a_known_one(name):
    METHODS.add(MethodRecord("mine", "Mine", mine))
    with pytest.raises(UserError, match=rf"^Unknown algorithm '{name}'. Did you mean 'mine'\?$"):
        METHODS.find(name)
    METHODS.remove("mine")
    with pytest.raises(UserError, match=rf"^Unknown algorithm '{name}'. Use simfbo, .* fedbioacc"):
        METHODS.find(name)


def test_a_new_method_has_settings_a_look_and_privacy():
    METHODS.add(MethodRecord("mine", "Mine", mine, one_exchange=True, colour="#123456"))
    tree = {"task": {"name": "quadratic"}, "algorithm": {"name": "mine"}}
    config = checked(tree, {"algorithm.damping": 0.5, "privacy.delta": 1e-6})
    assert config.algorithm.model_dump()["damping"] == 0.5
    assert config.algorithm.local.x == 0.05
    assert looks_of({"a": "simfbo", "b": "mine"})["b"].colour == "#123456"
    assert "mine" in comparison.plan({}, {"task.name": "quadratic"})
    with pytest.raises(
        UserError, match=r"is accounted for simfbo, .*, fedbioacc_local or mine only"
    ):
        checked(tree, {"algorithm.name": "fednest", "privacy.delta": 1e-6})


def test_methods_that_share_a_colour_differ_in_style():
    METHODS.add(
        MethodRecord("mine", "Mine", mine), MethodRecord("yours", "Yours", mine, colour="#123456")
    )
    looks = looks_of(dict(zip("abcd", ("simfbo", "simfbo", "mine", "yours"), strict=True)))
    assert len({(look.colour, look.style) for look in looks.values()}) == 4
    assert looks["a"].colour == looks["b"].colour != looks["d"].colour
    assert looks["a"].style == looks["d"].style == "-"


MODULE = """
from simfbo.algorithms import simfbo
from simfbo.config.catalogue import MethodRecord, TaskRecord
from simfbo.tasks import quadratic

def method(problem, local, server, damping: float = 1.0):
    return simfbo(problem, local, server)

record = MethodRecord("any", "Plugged", method, one_exchange=True)
task_record = TaskRecord("any", quadratic, practical=True)
ready = quadratic(3)
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "plugged.py").write_text(MODULE)
    yield
    sys.modules.pop("plugged", None)


def test_a_place_in_a_module_is_a_name_too(module):
    method, record = METHODS.find("plugged:method"), METHODS.find("plugged:record")
    assert (method.title, method.one_exchange) == ("method", False)
    assert (record.name, record.title, record.one_exchange) == ("plugged:record", "Plugged", True)
    assert TASKS.find("plugged:task_record").practical
    ready = checked({"task": {"name": "plugged:ready"}}, {})
    assert ready.task.model_dump() == {"name": "plugged:ready"}
    assert METHODS.find("plugged:method") is method
    assert METHODS.names() == list(OURS)  # lists of names stay as they are
    numbers = [METHODS.number(f"plugged:{name}") for name in ("method", "record")]
    assert numbers == [len(OURS), len(OURS) + 1]
    assert colour_of("plugged:record") == colour_of("shrofbo")  # the palette begins again


@pytest.mark.parametrize(
    ("shelf", "name", "sentence"),
    [
        (METHODS, "plugged:number", "The algorithm 'plugged:number' must be a function, got int."),
        (METHODS, "plugged:ready", "The algorithm 'plugged:ready' must be a function, got Task."),
        (TASKS, "plugged:number", "The task 'plugged:number' must be a function or a Task, got "
                                  "int."),
        (TASKS, "plugged:x", "'plugged:x' cannot be imported: module 'plugged' has no attribute "
                             "'x'."),
        (TASKS, "plug:ged:x", "'plug:ged:x' cannot be imported: No module named 'plug'."),
        (TASKS, ":x", "Write ':x' as package.module:name."),
    ],
)  # fmt: skip
def test_places_that_hold_no_method_or_task(module, shelf, name, sentence):
    with pytest.raises(UserError) as caught:
        shelf.find(name)
    assert str(caught.value) == sentence
    assert name not in shelf.names()


@pytest.fixture
def plug_in(tmp_path, monkeypatch, module):
    """Install a package that registers methods and a task, one of which cannot be imported."""
    (tmp_path / "broken.py").write_text("raise RuntimeError('two\\nlines')\n")
    folder = tmp_path / "plugged-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[simfbo.methods]\nplugged = plugged:record\nfactory = plugged:method\n"
        "broken = broken:method\nsimfbo = broken:simfbo\nmodule = plugged\n"
        "[simfbo.tasks]\nplugged-task = plugged:ready\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for shelf in (METHODS, TASKS):
        monkeypatch.setattr(shelf, "_registered", None)


def test_entry_points_are_imported_when_they_are_used(plug_in):
    assert METHODS.names() == [*OURS, "plugged", "factory", "broken", "module"]
    assert TASKS.names()[-1] == "plugged-task"
    assert not {"plugged", "broken"} & set(sys.modules)
    config = checked({"task": {"name": "plugged-task"}, "algorithm": {"name": "factory"}}, {})
    assert config.algorithm.model_dump()["damping"] == 1.0
    assert METHODS.find("plugged").one_exchange
    assert METHODS.find("simfbo").factory == "simfbo.algorithms:simfbo"  # ours stays ours
    assert "broken" not in sys.modules


def test_a_broken_plug_in_is_one_sentence_and_breaks_nothing_else(plug_in):
    with pytest.raises(UserError) as caught:
        checked({"task": {"name": "quadratic"}, "algorithm": {"name": "broken"}}, {})
    assert str(caught.value) == "'broken:method' cannot be imported: two\\nlines."
    with pytest.raises(UserError, match=r"^Write 'plugged' as package.module:name.$"):
        METHODS.find("module")
    assert [method.name for method in METHODS.usable()] == [*OURS, "plugged", "factory"]
    shared = [name for name in OURS if name != "fedbioacc_local"]
    assert list(comparison.plan({}, {"task.name": "quadratic"})) == [*shared, "plugged", "factory"]
    with pytest.raises(UserError, match="fedbioacc, mimefbo, fedbioacc_local or plugged"):
        checked({"task": {"name": "quadratic"}, "algorithm": {"name": "factory"}},
                {"privacy.delta": 1e-6})  # fmt: skip


def test_the_catalogue_is_full_from_the_start():
    script = "from simfbo.config.catalogue import *; print(METHODS.names(), TASKS.names()[0])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                           check=True)  # fmt: skip
    assert found.stdout == f"{list(OURS)} quadratic\n"


def test_a_shelf_of_its_own():
    shelf = Shelf(TaskRecord, "thing", "simfbo.no_such_group")
    shelf.add(TaskRecord("one", mine))
    assert shelf.names() == ["one"]
    with pytest.raises(UserError, match=r"^Unknown thing 'zzz'. Use one.$"):
        shelf.find("zzz")
