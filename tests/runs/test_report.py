"""Reports: the sentences, the axes, and a self-contained page that escapes all text."""

import re
import subprocess
import sys

import numpy as np
import pytest

from simfbo.core.exchange import Reason
from simfbo.errors import UserError
from simfbo.runs import report
from simfbo.runs.history import History

HOSTILE = "</h2><script>alert('x')</script>"


def history(algorithm="SimFBO", values=(1.0, 0.5, 0.25), *, seed=0, metric="test_loss", **end):
    """Return a history of these values, ten iterations apart, a megabyte each way apiece."""
    task = {"name": "hyper-representation", "dataset": "mnist", "model": "mlp",
            "partition": "iid", "clients": 100}  # fmt: skip
    header = {"algorithm": algorithm, "seed": seed, "rounds": 2000, "config": {"task": task}}
    records = [
        {
            "round": 1000 * j,
            "communication_rounds": 1000 * j,
            "floats_down": 250_000 * j,
            "floats_up": 250_000 * j,
            "bytes_down": 1_000_000 * j,
            "bytes_up": 1_000_000 * j,
            "seconds": 1.5 * j,
            "projected": 0,
            metric: value,
        }
        for j, value in enumerate(values)
    ]
    return History(header, records, end or {"status": "finished"})


def test_summary_of_a_finished_run():
    assert report.summary(history()) == (
        "SimFBO on hyper-representation (mnist, mlp, iid, 100 clients): finished after 2,000 of "
        "2,000 iterations.\n"
        "Result: test loss 0.25.\n"
        "Cost: 2,000 communication rounds, 2 MB sent to clients, 2 MB sent back, "
        "3.0 s of computing."
    )


def test_summary_of_other_runs():
    stopped = history(values=(1.0, 0.5), status="interrupted")
    assert "interrupted after 1,000 of 2,000 iterations." in report.summary(stopped)
    killed = history()
    killed.end = None
    assert "stopped without an end record after 2,000 of 2,000" in report.summary(killed)
    projected = history()
    projected.records[-1]["projected"] = 1234
    assert report.summary(projected).endswith("\nThe projection of v was active 1,234 times.")
    assert "projection" not in report.summary(history())
    assert report.summary(history(values=())) == "The run ended before its first evaluation."
    bare = history()
    for record in bare.records:
        del record["test_loss"]
    assert "\nResult: no metrics, as the run had no `evaluate`.\n" in report.summary(bare)


def refusals(**counts):
    """Return history lines of these reasons, each with a text of its own, of clients 0, 1, 2."""
    reasons = [Reason[name] for name, count in counts.items() for _ in range(count)]
    return [
        {"round": 1, "exchange": 1, "client_step": "step", "client": i % 3, "reason": reason.value,
         "text": f"sent a message of norm {i}, the limit is 1"}
        for i, reason in enumerate(reasons)
    ]  # fmt: skip


def test_summary_groups_refusals_by_reason():
    """Texts differ from client to client; reasons do not."""
    run = history()
    run.refusals = refusals(NO_REPLY=2, TOO_LARGE=1200, NOT_FINITE=3)
    assert report.summary(run).splitlines()[-1] == (
        "Excluded replies: 1,205, from 3 clients; most frequent reason (1,200): the client sent a "
        "message above the norm limit. They are listed in history.jsonl."
    )
    run.refusals = refusals(NO_REPLY=1)
    assert "Excluded replies: 1, from 1 client; most frequent reason (1): the client did not " in (
        report.summary(run)
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "a task"),
        ({"task": {"name": "mine"}}, "mine"),
        ({"task": {"name": "quadratic", "clients": 3, "dim_x": 4}}, "quadratic (3 clients)"),
    ],
)
def test_describe(config, text):
    assert report.describe(config) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (644_080, "644 kB"),
        (999_400, "999 kB"),
        (999_600, "1 MB"),
        (1_290_000_000, "1.29 GB"),
        (12_300_000_000_000, "12.3 TB"),
        (1_230_000_000_000_000, "1.23e+03 TB"),
    ],
)
def test_size(count, text):
    assert report.size(count) == text


def test_axes_are_rounds_megabytes_and_seconds():
    axes = report.draw([history()]).axes
    assert [ax.get_xlabel() for ax in axes] == [
        "communication rounds",
        "megabytes sent, both ways",
        "seconds of computing",
    ]
    for ax, along in zip(axes, ([0, 1000, 2000], [0, 2, 4], [0, 1.5, 3]), strict=True):
        (line,) = ax.lines
        np.testing.assert_allclose(line.get_xdata(), along)
        np.testing.assert_allclose(line.get_ydata(), [1.0, 0.5, 0.25])
    assert axes[0].get_ylabel() == "test loss"


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ((1.0, 0.5), "linear"),
        ((1.0, 0.01), "linear"),
        ((1.0, 0.009), "log"),
        ((1.0, 0.0), "linear"),
        ((1.0, -1e-9), "linear"),
        ((1.0, float("nan")), "linear"),
    ],
)
def test_log_scale_where_values_span_more_than_two_decades(values, scale):
    assert report.draw([history(values=values)]).axes[0].get_yscale() == scale


def test_the_scale_looks_at_all_runs():
    low = history(values=(1e-4, 2e-4))
    assert report.draw([low]).axes[0].get_yscale() == "linear"
    assert report.draw([history(), low]).axes[0].get_yscale() == "log"


