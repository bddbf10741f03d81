"""`simfbo run`, and what holds for every command: files, numbers, sentences and exit codes."""

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from simfbo import datasets
from simfbo.cli.arguments import configuration
from simfbo.cli.main import build_parser, main
from simfbo.config import build_task
from simfbo.errors import UserError
from simfbo.runs.checkpoint import load_variables
from simfbo.runs.history import History

FILES = {"history.jsonl", "figure.png", "figure.svg", "report.html", "card.md", "summary.txt",
         "variables.npz"}  # fmt: skip
SMALL = ("--clients", "3", "--cohort", "3", "--rounds", "3", "--every", "1")
RUN = ("run", "quadratic", *SMALL)
DIGITS = (
    "run", "hyper-representation", "--clients", "4", "--cohort", "2", "--rounds", "2",
    "--set", "task.hidden=5", "--set", "task.batch_size=8",
)  # fmt: skip


def content(directory: Path) -> dict[str, bytes]:
    """Return the files of a folder but its checkpoints."""
    found = {path.name: path.read_bytes() for path in directory.iterdir()}
    return {name: data for name, data in found.items() if not name.startswith("checkpoint-")}


# run


def test_run_writes_everything_and_never_over_another(simfbo):
    code, out, err = simfbo(*RUN)
    assert (code, err) == (0, "")
    first = Path("runs/quadratic-simfbo-seed0")
    before = content(first)
    assert set(before) == FILES
    history = History.load(first)
    assert history.end == {"status": "finished"}
    assert history.column("round") == [0, 1, 2, 3]
    # Three clients, 4 + 5 + 5 floats of eight bytes, three rounds.
    assert history.column("bytes_up") == [0, 336, 672, 1008]
    assert history.header["config"]["task"]["clients"] == 3
    assert (history.header["algorithm"], history.header["seed"]) == ("SimFBO", 0)
    summary = before["summary.txt"].decode()
    assert summary.startswith(
        "SimFBO on quadratic (3 clients): finished after 3 of 3 iterations.\nResult: grad norm "
    )
    assert out.endswith(f"{summary}Figure, page, history and variables are in {first}\n")
    assert re.findall(r"^iteration +(\d+)   grad norm squared ", out, re.M) == ["0", "1", "2", "3"]
    x, y = load_variables(first / "variables.npz", np.zeros(4), np.zeros(5))
    assert (x.shape, y.shape) == ((4,), (5,))
    assert np.abs(x).max() > 0

    code, out, err = simfbo(*RUN, "--quiet")
    assert (code, err) == (0, "")
    assert "iteration      1" not in out
    assert content(first) == before
    second = Path("runs/quadratic-simfbo-seed0-2")
    assert set(content(second)) == FILES
    assert History.load(second).column("x_error") == history.column("x_error")

    code, out, err = simfbo(*RUN, "--output", str(first), "--seed", "5")
    assert (code, out) == (2, "")
    assert err == (
        f"simfbo: {first} already holds a run: choose another folder, or continue the run with "
        "--resume.\n"
    )
    assert content(first) == before

    code, out, err = simfbo("report", str(first), str(second), "--output", "both")
    assert (code, err) == (0, "")
    assert out == "both/figure.png\nboth/figure.svg\nboth/report.html\n"
    summaries = Path("both/report.html").read_text().partition("<noscript>")[2]
    assert re.findall("<h2>(.*?)</h2>", summaries) == ["SimFBO"] * 2

    code, _, err = simfbo("report", str(first), "--metric", "loss")
    assert code == 2
    assert err.startswith("simfbo: The history has no 'loss'; it has round, communication_")
    assert not Path("report").exists()


def test_everything_is_made_once(simfbo, monkeypatch):
    calls = Counter()
    for place in ("config.run.checked", "config.build_task.build_task", "config.build.build_method",
                  "config.build.build_federation", "config.build.SimulatedFederation"):  # fmt: skip
        module, _, name = f"simfbo.{place}".rpartition(".")
        real = getattr(importlib.import_module(module), name)

        def counted(*given, real=real, name=name, **named):
            calls[name] += 1
            return real(*given, **named)

        monkeypatch.setattr(f"simfbo.{place}", counted)
    assert simfbo(*RUN, "--quiet")[0] == 0
    assert set(calls.values()) == {1}
    assert len(calls) == 5


