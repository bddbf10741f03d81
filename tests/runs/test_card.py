"""Model cards: what they say of runs, and where they know it from."""

import numpy as np
import pytest
from functional import Changed

from simfbo import History, Point, SimulatedFederation, run
from simfbo.algorithms import simfbo
from simfbo.core.data import from_clients, pad_to_buckets
from simfbo.privacy import Privacy, private
from simfbo.runs import card, report
from simfbo.tasks import quadratic

STEPS = Point(x=0.1, y=0.2, v=0.3)


def go(clients=3, method=None, **options):
    """Run a method without its rounds: nothing is computed."""
    task = quadratic(clients=clients, dim_x=2, dim_y=2, samples=4, seed=1)
    chosen = (method or (lambda one: one))(simfbo(task.problem, STEPS))
    still = Changed(chosen, lambda _, state, *given: state)
    return run(still, SimulatedFederation(task.data), task.x0, task.y0, rounds=3, **options)


def section(text, title):
    """Return the lines of a section of a card."""
    return text.partition(f"\n## {title}\n\n")[2].partition("\n\n## ")[0].split("\n")


@pytest.fixture(scope="module")
def history():
    return go(client_metrics={"loss": lambda x, y, batch: 1.0}, config={"task": {"name": "t"}})


def test_sections_and_summary(history):
    text = history.card()
    assert text.startswith(
        "# Model card: SimFBO on t\n\nThe variables x and y of a bilevel problem"
    )
    titles = [line[3:] for line in text.split("\n") if line.startswith("## ")]
    assert titles == ["Data", "Training", "Scores of the clients", "Communication", "Privacy",
                      "Excluded replies and warnings", "Limits", "Settings",
                      "Versions"]  # fmt: skip
    assert "no test on unseen data" in text
    assert section(text, "Settings")[2:] == ["| `task.name` | t |", "| `seed` | 0 |"]
    assert section(text, "Privacy")[0].startswith("Not differentially private: ")
    assert history.summary() == report.summary(history)


def test_it_is_the_same_for_the_same_run(history, tmp_path):
    again = go(client_metrics={"loss": lambda x, y, batch: 1.0}, config={"task": {"name": "t"}},
               directory=tmp_path)  # fmt: skip
    assert again.card() == history.card() == History.load(tmp_path).card()


def test_rows_of_every_client():
    parts = [np.ones((count, 2)) for count in (3, 5, 1)]
    other = [np.zeros((count, 2)) for count in (2, 2, 7)]
    task = quadratic(clients=3, dim_x=2, dim_y=2, samples=4, seed=1)
    method = Changed(simfbo(task.problem, STEPS), lambda _, state, *given: state)

    def data_of(data):
        found = run(method, SimulatedFederation(data), task.x0, task.y0, rounds=1)
        return found.header["samples"], section(found.card(), "Data")

    samples, lines = data_of(from_clients(parts, other))
    assert samples["upper"] == {"clients": 3, "least": 2, "most": 7, "median": 2.0, "total": 11,
                                "each": [2, 2, 7]}  # fmt: skip
    assert lines == [
        "3 clients; 9 lower (training) rows, 11 upper (validation) rows.", "",
        "| client | lower (training) rows | upper (validation) rows |", "|---|---|---|",
        "| 0 | 3 | 2 |", "| 1 | 5 | 2 |", "| 2 | 1 | 7 |",
    ]  # fmt: skip
    # The same rows at both levels, also in arrays of other sizes, are counted once.
    for data in (from_clients(parts, parts), pad_to_buckets(from_clients(parts, parts))):
        assert data_of(data)[0]["lower and upper"]["each"] == [3, 5, 1]
    # As many rows are not the same rows.
    alike = [np.zeros((count, 2)) for count in (3, 5, 1)]
    assert [*data_of(from_clients(parts, alike))[0]] == ["lower", "upper"]


def test_many_clients_are_summarised():
    history = go(21)
    (spread,) = {tuple(one) for one in history.header["samples"].values()}
    assert spread == ("clients", "least", "most", "median", "total")
    lines = section(history.card(), "Data")
    assert lines[0].startswith("21 clients; ")
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| fewest", "| median", "| most"]