def test_an_infinite_value_can_be_drawn(tmp_path):
    report.save([history(values=(1.0, float("inf")), status="diverged")], tmp_path)
    assert "inf" in (tmp_path / "report.html").read_text()


def test_one_line_per_run(tmp_path):
    runs = [history("SimFBO", seed=1), history("ShroFBO", (3.0, 2.0), seed=2)]
    axes = report.draw(runs).axes
    assert [line.get_label() for line in axes[2].lines] == ["SimFBO, seed 1", "ShroFBO, seed 2"]
    assert len({line.get_color() for line in axes[0].lines}) == 2
    report.save(runs, tmp_path)
    page = (tmp_path / "report.html").read_text()
    summaries = page.partition("<noscript>")[2]
    assert re.findall("<h2>(.*?)</h2>", summaries) == ["SimFBO, seed 1", "ShroFBO, seed 2"]


def test_the_metric_can_be_chosen():
    two = history()
    for record in two.records:
        record["test_accuracy"] = 0.9
    assert report.metrics(two) == ["test_loss", "test_accuracy"]
    figure = report.draw([two], "test_accuracy")
    assert figure.axes[0].get_ylabel() == "test accuracy"
    with pytest.raises(UserError, match=r"^The history has no 'nothing'; it has round, "):
        report.draw([two], "nothing")


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        ([], "There is nothing to draw: a run has no evaluation yet."),
        ([history(values=())], "There is nothing to draw: a run has no evaluation yet."),
        (
            [history(), history(values=())],
            "There is nothing to draw: a run has no evaluation yet.",
        ),
    ],
)
def test_nothing_to_draw(runs, sentence, tmp_path):
    with pytest.raises(UserError) as caught:
        report.save(runs, tmp_path / "new")
    assert str(caught.value) == sentence
    assert not (tmp_path / "new").exists()


def test_a_run_without_metrics_is_a_sentence():
    bare = history()
    for record in bare.records:
        del record["test_loss"]
    with pytest.raises(UserError) as caught:
        report.draw([bare])
    assert str(caught.value) == (
        "There is nothing to draw: the run had no `evaluate`, hence no metrics."
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    bad = history(HOSTILE, metric="<img src=x onerror=alert(1)>")
    bad.header["config"]["task"]["dataset"] = "<b>data</b>"
    return report.save([bad], directory)


def test_three_files(saved):
    assert [path.name for path in saved] == ["figure.png", "figure.svg", "report.html"]
    assert saved[0].read_bytes().startswith(b"\x89PNG\r\n")
    assert "<svg" in saved[1].read_text()


def test_the_page_escapes_summaries(saved):
    summaries = saved[2].read_text().partition("<noscript>")[2].partition("</noscript>")[0]
    assert "<script" not in summaries
    assert "<img" not in summaries
    assert "<b>data" not in summaries
    assert "<h2>&lt;/h2&gt;&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;</h2>" in summaries
    assert summaries.count("<h2>") == summaries.count("</h2>") == 1
    assert "Result: &lt;img src=x onerror=alert(1)&gt; 0.25." in summaries


def test_dollar_signs_in_names_are_no_formulas(tmp_path):
    odd = history("$x$ costs $\\nothing$", metric="loss in $\\$")
    figure = report.draw([odd])
    (label,) = figure.axes[-1].texts
    assert label.get_text() == "$x$ costs $\\nothing$"
    assert len(report.write(figure, tmp_path, "a page")) == 3


def test_labels_say_what_sets_runs_apart():
    def history(partition, seed):
        task = {"name": "t", "partition": partition}
        config = {"task": task, "algorithm": {"name": "simfbo"}, "seed": seed}
        return History({"algorithm": "SimFBO", "seed": seed, "config": config, "versions": {}})

    assert report.labels([history("iid", 0)]) == ["SimFBO"]
    assert report.labels([history("iid", 0), history("shards", 0)]) == [
        "SimFBO, partition iid",
        "SimFBO, partition shards",
    ]
    assert report.labels([history("iid", 0), history("iid", 1)]) == [
        "SimFBO, seed 0",
        "SimFBO, seed 1",
    ]


def test_summaries_and_pages_do_not_need_matplotlib():
    script = """
import sys
sys.modules["matplotlib"] = None  # importing it now fails
from simfbo.runs import report
from simfbo.runs.history import History
assert report.size(1000) == "1 kB"
record = {"round": 1, "communication_rounds": 1, "bytes_down": 8, "bytes_up": 8, "seconds": 0.5}
run = History({"algorithm": "SimFBO", "rounds": 1, "config": {}}, [{**record, "loss": 0.5}])
print(report.summary(run).splitlines()[1])
print(report.page([run])[:15])
try:
    report.draw([run])
except ValueError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    missing = "This needs matplotlib, which is not installed: pip install 'simfbo[plots]'."
    lines = ["Result: loss 0.5.", "<!doctype html>", f"MissingExtra {missing}"]
    assert (done.stdout.splitlines(), done.stderr) == (lines, "")


def test_a_thinned_page_keeps_the_best_values():
    records = [{"round": t, "bytes_up": t, "bytes_down": t, "communication_rounds": t,
                "seconds": 1.0 * t, "loss": 0.5} for t in range(9001)]  # fmt: skip
    records[3001]["loss"], records[4003]["loss"] = 0.01, np.nan
    odd = History({"algorithm": "a", "seed": 0, "rounds": 9000, "config": {}}, records)
    text = report.page([odd])
    assert '"round": 3001' in text
    assert text.count('"kind": "record"') < 4005
