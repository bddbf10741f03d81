"""What newcomers type and what machines do to a command: one sentence each, never a traceback."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simfbo import __version__
from simfbo.cli import compare, main, output
from simfbo.runs import files
from simfbo.runs.files import compilation_folder
from simfbo.runs.history import History

SMALL = ("--clients", "3", "--cohort", "3", "--rounds", "3", "--quiet")
RUN = ("run", "quadratic", *SMALL, "--output", "it")


def test_version(simfbo, capsys):
    with pytest.raises(SystemExit, match="0"):
        simfbo("--version")
    assert capsys.readouterr().out == f"simfbo {__version__}\n"


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("mnist", "is a data set, not a task: write hyper-representation --dataset mnist."),
        ("Schools", "is a data set, not a task: write regularisation --dataset schools."),
        ("voters", "is a data set, not a task: load it in Python by "
         "simfbo.datasets.load_frame('voters')."),
        ("my.csv", "is a file, not a task: a table of yours is fitted in Python, as in "
         "FederatedLogistic().fit(df, y, clients='hospital') (docs/how-to-tune-clean-repair.md)."),
        ("my.toml", "is a file, not a task: write --config my.toml."),
        ("my/task.py", "is a file, not a task: write task:NAME, with the name of the task in it."),
        ("begun", "is a run, not a task: continue it with simfbo run --resume begun."),
    ],
)  # fmt: skip
def test_what_is_no_task(simfbo, task, sentence):
    Path("begun").mkdir()
    Path("begun", "history.jsonl").touch()
    for command in ("run", "compare", "tune", "cost"):
        assert simfbo(command, task) == (2, "", f"simfbo: '{task}' {sentence}\n")


def test_fedavg_is_known_and_not_listed(simfbo):
    assert simfbo(*RUN, "--algorithm", "FedAvg")[0] == 0
    first, *_, last = History.load("it").records
    assert last["y_error"] < first["y_error"]
    assert last["x_error"] == first["x_error"]
    assert "fedavg" not in simfbo("run", "quadratic", "--algorithm", "none")[2]
    assert "Did you mean 'fedavg'?" in simfbo("run", "quadratic", "--algorithm", "fedavgg")[2]


@pytest.mark.parametrize(
    ("flags", "file", "seeds"),
    [
        (("--seeds", "3"), "[7]", [0, 1, 2]),
        (("--seeds", "7..7"), "2", [7]),
        ((), "2", [0, 1]),
        ((), "[2]", [2]),
    ],
)
def test_how_many_seeds(flags, file, seeds):
    Path("my.toml").write_text(f"seeds = {file}\n[task]\nname = 'quadratic'\n[methods.simfbo]\n")
    parser = main.build_parser("compare")
    assert compare.plan(parser.parse_args(["compare", "--config", "my.toml", *flags]))[1] == seeds


class Pipe(io.RawIOBase):
    """Fails from the second write on, as long as it is asked to."""

    def __init__(self, code):
        self.code, self.writes = code, 0

    def writable(self):
        return True

    def write(self, data):
        self.writes += 1
        if self.code and self.writes > 1:
            raise OSError(self.code, os.strerror(self.code))
        return len(data)


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (errno.EPIPE, 141, ""),
        (errno.EIO, 141, ""),  # a terminal that was closed
        (errno.ENOSPC, 2, "simfbo: Standard output cannot be written: No space left on device.\n"),
    ],
)
def test_output_that_nobody_takes(simfbo, monkeypatch, number, code, text):
    pipe = Pipe(number)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(pipe)))
        run = [flag for flag in RUN if flag != "--quiet"]
        assert simfbo(*run, "--every", "1")[::2] == (code, text)
        pipe.code = 0
    assert History.load("it").column("round") == [0, 1]
    assert Path("it/checkpoint-0000000001.npz").exists()
    assert simfbo("run", "--resume", "it", "--quiet")[0] == 0


def test_a_disk_that_is_full_when_the_report_is_written(simfbo, monkeypatch):
    def replace(source, target):
        if Path(target).name == "figure.svg":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", replace)
        code, _, err = simfbo(*RUN)
    sentence = "it/figure.svg cannot be used: No space left on device."
    assert (code, err) == (2, f"simfbo: {sentence} Resume with: simfbo run --resume it\n")
    assert History.load("it").end == {"status": "finished"}
    assert simfbo("run", "--resume", "it", "--quiet")[0] == 0
    assert Path("it/figure.svg").exists()


def test_text_that_an_encoding_lacks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.prepare()
    print("0.9 ± 0.1 of τ, é, \udcff", flush=True)
    assert raw.getvalue() == b"0.9 +- 0.1 of tau, \\xe9, \xff\n"


def test_streams_that_are_closed():
    for closed in ("<&- >&- 2>&-", "2>&-"):
        command = f"'{sys.executable}' -m simfbo.cli.main data --data-dir empty {closed}"
        found = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=240)
        assert (found.returncode, found.stderr) == (0, "")


def test_a_user_without_a_home_folder(simfbo, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    for name in ("XDG_CACHE_HOME", "SIMFBO_DATA_DIR", "FLWR_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert compilation_folder() is None
    monkeypatch.setenv("HOME", os.devnull)  # nothing can be written to it
    assert compilation_folder() is None
    monkeypatch.delenv("HOME")
    code, _, err = simfbo("data")
    assert (code, err.count("\n")) == (2, 1)
    assert "SIMFBO_DATA_DIR" in err
    assert simfbo("flower", "down") == (
        0,
        f"Nothing is running in {Path('federation').resolve()}.\n",
        "",
    )


@pytest.mark.parametrize("name", ["déjà €", os.fsdecode(b"\xff\xfe")])
def test_names_of_any_bytes(name, monkeypatch):
    def simfbo(*words):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        return main.main(words)

    Path(name).mkdir()
    Path(name, "my.toml").write_text("rounds = 2\n[task]\nname = 'quadratic'\nclients = 3\n")
    given = ("--config", f"{name}/my.toml", "--track", "csv", "--json")
    assert simfbo("run", *given, "--output", f"{name}/it") == 0
    assert simfbo("run", "--resume", f"{name}/it") == 0
    assert simfbo("report", f"{name}/it", "--output", f"{name}/report") == 0
    assert simfbo("data", "--data-dir", f"{name}/data") == 0
    assert {path.name for path in Path().iterdir()} == {name}


def test_a_file_that_cannot_be_read(simfbo, monkeypatch):
    def load(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{path}/history.jsonl")

    monkeypatch.setattr(History, "load", load)
    sentence = "simfbo: it/history.jsonl cannot be used: Permission denied.\n"
    assert simfbo("report", "it") == (2, "", sentence)