def test_an_old_history_and_a_server_without_data(history):
    header = {key: value for key, value in history.header.items() if key != "samples"}
    text = History(header, history.records, history.end).card()
    assert section(text, "Data") == ["How many rows each client has is not known to the server."]


def test_privacy():
    hidden = go(method=lambda one: private(one, Privacy()))
    assert hidden.header["private"] is True
    assert "samples" not in hidden.header
    text = hidden.card()
    assert section(text, "Privacy")[0].startswith(
        "Messages are clipped and noise is added. Epsilon"
    )
    assert section(text, "Data")[0].startswith("Not listed")
    hidden.header["config"] = {"privacy": {"delta": 1e-5, "where": "server"}}
    hidden.records[-1]["epsilon"] = 2.5
    assert section(hidden.card(), "Privacy") == [
        "Differentially private for each client: epsilon 2.5 at delta 1e-05. Messages are clipped, "
        "and the server adds noise."
    ]
    assert "epsilon" not in "".join(section(hidden.card(), "Training"))


def told(**parts):
    """Return a history of one record, with the given parts."""
    record = {"round": 4, "communication_rounds": 7, "bytes_down": 1500, "bytes_up": 2_000_000,
              "bytes_x": 1000, "bytes_y": 0, "bytes_evaluation": 12, "seconds": 1.0,
              "loss": 0.5}  # fmt: skip
    header = {"algorithm": "SimFBO", "rounds": 9, "seed": 0, "config": {}}
    return History(header, [record], **parts)


def test_training_and_bytes():
    verdict = {"converged": True, "text": "converged: all is well"}
    text = told(end={"status": "finished"}, verdict=verdict).card()
    assert section(text, "Training") == [
        "SimFBO, 4 of at most 9 iterations: finished. Converged: all is well.", "",
        "| measured at the end | value |", "|---|---|", "| loss | 0.5 |",
    ]  # fmt: skip
    assert section(text, "Communication") == [
        "7 exchanges with clients.", "", "| sent, over all clients | bytes |", "|---|---|",
        "| to the clients | 1.5 kB |", "| back | 2 MB |",
        "| of both: x, the upper variable | 1 kB |",
        "| in addition, for evaluations on clients | 12 B |",
    ]  # fmt: skip
    assert "1.0" not in text  # seconds differ from run to run
    assert "diverged (x is NaN)." in told(end={"status": "diverged", "reason": "x is NaN"}).card()
    assert "stopped without an end record" in told().card()
    empty = History({"algorithm": "SimFBO", "rounds": 9, "seed": 0, "config": {}})
    assert "The run ended before its first evaluation." in empty.card()


def test_the_worst_ten_clients():
    losses = [float(k) for k in range(12)]
    line = {"round": 4, "weights": [1 / 12] * 12, "values": {"loss": [*losses[:11], None]}}
    history = told(clients=[line])
    history.header["client_metrics"] = {"loss": "min"}
    lines = section(history.card(), "Scores of the clients")
    assert lines[2] == "| loss | 5 | 10 | 10 | 1 | 5 | 9 |"
    assert lines[4] == "The worst 10 of 12 clients, by loss:"
    assert [row.split(" | ")[0] for row in lines[8:]] == [f"| {k}" for k in range(10, 0, -1)]


def test_excluded_clients_and_warnings():
    refusals = [{"client": client, "reason": "not finite"} for client in (4, 4, 2)]
    warnings = [{"round": k, "text": "a few carry most"} for k in range(12)]
    lines = section(
        told(refusals=refusals, warnings=warnings).card(), "Excluded replies and warnings"
    )
    assert lines[0] == "3 replies of 2 clients; most frequent:"
    assert [line.split(" | ")[0::2] for line in lines[4:6]] == [["| 4", "2 |"], ["| 2", "1 |"]]
    assert lines[7] == "- Iteration 0: a few carry most."
    assert lines[-1] == "- 2 more in the history."


def test_nothing_breaks_a_table():
    rows = [["a|b\nc", 1200, 0.123456, True]]
    assert card.table(["x"] * 4, rows).split("\n")[2] == "| a\\|b\\nc | 1,200 | 0.1235 | True |"
