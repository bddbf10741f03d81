"""Methods and tasks of your own on the command line: registered, or as package.module:name."""

import re
import sys
from pathlib import Path

import pytest

from simfbo import checks
from simfbo.cli.main import main
from simfbo.config.catalogue import METHODS, TASKS, colour_of
from simfbo.config.run import load
from simfbo.runs.history import History

MINE = """
from simfbo import algorithms, tasks
from simfbo.config.catalogue import METHODS, MethodRecord
from simfbo.core.method import Wrapper


class Mine(Wrapper):
    name = "Mine"

    def round(self, state, federation, key):
        return self.inner.round(state, federation, key)


def mine(problem, local, server=None, damping: float = 1.0):
    steps = local if server is None else server
    scaled = steps._replace(x=damping * steps.x)
    return Mine(algorithms.simfbo(problem, local, scaled))


METHODS.add(MethodRecord("mine", "Mine", mine, one_exchange=True))
"""
TASK = """

def task(clients: int = 4, spread: float = 1.0, seed: int = 0):
    return tasks.quadratic(clients, heterogeneity=spread, seed=seed)


ready = tasks.quadratic(3)
"""
SMALL = ("--clients", "3", "--cohort", "3", "--rounds", "4", "--every", "2", "--quiet")


@pytest.fixture
def module(somewhere, monkeypatch):
    """Write a module with a method, its record and tasks into the current folder."""
    Path("mine.py").write_text(MINE + TASK)
    yield
    sys.modules.pop("mine", None)


@pytest.fixture
def registered(module, monkeypatch):
    """Import the module, which registers its method."""
    monkeypatch.syspath_prepend(".")
    __import__("mine")


def errors(folder, metric="x_error"):
    return History.load(folder).column(metric)


def test_run_and_report(simfbo, registered):
    flags = ("--algorithm", "mine", "--set", "algorithm.damping=0.5", "--output", "a")
    assert simfbo("run", "quadratic", *SMALL, *flags)[0] == 0
    flags = ("--algorithm", "simfbo", "--output", "b", "--set", "algorithm.server.x=0.025",
             "--set", "algorithm.radius=none")  # fmt: skip
    assert simfbo("run", "quadratic", *SMALL, *flags)[0] == 0
    assert errors("a") == errors("b")
    header = History.load("a").header
    assert (header["algorithm"], header["config"]["algorithm"]["damping"]) == ("Mine", 0.5)
    assert header["about"]["colour"] == colour_of("mine")
    assert simfbo("report", "a", "b", "--output", "both")[0] == 0
    summaries = Path("both/report.html").read_text().partition("<noscript>")[2]
    assert re.findall("<h2>(.*?)</h2>", summaries) == ["Mine", "SimFBO"]


def test_compare_tune_cost_and_privacy(simfbo, registered, in_process):
    flags = ("--methods", "simfbo,mine", "--seeds", "1", "--output", "out")
    code, out, err = simfbo("compare", "quadratic", *SMALL, *flags)
    assert (code, err) == (0, "")
    assert re.search("│ mine ", out)
    code, _, err = simfbo("tune", "quadratic", *SMALL[:4], "--algorithm", "mine", "--budget", "9",
                          "--trials", "3", "--output", "tuned", "--quiet")  # fmt: skip
    assert (code, err) == (0, "")
    assert load(Path("tuned/best.toml"), {}).algorithm.name == "mine"
    code, out, err = simfbo("cost", "quadratic", "--algorithm", "mine", "--clients", "3")
    assert (code, err) == (0, "")
    assert "One iteration of Mine on quadratic" in out
    private = ("--algorithm", "mine", "--set", "privacy.noise.x=5", "--output", "private")
    assert simfbo("run", "quadratic", *SMALL, *private)[0] == 0
    assert errors("private", "epsilon")[-1] > 0
    code, _, err = simfbo("run", "quadratic", "--algorithm", "fednest", "--set",
                          "privacy.delta=0.1")  # fmt: skip
    assert (code, err) == (
        2,
        "simfbo: 'privacy' is accounted for simfbo, shrofbo, fedbio, memfbo, fedbioacc, "
        "mimefbo, fedbioacc_local or mine only.\n",
    )


def test_check_help_and_hints(simfbo, registered, monkeypatch, capsys):
    law = next(law for law in checks.LAWS if law.name == "ledger is cost")
    monkeypatch.setattr(checks, "LAWS", (law,))
    for name in ("mine", "mine:mine"):
        code, out, err = simfbo("check", name)
        assert (code, err) == (0, "")
        assert out.endswith("1 of 1 laws hold or are violated as declared.\n")
    for command in ("run", "compare", "tune", "cost"):
        with pytest.raises(SystemExit):
            main((command, "--help"))
        shown = " ".join(capsys.readouterr().out.split())
        assert (
            "fedbioacc_local, mine" if command == "compare" else "fedbioacc_local or mine"
        ) in shown
    for command in ("run", "tune", "cost"):
        assert simfbo(command, "quadratic", "--algorithm", "mien")[2] == (
            "simfbo: Unknown algorithm 'mien'. Did you mean 'mine'?\n"
        )
    assert simfbo("check", "mien")[2].endswith("Did you mean 'mine'?\n")
    assert simfbo("compare", "quadratic", "--methods", "mien")[2].endswith("mean 'mine'?\n")
    wrong = ("--algorithm", "mine", "--set", "algorithm.damp=1")
    assert simfbo("run", "quadratic", *wrong)[2] == (
        "simfbo: Unknown setting 'algorithm.damp'. Did you mean 'algorithm.damping'?\n"
    )