def test_run_on_digits(simfbo):
    code, out, err = simfbo(*DIGITS, "--algorithm", "shrofbo", "--output", "here/new")
    assert (code, err) == (0, "")
    assert set(content(Path("here/new"))) == FILES
    history = History.load("here/new")
    metrics = [name for name in history.records[-1] if not name.startswith("clients_")]
    assert metrics[-3:] == ["test_accuracy", "test_loss", "train_accuracy"]
    # x: 64 x 5 + 5, y and v: 5 x 10 + 10; two clients, two rounds, and one norm each up.
    assert history.records[-1]["floats_down"] == 2 * 2 * (325 + 120)
    assert history.records[-1]["floats_up"] == 2 * 2 * (325 + 121)
    correct = history.records[-1]["test_accuracy"] * 360
    assert correct == pytest.approx(round(correct))
    assert out.startswith("iteration      0   test accuracy ")
    assert "ShroFBO on hyper-representation (digits, mlp, iid, 4 clients): finished" in out


def test_diverged(simfbo):
    steps = (
        "--set",
        "algorithm.server={x=1e99, y=1e99, v=1e99}",
        "--set",
        "algorithm.radius=1e150",
    )
    code, out, err = simfbo(*RUN, "--rounds", "50", "--output", "it", *steps)
    assert code == 1
    first, second = err.splitlines()
    assert re.fullmatch(
        r"simfbo: diverged in iteration 2: the norm of [xyv] is \S+ after iteration 2, the limit "
        r"\S+; client \d sent the largest message. A smaller step size for [xyv] often helps.",
        first,
    )
    sentence = (
        "simfbo: try smaller steps, for example --set algorithm.server.x=0.01, or simfbo tune."
    )
    assert second == sentence
    assert "SimFBO on quadratic (3 clients): diverged after 2 of 50 iterations" in out
    history = History.load("it")
    assert (history.end["status"], history.end["round"]) == ("diverged", 2)
    assert len(history.records) == 3
    assert set(content(Path("it"))) == FILES
    code, out, err = simfbo("run", "--resume", "it")
    assert (code, err) == (1, first + "\n")
    assert out == "it has diverged: nothing left to do.\n"


@pytest.mark.filterwarnings("default:This run ends at epsilon")
def test_epsilon_is_printed_first_and_is_one_of_the_metrics(simfbo):
    code, out, err = simfbo(*RUN, "--quiet", "--output", "it", "--set", "privacy.noise.x=5")
    assert code == 0
    assert re.search(r"v error \S+, epsilon \d+", out)
    spent = History.load("it").column("epsilon")
    assert spent[0] == 0 < spent[1] < spent[-1]
    assert out.startswith(f"Private: epsilon {spent[-1]:.3g} (delta 1e-05) at the end.\n")
    assert err == (
        f"simfbo: This run ends at epsilon {spent[-1]:.3g}, and above 10 hardly anything is "
        "protected: add noise, run fewer iterations, or sample few of many clients.\n"
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["algorithm.name=fednest", "privacy.delta=0.1"], "'privacy' is accounted for simfbo"),
        (["sampling.kind=with-replacement", "privacy.delta=0.1"], "'privacy' needs sampling"),
        (["aggregation.x=median", "privacy.delta=0.1"], "'privacy' is accounted for the mean"),
        (
            ["gate.min_replies=4"],
            "'gate.min_replies' is 4, but only 3 clients are sampled: lower it.",
        ),
        (["gate.max_nrm=4"], "Unknown setting 'gate.max_nrm'. Did you mean 'gate.max_norm'?"),
        (["aggregation.x=mode"], "'aggregation.x' should be 'mean', 'median'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(simfbo, settings, sentence):
    flags = [part for setting in settings for part in ("--set", setting)]
    code, _, err = simfbo(*RUN, *flags)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"simfbo: {sentence}")


@pytest.mark.filterwarnings("default::simfbo.errors.ClientWarning")
def test_clients_that_stand_out_are_named_live_and_in_the_end(simfbo, monkeypatch):
    monkeypatch.setattr("simfbo.robust.anomalies.few", lambda *given: np.array([1]))
    flags = "--rounds", "9", "--detect-anomalies", "--output", "here"
    code, out, err = simfbo("run", "quadratic", *SMALL[:4], *flags)
    (line,) = History.load("here").warnings
    assert (code, err) == (0, f"simfbo: Iteration 8: {line['text']}.\n")
    assert re.fullmatch(r"client 1 sends \d+ % of the norm: use an aggregator .*", line["text"])
    assert f"Warning in iteration 8: {line['text']}.\n" in out
    assert f"Warning in iteration 8: {line['text']}." in Path("here/report.html").read_text()


