"""`simfbo run`, and what holds for every command: files, numbers, sentences and exit codes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from simfbo import datasets
from simfbo.cli.main import commands, main
from simfbo.errors import UserError
from simfbo.runs.history import History
from simfbo.runs.variables import load_variables

FILES = {"history.jsonl", "figure.png", "figure.svg", "report.html", "summary.txt", "variables.npz"}
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
    assert re.findall(r"^round +(\d+)   grad norm squared ", out, re.M) == ["0", "1", "2", "3"]
    x, y = load_variables(first / "variables.npz", np.zeros(4), np.zeros(5))
    assert (x.shape, y.shape) == ((4,), (5,))
    assert np.abs(x).max() > 0

    code, out, err = simfbo(*RUN, "--quiet")
    assert (code, err) == (0, "")
    assert "round      1" not in out
    assert content(first) == before
    second = Path("runs/quadratic-simfbo-seed0-2")
    assert set(content(second)) == FILES
    assert History.load(second).column("x_error") == history.column("x_error")

    code, out, err = simfbo(*RUN, "--output", str(first), "--seed", "5")
    assert (code, out) == (2, "\n")
    assert err == (
        f"simfbo: {first} already holds a run: choose another output folder, or go on with it: "
        f"simfbo run --resume {first}.\n"
    )
    assert content(first) == before

    code, out, err = simfbo("report", str(first), str(second), "--output", "both")
    assert (code, err) == (0, "")
    assert out == "both/figure.png\nboth/figure.svg\nboth/report.html\n"
    page = Path("both/report.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", page) == ["SimFBO"] * 2

    code, _, err = simfbo("report", str(first), "--metric", "loss")
    assert code == 2
    assert err.startswith("simfbo: The history holds no 'loss'; it holds round, communication_")
    assert not Path("report").exists()


def test_run_on_digits(simfbo):
    code, out, err = simfbo(*DIGITS, "--algorithm", "shrofbo", "--output", "here/new")
    assert (code, err) == (0, "")
    assert set(content(Path("here/new"))) == FILES
    history = History.load("here/new")
    assert list(history.records[-1])[-3:] == ["test_accuracy", "test_loss", "train_accuracy"]
    # x: 64 x 5 + 5, y and v: 5 x 10 + 10; two clients, two rounds, and one norm each up.
    assert history.records[-1]["floats_down"] == 2 * 2 * (325 + 120)
    assert history.records[-1]["floats_up"] == 2 * 2 * (325 + 121)
    correct = history.records[-1]["test_accuracy"] * 360
    assert correct == pytest.approx(round(correct))
    assert out.startswith("round      0   test accuracy ")
    assert "ShroFBO on hyper-representation (digits, mlp, iid, 4 clients): finished" in out


def test_interrupted(simfbo, monkeypatch):
    watched = commands.run_config

    def interrupted(config, task, directory, on_round, *rest):
        def stop(t, record):
            on_round(t, record)
            if t == 1:
                raise KeyboardInterrupt

        return watched(config, task, directory, stop, *rest)

    monkeypatch.setattr(commands, "run_config", interrupted)
    code, _, err = simfbo(*RUN, "--output", "it")
    assert (code, err) == (130, "simfbo: to go on: simfbo run --resume it\n")
    history = History.load("it")
    assert history.end == {"status": "interrupted"}
    assert history.column("round") == [0, 1]
    assert set(content(Path("it"))) == FILES
    assert "interrupted after 1 of 3 iterations." in Path("it/summary.txt").read_text()
    assert Path("it/checkpoint-0000000001.npz").exists()
    monkeypatch.setattr(commands, "run_config", watched)
    code, out, err = simfbo("run", "--resume", "it", "--quiet")
    assert (code, err) == (0, "")
    assert "finished after 3 of 3 iterations." in out
    assert simfbo(*RUN, "--output", "whole")[0] == 0
    states = [np.load(Path(name) / "checkpoint-0000000003.npz") for name in ("it", "whole")]
    for name in states[0].files:
        if name != "manifest":
            np.testing.assert_array_equal(states[0][name], states[1][name])
    assert same_but_clocks("it", "whole")
    code, out, err = simfbo("run", "--resume", "it")
    assert (code, err) == (0, "")
    assert out == "it has finished: nothing is left to do.\n"


def same_but_clocks(a, b):
    """Return whether two histories agree in all but what the clock says."""
    clocks = ("seconds", "cpu_seconds")
    first, second = History.load(a), History.load(b)
    return (
        all(
            {k: v for k, v in r.items() if k not in clocks}
            == {k: v for k, v in s.items() if k not in clocks}
            for r, s in zip(first.records, second.records, strict=True)
        )
        and first.end == second.end
    )


def test_interrupted_before_the_first_evaluation(simfbo, monkeypatch):
    def evaluate(state):
        raise KeyboardInterrupt

    build = commands.build_task
    monkeypatch.setattr(
        commands, "build_task", lambda *given: build(*given)._replace(evaluate=evaluate)
    )
    code, out, err = simfbo(*RUN, "--output", "it")
    assert (code, err) == (130, "simfbo: to go on: simfbo run --resume it\n")
    assert "The run ended before its first evaluation." in out
    assert History.load("it").end == {"status": "interrupted"}
    assert History.load("it").records == []


def test_interrupted_elsewhere(simfbo, monkeypatch):
    def build(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "build_task", build)
    assert simfbo(*RUN) == (130, "", "simfbo: interrupted.\n")


def subprocess_environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "300"}


def test_a_real_ctrl_c(tmp_path):
    # The handler is set explicitly, since background shells hand down an ignored SIGINT.
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from simfbo.cli.main import main; sys.exit(main())"
    )
    arguments = ("run", "quadratic", "--rounds", "9999999", "--every", "50", "--output", "it",
                 "--quiet", "--set", "task.clients=2")  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=tmp_path,
        env=subprocess_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    file = tmp_path / "it" / "history.jsonl"
    try:
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text().count("\n") > 3):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "simfbo: to go on: simfbo run --resume it\n")
    assert ": interrupted after " in out
    history = History.load(tmp_path / "it")
    assert history.end == {"status": "interrupted"}
    assert history.column("round")[:3] == [0, 50, 100]
    assert set(content(tmp_path / "it")) == FILES


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
        r"simfbo: diverged in round 1: the norm of [xyv] is \S+ after round 1, the limit \S+; "
        r"client \d sent the largest message. Smaller steps for [xyv] often help.",
        first,
    )
    sentence = "simfbo: try smaller steps, as --set algorithm.server.x=0.01, or simfbo tune."
    assert second == sentence
    assert "SimFBO on quadratic (3 clients): diverged after 1 of 50 iterations" in out
    history = History.load("it")
    assert (history.end["status"], history.end["round"]) == ("diverged", 1)
    assert len(history.records) == 2
    assert set(content(Path("it"))) == FILES
    code, out, err = simfbo("run", "--resume", "it")
    assert (code, err) == (1, first + "\n")
    assert out == "it has diverged: nothing is left to do.\n"


def test_epsilon_stands_beside_the_metrics(simfbo):
    code, out, _ = simfbo(*RUN, "--quiet", "--output", "it", "--set", "privacy.noise.x=5")
    assert code == 0
    assert re.search(r"v error \S+, epsilon \d+", out)
    spent = History.load("it").column("epsilon")
    assert spent[0] == 0 < spent[1] < spent[-1]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["algorithm.name=fednest", "privacy.delta=0.1"], "'privacy' is accounted for simfbo"),
        (["sampling.kind=with-replacement", "privacy.delta=0.1"], "'privacy' needs sampling"),
        (["aggregation.x=median", "privacy.delta=0.1"], "'privacy' is accounted for the mean"),
        (["gate.min_replies=4"], "'gate.min_replies' is 4, but only 3 are asked."),
        (["gate.max_nrm=4"], "'gate.max_nrm' is no setting. Did you mean 'gate.max_norm'?"),
        (["aggregation.x=mode"], "'aggregation.x' is wrong: input should be 'mean', 'median'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(simfbo, settings, sentence):
    flags = [part for setting in settings for part in ("--set", setting)]
    code, _, err = simfbo(*RUN, *flags)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"simfbo: {sentence}")


def stop(*given):
    raise UserError("Stop.")


def test_unequal_local_work_is_warned_of(simfbo, monkeypatch):
    monkeypatch.setattr(commands, "_watch", stop)
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
    monkeypatch.setattr(commands, "_watch", lambda config, *given: watched.append(config) or stop())
    wanted = (*DIGITS, "--dataset", "mnist")
    assert simfbo(*wanted) == (2, "", "simfbo: MNIST could not be fetched (no network?).\n")
    assert simfbo(*wanted, "--or-digits")[2] == (
        "simfbo: mnist could not be fetched (no network?), so this runs on digits.\nsimfbo: Stop.\n"
    )
    (config,) = watched
    assert (config.task.dataset, config.task.clients, config.task.hidden) == ("digits", 20, 5)


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
            "Name a task: quadratic, hyper-representation, regularisation, label-cleaning, "
            "long-tail, fair; or give --config FILE.",
        ),
        (("--config", "no.toml"), "no.toml cannot be read: No such file or directory."),
        (
            ("quadratic", "--set", "task.client=3"),
            "'task.client' is no setting. Did you mean 'task.clients'?",
        ),
        (("quadratic", "--set", "x"), "'x' is no setting: write KEY=VALUE, as in task.clients=50."),
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
    def build(*given):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(commands, "build_task", build)
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
    assert out.startswith("usage: simfbo [-h] COMMAND ...")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--rounds", "many"), "--rounds: give a whole number, got 'many'."),
        (("--rounds", "9" * 5000), f"--rounds: give a whole number, got '{66 * '9'}...{9 * '9'}'."),
        (("--rounds",), "--rounds: expected one argument."),
        (("--round\n=3",), "'--round\\n=3' is no flag: see simfbo COMMAND --help."),
        (("--tau", "1\n2"), "--tau takes 5, 1..10 or 1,2,3; got '1\\n2'."),
    ],
)
def test_a_flag_that_is_none(simfbo, arguments, sentence):
    assert simfbo("run", "quadratic", *arguments) == (2, "", f"simfbo: {sentence}\n")


def test_help_is_light(tmp_path):
    script = (
        "import contextlib, io, sys\n"
        "from simfbo.cli.main import main\n"
        "for command in ([], ['run'], ['cost'], ['check'], ['data'], ['report']):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout("
        "io.StringIO()) as o:\n"
        "        main([*command, '--help'])\n"
        "    assert o.getvalue().startswith(' '.join(['usage: simfbo', *command]))\n"
        "with contextlib.redirect_stderr(io.StringIO()) as e:\n"
        "    assert main(['run', 'quadratic', '--set', 'task.client=3']) == 2\n"
        "assert 'clients' in e.getvalue()\n"
        "print(sorted({'jax', 'numpy', 'matplotlib', 'optax'} & set(sys.modules)))\n"
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
