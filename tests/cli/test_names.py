"""Names that become folders stay in their folder, whoever wrote them."""

import json
import os
from pathlib import Path

import pytest

from simfbo.cli.console import new_folder
from simfbo.config.run import load
from simfbo.errors import UserError
from simfbo.runs.files import as_folder_name, folder_names

COMPARE = ("compare", "quadratic", "--clients", "2", "--cohort", "2", "--rounds", "1", "--methods",
           "simfbo", "--seeds", "1", "--quiet")  # fmt: skip
HOSTILE = ["../../x", "..", ".", "", "/tmp/x", "a/b", "a\\b", "a\0b", ".hidden", "-rf", "a ", "a.",
           "\n", "x" * 61, "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 67, "C:", "~"]  # fmt: skip


def everything(folder):
    """Return every path below a folder, with its content."""
    return {path: path.read_bytes() if path.is_file() else None for path in Path(folder).rglob("*")}


@pytest.fixture
def study(simfbo, monkeypatch):
    """Return the plan of a comparison at a/b/it, none of whose runs has begun."""
    monkeypatch.setattr("simfbo.studies.sweep.sweep", lambda *given: pytest.fail("it ran"))
    file = Path("a/b/it/study.json")
    file.parent.mkdir(parents=True)
    config = load(None, {"task.name": "quadratic", "task.clients": 2, "rounds": 1})
    plan = {"study": "compare", "methods": {"simfbo": config.model_dump(mode="json")},
            "seeds": [0], "targets": [], "metric": None}  # fmt: skip
    file.write_text(json.dumps(plan))
    return file


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_in_a_plan_is_refused_and_nothing_is_written(simfbo, study, name):
    plan = json.loads(study.read_text())
    study.write_text(json.dumps({**plan, "methods": {name: plan["methods"]["simfbo"]}}))
    before = everything(".")
    code, out, err = simfbo("compare", "--resume", str(study.parent))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "names a folder: use at most 60 letters" in err
    assert everything(".") == before


def test_names_that_are_one_folder_on_some_systems(simfbo, study):
    plan = json.loads(study.read_text())
    two = dict.fromkeys(["Simfbo", "simfbo"], plan["methods"]["simfbo"])
    study.write_text(json.dumps({**plan, "methods": two}))
    code, _, err = simfbo("compare", "--resume", str(study.parent))
    sentence = "'Simfbo' and 'simfbo' name the same folder on some systems: rename one of them."
    assert (code, err) == (2, f"simfbo: {sentence}\n")


@pytest.mark.parametrize(
    "change",
    [
        {"methods": []},
        {"methods": {}},
        {"methods": {"a": 3}},
        {"seeds": "0"},
        {"seeds": ["../x"]},
        {"targets": ["x"]},
        {"metric": 3},
        {"more": 1},
    ],
)
def test_a_plan_of_other_values_is_refused(simfbo, study, change):
    study.write_text(json.dumps({**json.loads(study.read_text()), **change}))
    before = everything(".")
    code, out, err = simfbo("compare", "--resume", str(study.parent))
    sentence = f"{study.parent} was not written by `simfbo compare`: give another folder."
    assert (code, out, err) == (2, "", f"simfbo: {sentence}\n")
    assert everything(".") == before


@pytest.mark.parametrize("link", ["simfbo-seed0", "simfbo-seed0/history.jsonl", ".study.json.tmp"])
def test_a_link_out_of_the_folder_is_refused(simfbo, study, link):
    target = Path("mine")
    target.write_text("keep") if link.endswith((".jsonl", ".tmp")) else target.mkdir()
    place = study.parent / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(target.resolve())
    before = everything(".")
    code, out, err = simfbo("compare", "--resume", str(study.parent))
    sentence = f"{place} is a link that leads out of {study.parent}: remove it."
    assert (code, out, err) == (2, "", f"simfbo: {sentence}\n")
    assert everything(".") == before


def test_a_link_within_the_folder_is_not(study):
    from simfbo.runs.files import require_no_way_out

    (study.parent / "same").symlink_to("study.json")
    require_no_way_out(study.parent)


def test_a_link_for_a_history_is_refused(simfbo):
    target = Path("mine.txt")
    target.write_text("keep")
    Path("it").mkdir()
    Path("it/history.jsonl").symlink_to(target.resolve())
    for how in (("--resume", "it"), ("quadratic", "--clients", "2", "--output", "it")):
        assert simfbo("run", *how)[0] == 2
    assert target.read_text() == "keep"
    assert os.listdir("it") == ["history.jsonl"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_default_folder_is_one_folder_under_runs(name):
    config = load(None, {"task.name": "quadratic"})
    config = config.model_copy(update={"task": config.task.model_copy(update={"name": name})})
    folder = new_folder("compare", config, name)
    assert folder.parent == Path("runs")
    folder.mkdir(parents=True)  # a name that the system takes
    assert folder.resolve().parent == Path("runs").resolve()


def test_names_that_are_made_can_be_used():
    for name in (*HOSTILE, "package.module:name", "ä b"):
        made = as_folder_name(name)
        assert len(made.encode()) <= 200
        if len(made) <= 60:
            assert folder_names([made]) == [made]
    assert folder_names(["fednest", "Über-2", "a b", "a_"]) == ["fednest", "Über-2", "a b", "a_"]
    with pytest.raises(UserError, match="names a folder"):
        folder_names(["fine", "../not"])