def test_places_need_no_record(simfbo, module, in_process):
    own = ("--algorithm", "mine:mine", "--set", "algorithm.damping=0.5")
    code, out, err = simfbo("run", "mine:task", *SMALL, *own, "--set", "task.spread=2", "--seed",
                            "3")  # fmt: skip
    assert (code, err) == (0, "")
    first = Path("runs/mine-task-mine-mine-seed3")
    assert "Mine on mine:task (3 clients): finished after 4 of 4 iterations." in out
    flags = ("--algorithm", "simfbo", "--set", "algorithm.server.x=0.025", "--set",
             "algorithm.radius=none", "--set", "task.heterogeneity=2", "--seed", "3",
             "--output", "ours")  # fmt: skip
    assert simfbo("run", "quadratic", *SMALL, *flags)[0] == 0
    assert errors(first) == errors("ours")
    assert (
        simfbo("run", "--resume", str(first))[1] == f"{first} has finished: nothing left to do.\n"
    )
    code, out, _ = simfbo("cost", "mine:task", "--algorithm", "mine:mine")
    assert (code, "One iteration of Mine on mine:task" in out) == (0, True)
    code, _, err = simfbo("compare", "mine:ready", *SMALL[2:], "--methods", "mine:mine,simfbo",
                          "--seeds", "1", "--output", "out")  # fmt: skip
    assert (code, err) == (0, "")
    assert {path.name for path in Path("out").iterdir()} >= {"mine-mine-seed0", "simfbo-seed0"}
    code, out, err = simfbo("tune", "mine:ready", *own, "--budget", "9", "--trials", "3",
                            "--output", "tuned", "--quiet")  # fmt: skip
    assert (code, err) == (0, "")
    best = load(Path("tuned/best.toml"), {})
    assert (best.task.name, best.algorithm.name, best.algorithm.damping) == (
        "mine:ready", "mine:mine", 0.5)  # fmt: skip
    assert simfbo("tune", "--resume", "tuned", "--quiet")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("mine:ready", "--clients", "4"), "Unknown setting 'task.clients'. There are no "
         "settings in 'task'."),
        (("mine:task", "--dataset", "mnist"), "Unknown setting 'task.dataset'. The settings in "
         "'task' are clients, spread."),
        (("mine:task", "--clients", "x"), "--clients: give a whole number, got 'x'."),
        (("quadratic", "--algorithm", "mine:ready"), "The algorithm 'mine:ready' must be a "
         "function, got Task."),
        (("mine:mine",), "'mine:mine' needs a default for 'local': it is called without that "
         "argument."),
        (("mine:number",), "'mine:number' returned int, which is not a Task."),
        (("quadratic", "--algorithm", "mine:wrong"), "'mine:wrong' returned int, which is not a "
         "Method."),
    ],
)  # fmt: skip
def test_mistakes(simfbo, module, arguments, sentence):
    with Path("mine.py").open("a") as file:
        file.write("\ndef number():\n    return 3\n\ndef wrong(problem, steps):\n    return 3\n")
    code, _, err = simfbo("run", *arguments)
    assert (code, err) == (2, f"simfbo: {sentence}\n")


def test_real_worker_processes_import_them(simfbo, module):
    """In a process of their own, from a file: the one test here that starts workers."""
    Path("my.toml").write_text(
        'seeds = [0]\nrounds = 4\nevery = 2\n[task]\nname = "mine:task"\nclients = 3\n'
        '[sampling]\nkind = "everyone"\n'
        '[methods.same]\nalgorithm = { name = "mine:mine" }\n'
        '[methods.slow]\nalgorithm = { name = "mine:mine", damping = 0.5 }\n'
        '[methods.simfbo]\nalgorithm = { radius = "none" }\n'
    )
    code, _, err = simfbo("compare", "--config", "my.toml", "--output", "out", "--quiet",
                          "--jobs", "2")  # fmt: skip
    assert (code, err) == (0, "")
    same, slow, ours = (errors(f"out/{name}-seed0") for name in ("same", "slow", "simfbo"))
    assert same == ours
    assert slow[1] != ours[1]


def test_plug_ins(simfbo, module, monkeypatch, capsys):
    """A package registers a method and a task; one whose module raises does no harm."""
    Path("mine.py").write_text(MINE.rpartition("METHODS.add")[0] + TASK)
    Path("broken.py").write_text("raise RuntimeError('on purpose')\n")
    folder = Path("mine-1.0.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[simfbo.methods]\nplugged = mine:mine\nbroken = broken:method\n"
        "[simfbo.tasks]\nplugged-task = mine:task\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    for shelf in (METHODS, TASKS):
        monkeypatch.setattr(shelf, "_registered", None)
    flags = ("--algorithm", "plugged", "--set", "algorithm.damping=0.5", "--output", "it")
    code, out, err = simfbo("run", "plugged-task", *SMALL, *flags)
    assert (code, err) == (0, "")
    assert "Mine on plugged-task (3 clients): finished after 4 of 4" in out
    with pytest.raises(SystemExit):
        main(("run", "--help"))
    assert "fedbioacc_local, plugged or broken" in " ".join(capsys.readouterr().out.split())
    assert "broken" not in sys.modules
    assert simfbo("run", "quadratic", "--algorithm", "broken") == (
        2, "", "simfbo: 'broken:method' cannot be imported: on purpose.\n")  # fmt: skip
    assert simfbo("cost", "quadratic", "--algorithm", "shrofbo")[0] == 0
