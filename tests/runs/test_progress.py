"""What people see of a run: in a terminal, in a notebook, in a file."""

import io
import sys
import types

import pytest
from rich.console import Console

from simfbo import Point, SimulatedFederation, run
from simfbo.algorithms import simfbo
from simfbo.runs.progress import bar_html, shown, sparkline
from simfbo.tasks import quadratic

ABOUT = {"metric": "test_accuracy", "goal": "max", "maximise": []}


def record(t, **metrics):
    return {"round": t, "bytes_up": 1000 * t, "bytes_down": 500 * t, "seconds": 0.5 * t, **metrics}


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


def test_a_terminal_shows_a_bar_the_time_left_metrics_and_curves():
    console = terminal()
    with shown(True, "simfbo [x]", 40, ABOUT, console) as update:
        for t in range(0, 41, 10):
            update(
                t, record(t, test_loss=8 - t / 10, test_accuracy=[0.1, 0.5, 0.9, 0.7, 0.8][t // 10])
            )
        update(40, None)
    text = console.file.getvalue()
    last = text[text.rindex("simfbo [x]") :]
    assert "40/40" in last
    assert "left" in last
    accuracy, loss = (line.split() for line in last.splitlines() if line.startswith("test "))
    assert accuracy == ["test", "accuracy", "0.8", "0.9", "▁█▄▆"]
    assert loss == ["test", "loss", "4", "4", "█▆▃▁"]


def test_elsewhere_there_is_a_plain_line_per_evaluation():
    console = Console(file=io.StringIO(), width=100)
    with shown(True, "simfbo", 20, ABOUT, console) as update:
        update(10, record(10, test_accuracy=0.5))
        update(11, None)
        update(20, record(20, test_accuracy=0.75))
    assert console.file.getvalue().splitlines() == [
        "iteration     10   test accuracy 0.5       sent    15 kB      5.00 s",
        "iteration     20   test accuracy 0.75      sent    30 kB     10.00 s",
    ]


def test_without_metrics_there_is_still_something_to_see():
    console = Console(file=io.StringIO(), width=100)
    with shown(True, "simfbo", 20, None, console) as update:
        update(20, record(20))
    assert console.file.getvalue() == "iteration     20   sent    30 kB     10.00 s\n"


def test_curves():
    assert sparkline([1.0, float("nan"), 3.0]) == "▁ █"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
    long = sparkline([float(i) for i in range(1000)])
    assert (len(long), long[0], long[-1]) == (32, "▁", "█")


def test_memory_of_the_display_is_flat():
    console = terminal()
    with shown(True, "simfbo", 5000, ABOUT, console) as update:
        for t in range(5000):
            update(t, record(t, test_accuracy=t / 5000))
        cells = [cell.cell_contents for cell in update.__closure__]
    metrics = next(content for content in cells if hasattr(content, "take"))
    sizes = list(map(len, metrics.values.values()))
    assert sizes
    assert max(sizes) < 300


class Handle:
    def __init__(self):
        self.shown = []

    def update(self, html):
        self.shown.append(html)


@pytest.fixture
def notebook(monkeypatch):
    """Pretend to be a notebook; return what it shows."""
    handle = Handle()

    def display(html, display_id):
        assert display_id
        handle.update(html)
        return handle

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: type("ZMQInteractiveShell", (), {})()
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.HTML, ipython.display.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    return handle.shown


def test_a_notebook_shows_a_bar(notebook):
    task = quadratic(clients=2, dim_x=1, dim_y=1, samples=2)
    history = run(
        simfbo(task.problem, Point(x=0.05, y=0.1, v=0.1)), SimulatedFederation(task.data),
        task.x0, task.y0, rounds=6, evaluate=task.evaluate, progress=True,
    )  # fmt: skip
    assert notebook[0].startswith('<progress value="0" max="6"')
    assert notebook[-1].startswith('<progress value="6" max="6"')
    assert f"x error {history.records[-1]['x_error']:.4g}" in notebook[-1]


def test_the_bar_escapes_names():
    html = bar_html("<b>", 1, 2, 3.0, {"<i>_loss": 0.5})
    assert "<b>" not in html
    assert "<i>" not in html
    assert "&lt;i&gt; loss 0.5" in html
    assert "3 s left" in html


def test_nothing_is_shown_unless_asked(capsys):
    with shown(False, "simfbo", 3) as update:
        assert update is None
    assert capsys.readouterr() == ("", "")


def test_metrics_may_change_during_a_run():
    console = Console(file=io.StringIO(), width=100)
    with shown(True, "simfbo", 20, None, console) as update:
        update(1, record(1, a=1.0))
        update(2, record(2, b=2.0))
    assert console.file.getvalue().count("\n") == 2
