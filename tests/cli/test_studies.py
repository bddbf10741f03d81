"""`simfbo compare` and `simfbo tune`, with their real worker processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simfbo.config.run import load
from simfbo.runs.history import History

COMPARE = ("compare", "quadratic", "--clients", "3", "--cohort", "3", "--rounds", "4")


def stamps(directory):
    return {path: path.stat().st_mtime_ns for path in Path(directory).rglob("history.jsonl")}


def test_compare(simfbo):
    arguments = (*COMPARE, "--methods", "simfbo,fednest", "--output", "out", "--every", "2")
    code, out, err = simfbo(*arguments, "--seeds", "0,2", "--targets", "1e9")
    assert (code, err) == (0, "")
    assert out.startswith("2 methods x 2 seeds into out\n")
    assert out.endswith("Table, figures and page are in out\n")
    names = [f"{name}-seed{seed}" for seed in (0, 2) for name in ("simfbo", "fednest")]
    files = ["figure.png", "figure.svg", "report.html", "study.json", "table.md"]
    assert sorted(os.listdir("out")) == sorted(names + files)
    histories = {name: History.load(f"out/{name}") for name in names}
    for seed in (0, 2):
        a, b = histories[f"simfbo-seed{seed}"], histories[f"fednest-seed{seed}"]
        # The same data and the same start; then each its own way, ten rounds an iteration.
        assert a.records[0]["x_error"] == b.records[0]["x_error"]
        assert a.records[-1]["x_error"] != b.records[-1]["x_error"]
        assert (a.column("communication_rounds"), b.column("communication_rounds")) == (
            [0, 2, 4],
            [0, 20, 40],
        )
    first = [histories[f"simfbo-seed{seed}"].records[0]["x_error"] for seed in (0, 2)]
    assert first[0] != first[1]
    table = Path("out/table.md").read_text().splitlines()
    assert table[0].startswith(
        "| method | grad norm squared | iterations | rounds | MB | CPU s | to "
    )
    assert table[3].split(" | ")[2:4] == ["4", "40"]
    before = stamps("out")
    # A third seed: what is there is kept, the rest is run; a torn run is run again.
    torn = Path("out/simfbo-seed0/history.jsonl")
    torn.write_text("".join(torn.read_text().splitlines(keepends=True)[:-1]))
    code, _, err = simfbo(*arguments, "--seeds", "0..2", "--jobs", "2", "--quiet")
    assert (code, err) == (0, "")
    after = stamps("out")
    assert len(after) == 6
    assert {p for p in before if before[p] != after[p]} == {torn}
    table = Path("out/table.md").read_text()
    torn.write_text("".join(torn.read_text().splitlines(keepends=True)[:-1]))
    code, _, err = simfbo("compare", "--resume", "out", "--quiet")
    assert (code, err) == (0, "")
    assert [row.split(" | ")[:4] for row in Path("out/table.md").read_text().splitlines()] == [
        row.split(" | ")[:4] for row in table.splitlines()
    ]
    again = History.load("out/simfbo-seed0")
    assert again.column("x_error") == histories["simfbo-seed0"].column("x_error")
    plan = Path("out/study.json").read_bytes()
    code, _, err = simfbo(*arguments, "--rounds", "5", "--seeds", "0")
    assert code == 2
    assert Path("out/study.json").read_bytes() == plan
    assert err == (
        "simfbo: out/simfbo-seed0 holds a run with other settings: choose another output folder.\n"
    )


def test_compare_reads_a_file(simfbo):
    Path("mine.toml").write_text(
        'seeds = [5]\nrounds = 9\n[task]\nname = "quadratic"\nclients = 3\n'
        '[sampling]\nkind = "everyone"\n'
        '[methods.short]\nrounds = 2\nalgorithm = { name = "aggitd", lower_rounds = 2 }\n'
    )
    code, _, err = simfbo("compare", "--config", "mine.toml", "--output", "out", "--quiet")
    assert (code, err) == (0, "")
    history = History.load("out/short-seed5")
    assert history.records[-1]["communication_rounds"] == 2 * (2 * 2 + 3)


def test_a_run_that_fails_in_a_worker_is_one_sentence(simfbo):
    code, _, err = simfbo(*COMPARE, "--methods", "simfbo", "--seeds", "0", "--cohort", "9")
    assert code == 2
    assert err == "simfbo: A cohort of 9 cannot be drawn from 3 clients: lower it.\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("compare",),
            "Name a task: quadratic, hyper-representation, regularisation, "
            "label-cleaning, long-tail, fair; or give --config FILE.",
        ),
        ((*COMPARE, "--seeds", "a"), "--seeds takes 0..2 or 0,5,7; got 'a'."),
        (
            (*COMPARE, "--seeds", "1,1"),
            "'seeds' must be a list of different whole numbers from 0 to 4294967295, got [1, 1].",
        ),
        (
            (*COMPARE, "--seeds", "0..99999999999"),
            "--seeds takes up to 10,000 numbers, got '0..99999999999'.",
        ),
        (
            (*COMPARE, "--set", "seed=3"),
            "Say 'seeds' in place of 'seed': a comparison takes a list of them.",
        ),
        ((*COMPARE, "--targets", "x"), "--targets takes numbers as 0.9,0.95; got 'x'."),
        ((*COMPARE, "--targets", "nan"), "--targets takes numbers as 0.9,0.95; got 'nan'."),
        ((*COMPARE, "--methods", "simfbo", "--jobs", "0"), "--jobs must be at least 1, got 0."),
        (
            (*COMPARE, "--methods", "fednets"),
            "In method 'fednets': 'algorithm.name' is wrong: use simfbo, shrofbo, fednest, "
            "lfednest, aggitd, fedbio, fedmbo or memfbo, got 'fednets'.",
        ),
        (("tune", "quadratic", "--range", "a=1"), "--range takes KEY=LOW..HIGH, got 'a=1'."),
        (
            ("tune", "quadratic", "--budget", "9"),
            "The budget allows 9 iterations, too few for 27 trials: raise --budget or lower "
            "--trials.",
        ),
    ],
)
def test_mistakes(simfbo, arguments, sentence):
    code, _, err = simfbo(*arguments)
    assert (code, err) == (2, f"simfbo: {sentence}\n")


def test_tune_prints_a_winner_that_runs(simfbo):
    code, out, err = simfbo(
        "tune", "quadratic", "--algorithm", "memfbo", "--clients", "3", "--cohort", "3",
        "--budget", "60", "--trials", "4", "--output", "out", "--quiet",
    )  # fmt: skip
    assert (code, err) == (0, "")
    printed = out.partition("# The best of them, also in out/best.toml\n")[2]
    Path("printed.toml").write_text(printed)
    best = load(Path("printed.toml"), {})
    assert best == load(Path("out/best.toml"), {})
    assert best.algorithm.name == "memfbo"
    assert simfbo("run", "--config", "printed.toml", "--rounds", "2", "--quiet")[0] == 0
    Path("out/best.toml").unlink()
    code, again, err = simfbo("tune", "--resume", "out", "--quiet")
    assert (code, err) == (0, "")
    assert again.partition("# The best of them")[2] == out.partition("# The best of them")[2]
    code, _, err = simfbo("compare", "--resume", "out")
    assert (code, err) == (
        2,
        "simfbo: out is no folder that `simfbo compare` wrote: give one.\n",
    )


def test_a_metric_that_some_method_lacks(simfbo):
    arguments = (*COMPARE, "--methods", "simfbo,memfbo", "--seeds", "0", "--output", "out")
    code, _, err = simfbo(*arguments, "--metric", "v_error")
    assert code == 2
    assert err.startswith("simfbo: The history holds no 'v_error'; it holds round")
    assert simfbo(*arguments, "--metric", "y_error")[0] == 0


def endless(tmp_path):
    """Return a comparison without end in a process group of its own, and its history's file."""
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from simfbo.cli.main import main; sys.exit(main())"
    )
    arguments = ("compare", "quadratic", "--methods", "simfbo", "--seeds", "0", "--rounds",
                 "9999999", "--every", "50", "--output", "it", "--clients", "2",
                 "--cohort", "2", "--quiet")  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "300"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    file = tmp_path / "it" / "simfbo-seed0" / "history.jsonl"
    deadline = time.monotonic() + 90
    while not (file.exists() and file.read_text().count("\n") > 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process, file


def grows(file):
    length = file.stat().st_size
    time.sleep(1)
    return file.stat().st_size > length


ENDED = {
    signal.SIGKILL: "A worker process was killed by signal 9, perhaps for want of memory: try "
    "--jobs 1; with --resume, everything goes on from the last checkpoints.",
    signal.SIGTERM: "A worker process was told to end: with --resume, everything goes on from the "
    "last checkpoints.",
}


@pytest.mark.parametrize("how", ENDED)
def test_a_worker_that_ends_is_one_sentence(tmp_path, how):
    process, _ = endless(tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [
        pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(workers) == 1
    os.kill(int(workers[0]), how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == f"simfbo: {ENDED[how]}\n"


def test_workers_end_with_a_killed_parent(tmp_path):
    process, file = endless(tmp_path)
    assert grows(file)
    process.kill()
    process.communicate(timeout=60)  # the worker holds the pipes open as long as it lives
    assert not grows(file)


@pytest.mark.parametrize("politely", [False, True])
def test_ctrl_c_leaves_nothing_behind_and_says_how_to_go_on(tmp_path, politely):
    process, file = endless(tmp_path)
    if politely:
        process.terminate()  # as a service manager does, to the parent alone
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the workers too
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "simfbo: interrupted; to go on: simfbo compare --resume it.\n"
    assert not grows(file)
    last = int(max(file.parent.glob("checkpoint-*")).stem.removeprefix("checkpoint-"))
    assert last >= max(History.load(file).column("round")) - 50  # saved when it was told to end
