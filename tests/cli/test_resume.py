"""`--resume` and what stands in its way."""

import json
from pathlib import Path

import numpy as np
import pytest

from simfbo.runs.history import History

RUN = ("run", "quadratic", "--set", "task.clients=3", "--rounds", "3", "--every", "1", "--quiet")


def test_starved(simfbo):
    flags = ("--set", "gate.drop_out=0.99", "--rounds", "30", "--output", "it")
    code, out, err = simfbo(*RUN, *flags)
    assert code == 1
    assert "starved after " in out
    assert (
        "Excluded replies: 6, from 3 clients; most frequent reason (6): the client did not " in out
    )
    # These drop-outs were asked for and will come again, so resuming is not suggested.
    assert err == (
        "simfbo: starved in iteration 1: only 0 of 3 replies to 'simfbo_step' count: client 0 did "
        "not reply. Sample more clients, or lower min_replies.\n"
    )
    assert History.load("it").end["status"] == "starved"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--resume", "no"), "There is no run at no: pass the folder of a run."),
        (("quadratic", "--resume", "it"), "omit TASK."),
        (("--resume", "it", "--rounds", "9"), "omit --rounds."),
        (("--resume", "it", "--set", "seed=3"), "omit --set."),
        (("--resume", "it", "--output", "b"), "omit --output."),
    ],
)
def test_resume_takes_no_settings(simfbo, arguments, sentence):
    code, out, err = simfbo("run", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("simfbo: ")
    assert err.endswith(sentence + "\n")
    assert err.count("\n") == 1


@pytest.mark.filterwarnings("default:.*cannot be used")
def test_resume_after_damage(simfbo):
    simfbo(*RUN, "--output", "it", "--checkpoint-seconds", "0")
    file = Path("it/history.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))  # killed just before its end
    newest, older = (Path(f"it/checkpoint-000000000{t}.npz") for t in (3, 2))
    newest.write_bytes(newest.read_bytes()[:-1])
    code, _, err = simfbo("run", "--resume", "it", "--quiet")
    sentence = "cannot be used (its digest is wrong); trying the previous checkpoint."
    assert (code, err) == (0, f"simfbo: {newest} {sentence}\n")
    assert [json.loads(line)["kind"] for line in file.read_text().splitlines()] == [
        json.loads(line)["kind"] for line in lines
    ]
    file.write_bytes(b"".join(lines[:-1]))
    for damaged in (newest, older):
        damaged.write_bytes(b"\0" * 100)
    code, _, err = simfbo("run", "--resume", "it", "--quiet")
    assert code == 2
    assert err.splitlines()[-1].startswith("simfbo: No checkpoint in it can be used")


def test_what_follows_a_run_is_made_up_for(simfbo):
    """Killed after its end was written and before its variables were: nothing is lost."""
    simfbo(*RUN, "--output", "it")
    before = np.load("it/variables.npz")["['x']"]
    for name in ("variables.npz", "summary.txt", "figure.png"):
        Path("it", name).unlink()
    code, out, err = simfbo("run", "--resume", "it")
    assert (code, err) == (0, "")
    assert "finished after 3 of 3 iterations." in out
    np.testing.assert_array_equal(np.load("it/variables.npz")["['x']"], before)
    assert Path("it/figure.png").exists()


@pytest.mark.parametrize("harm", [(b'"config"', b'"konfig"'), (b'"clients": 3', b'"clients": "x"')])
@pytest.mark.filterwarnings("default:.*damaged")
def test_a_spoilt_header_is_made_up_for_or_one_sentence(simfbo, harm):
    simfbo(*RUN, "--output", "it")
    before = np.load("it/variables.npz")["['x']"]
    file = Path("it/history.jsonl")
    data = file.read_bytes()
    assert harm[0] in data
    lines = data.replace(*harm).splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    code, out, err = simfbo("report", "it")
    assert (code, err) == (0, f"simfbo: {file} is damaged: what cannot be read is left out.\n")
    code, out, err = simfbo("run", "--resume", "it", "--quiet")
    assert (code, err) == (
        0, f"simfbo: {file} was damaged: nothing is lost. The run continues from iteration 3; the "
        "damaged file is kept as history.jsonl.damaged.\n"
    )  # fmt: skip
    assert "finished after 3 of 3 iterations." in out
    np.testing.assert_array_equal(np.load("it/variables.npz")["['x']"], before)
    file.write_bytes(b"".join(lines[:-1]))
    for checkpoint in Path("it").glob("checkpoint-*"):
        checkpoint.unlink()
    for command in (("run", "--resume", "it"), ("report", "it")):
        code, out, err = simfbo(*command)
        sentence = f"{file} is not a history of simfbo: its first line is not a header."
        assert (code, out, err) == (2, "", f"simfbo: {sentence}\n")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"study": "compare"}', "\0"])
@pytest.mark.parametrize("study", ["compare", "tune"])
def test_a_spoilt_plan_is_one_sentence(simfbo, study, text):
    Path("it").mkdir()
    Path("it/study.json").write_text(text)
    code, out, err = simfbo(study, "--resume", "it")
    sentence = f"simfbo: it was not written by `simfbo {study}`: give another folder.\n"
    assert (code, out, err) == (2, "", sentence)