def test_a_run_on_flower_shows_warnings_as_they_come(capsys):
    from simfbo.cli._flower_lines import RunBar
    from simfbo.cli.flower import _print_end

    with RunBar() as bar:
        bar.show({"kind": "warning", "round": 8, "text": "clients 3, 8 send [97 %] of the norm"})
    _print_end(Path("here"), {"status": "finished", "warnings": 2})
    out = capsys.readouterr().out
    assert "iteration 8: clients 3, 8 send [97 %] of the norm\n" in out
    assert "2 warnings of clients whose messages stand out, above.\nFinished." in out


def test_the_automatic_limit_is_a_setting(simfbo):
    code, _, err = simfbo(*RUN, "--set", "gate.max_norm=auto", "--output", "here")
    assert (code, err) == (0, "")
    assert History.load("here").header["config"]["gate"]["max_norm"] == "auto"
    code, _, err = simfbo(*RUN, "--set", "gate.max_norm=often", "--output", "there")
    assert (code, err) == (2, "simfbo: 'gate.max_norm' should be a valid number, got 'often'.\n")


def stop(*given):
    raise UserError("Stop.")


def test_unequal_local_work_is_warned_of(simfbo, monkeypatch):
    monkeypatch.setattr("simfbo.cli.run._run_with_display", stop)
    code, _, err = simfbo(*RUN, "--tau", "1,1,4")
    assert code == 2
    assert err == (
        "simfbo: unequal local work biases SimFBO: use ShroFBO (33% of the weight is misplaced; "
        "client 2 counts 2 times what it should).\nsimfbo: Stop.\n"
    )
    for quiet in (("--tau", "4"), ("--tau", "1,1,4", "--algorithm", "shrofbo")):
        assert simfbo(*RUN, *quiet)[2] == "simfbo: Stop.\n"


def test_or_digits(simfbo, monkeypatch):
    load = datasets.load

    def unreachable(name, *given):
        if name != "digits":
            raise UserError("MNIST could not be fetched (no network?).")
        return load(name, *given)

    monkeypatch.setattr(datasets, "load", unreachable)
    watched = []

    def watch(built, *given):
        watched.append(built.config)
        stop()

    monkeypatch.setattr("simfbo.cli.run._run_with_display", watch)
    wanted = (*DIGITS, "--dataset", "mnist")
    assert simfbo(*wanted) == (2, "", "simfbo: MNIST could not be fetched (no network?).\n")
    assert simfbo(*wanted, "--or-digits")[2] == (
        "simfbo: mnist could not be fetched (no network?), using digits instead.\nsimfbo: Stop.\n"
    )
    (config,) = watched
    assert (config.task.dataset, config.task.clients, config.task.hidden) == ("digits", 20, 5)
    monkeypatch.setattr("simfbo.studies.comparison.jobs", lambda methods, *given: stop())
    demo = str(Path(__file__).parents[2] / "examples" / "demo.toml")
    assert simfbo("compare", "--config", demo, "--or-digits")[2] == (
        "simfbo: mnist could not be fetched (no network?), using digits instead.\nsimfbo: Stop.\n"
    )


def test_or_digits_hides_no_mistake_on_digits(simfbo):
    code, _, err = simfbo(*DIGITS, "--or-digits", "--set", "task.model=cnn")
    assert code == 2
    assert err == (
        "simfbo: The CNN needs images of at least 16 x 16 pixels: use --set task.model=mlp.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (),
            "Name a task (quadratic, hyper-representation, regularisation, label-cleaning, "
            "long-tail or fair), or give --config FILE.",
        ),
        (("--config", "no.toml"), "no.toml cannot be read: No such file or directory."),
        (
            ("quadratic", "--set", "task.client=3"),
            "Unknown setting 'task.client'. Did you mean 'task.clients'?",
        ),
        (("quadratic", "--set", "x"), "Write 'x' as KEY=VALUE, for example task.clients=50."),
        (("quadratic", "--tau", "1,2"), "2 numbers of local steps are given for 10 clients."),
        (
            ("quadratic", "--cohort", "11"),
            "A cohort of 11 cannot be drawn from 10 clients: lower it.",
        ),
        (
            ("hyper-representation", "--clients", "1000"),
            "Every client needs two samples, one for each level: use fewer clients.",
        ),
    ],
)
def test_wrong_input(simfbo, arguments, sentence):
    assert simfbo("run", *arguments) == (2, "", f"simfbo: {sentence}\n")
    assert not Path("runs").exists()


def test_an_error_of_ours_is_one_line(simfbo, monkeypatch):
    def broken(*given):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(build_task, "build_task", broken)
    assert simfbo(*RUN) == (
        1,
        "",
        "simfbo: failed: RuntimeError: two lines (set SIMFBO_TRACEBACK=1 to see where).\n",
    )
    monkeypatch.setenv("SIMFBO_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="two"):
        main(RUN)


def test_no_command(simfbo):
    code, out, err = simfbo()
    assert (code, err) == (2, "")
    assert out.startswith("usage: simfbo [-h] [--version] COMMAND ...")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--rounds", "many"), "--rounds: give a whole number, got 'many'."),
        (("--rounds", "9" * 5000), f"--rounds: give a whole number, got '{66 * '9'}...{9 * '9'}'."),
        (("--rounds",), "--rounds: expected one argument."),
        (("--rounds", "1.5"), "--rounds: give a whole number, got '1.5'."),
        (("--round\n=3",), "Unknown flag '--round'. Did you mean '--rounds'?"),
        (("--rouds", "3"), "Unknown flag '--rouds'. Did you mean '--rounds'?"),
        (("-rounds", "3"), "Unknown flag '-rounds'. Did you mean '--rounds'?"),
        (("--xyz",), "Unknown flag '--xyz'. See simfbo COMMAND --help."),
        (("digits",), "'digits' is one argument too many. See simfbo COMMAND --help."),
        (("--tau", "1\n2"), "--tau takes 5, 1..10 or 1,2,3; got '1\\n2'."),
    ],
)
def test_a_flag_that_is_invalid(simfbo, arguments, sentence):
    assert simfbo("run", "quadratic", *arguments) == (2, "", f"simfbo: {sentence}\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("rnu",), "Unknown command 'rnu'. Did you mean 'run'?"),
        (("flower", "stauts"), "Unknown command 'stauts'. Did you mean 'status'?"),
        (("flower", "up", "--onlyapps", "x"), "Unknown flag '--onlyapps'. Did you mean "
         "'--only-apps'?"),
        (("tune", "--budgetbytes", "5"), "Unknown flag '--budgetbytes'. Did you mean "
         "'--budget-bytes'?"),
        (("watch", "--port", "x"), "--port: give a whole number, got 'x'."),
    ],
)  # fmt: skip
def test_what_is_misspelt_is_answered_with_what_is_close(simfbo, arguments, sentence):
    assert simfbo(*arguments) == (2, "", f"simfbo: {sentence}\n")


def test_numbers_and_names_as_people_write_them():
    parser = build_parser("run")
    words = "run Quadratic --rounds 1e3 --clients 1,000 --cohort 10.0 --tau 1e1 --algorithm SimFBO"
    found = configuration(parser.parse_args([*words.split(), "--set", "seed=2e0"]))
    assert (found.rounds, found.task.clients, found.sampling.size) == (1000, 1000, 10)
    assert (found.local_work.tau, found.seed) == (10, 2)
    assert (found.task.name, found.algorithm.name) == ("quadratic", "simfbo")


def subprocess_environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "300"}


def test_help_is_light(tmp_path):
    script = (
        "import contextlib, io, sys\n"
        "from simfbo.cli.main import main\n"
        "commands = 'run compare tune reproduce cost check data report flower'.split()\n"
        "for command in ([], *([name] for name in commands)):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout("
        "io.StringIO()) as o:\n"
        "        main([*command, '--help'])\n"
        "    assert o.getvalue().startswith(' '.join(['usage: simfbo', *command]))\n"
        "with contextlib.redirect_stderr(io.StringIO()) as e:\n"
        "    assert main(['run', 'quadratic', '--set', 'task.client=3']) == 2\n"
        "assert 'clients' in e.getvalue()\n"
        "print(sorted({'jax', 'numpy', 'matplotlib', 'optax', 'flwr'} & set(sys.modules)))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=subprocess_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.stdout, found.stderr, found.returncode) == ("[]\n", "", 0)


def test_clients_are_not_asked_if_they_should_not_be(simfbo):
    shared = (*RUN, "--rounds", "2", "--quiet")
    code, out, _ = simfbo(*shared, "--no-client-metrics", "--output", "here")
    assert (code, "Clients'" in out) == (0, False)
    history = History.load("here")
    assert history.client_scores is None
    assert "bytes_evaluation" not in history.records[-1]
    code, out, _ = simfbo(*shared, "--output", "there")
    assert (code, "Clients' upper loss: mean" in out) == (0, True)
    asked = History.load("there").records[-1]
    for name in ("x_error", "communication_rounds", "bytes_down", "bytes_up"):
        assert asked[name] == history.records[-1][name]
