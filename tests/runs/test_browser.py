"""The page in a real browser: what it shows, how soon, how it looks, and what it does not do."""

import importlib.util
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from simfbo.runs import report
from simfbo.runs.history import History
from simfbo.runs.lines import as_line
from simfbo.runs.watch import Watcher
from simfbo.studies.figures import band

SPEC = importlib.util.spec_from_file_location("webdriver", Path(__file__).parent / "webdriver.py")
webdriver = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(webdriver)

MISSING = not (webdriver.CHROMIUM and webdriver.CHROMEDRIVER)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING, reason="needs chromium, chromedriver")]

HOSTILE = "<img src=x onerror=alert(1)>"
OBJECT = {"toString": 1, "valueOf": 1}  # which JavaScript can make no text or number of
MOST = 4001  # points that the page keeps of a run
READY = "return document.querySelectorAll('.runs tbody tr').length >= {}"


def header(algorithm="SimFBO", seed=0, rounds=100, **about):
    about = {"metric": "test_accuracy", "goal": "max", "maximise": [], **about}
    return {"algorithm": algorithm, "rounds": rounds, "seed": seed, "about": about,
            "config": {"task": {"name": "t"}, "algorithm": {"name": algorithm}}}  # fmt: skip


def record(t, value=0.5, **more):
    return {"round": t, "communication_rounds": t, "bytes_up": 500 * t, "bytes_down": 500 * t,
            "seconds": 0.1 * t, "test_accuracy": value, "loss": 1 / (1 + t), **more}  # fmt: skip


def write(folder, *records, head=None):
    folder.mkdir(parents=True)
    file = folder / "history.jsonl"
    file.write_bytes(as_line("header", head or header()))
    append(file, *records)
    return file


def append(file, *records, kind="record"):
    with file.open("ab") as out:
        out.write(b"".join(as_line(kind, one) for one in records))


@pytest.fixture(scope="module")
def browser():
    with webdriver.Browser() as browser:
        yield browser


@pytest.fixture
def page(browser, tmp_path):
    """Return a function that opens the live page of a folder; nothing may go wrong on it."""
    browser.show(1280)
    with Watcher([tmp_path], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def load(runs=1):
            browser.open(server.url)
            browser.wait(READY.format(runs))
            return browser

        yield load
        assert browser.log() == []
        browser.open("about:blank")
        server.shutdown()
        thread.join()


def frozen(browser, folder, *arguments):
    """Open the page of some histories from a file."""
    file = folder / "page.html"
    file.write_text(report.page(*arguments))
    browser.show(1280)
    browser.open(file.as_uri())
    return browser


def compared(folder, ends=(True, True, True)):
    """Write three runs of each of two methods."""
    rng = np.random.default_rng(0)
    for name in ("SimFBO", "FedNest"):
        for seed, ended in enumerate(ends):
            values = np.sort(rng.uniform(0.2, 0.9, 11))
            records = [record(10 * i, value) for i, value in enumerate(values)]
            file = write(folder / f"{name}-{seed}", *records, head=header(name, seed))
            if ended:
                append(file, {"status": "finished"}, kind="end")


def test_the_last_value_and_progress(page, tmp_path):
    write(tmp_path / "a", record(0, 0.25), record(50, 0.75), record(60, 0.5))
    browser = page()
    assert browser.text(".runs tbody .value") == "0.5"
    assert browser.text(".runs tbody .best") == "0.75"
    assert browser.text(".runs tbody .progress") == "60 of 100"
    assert browser.text(".runs tbody .bytes") == "60 kB"
    assert browser.text(".runs tbody .left") == "4 s"  # 40 more at 0.1 s each
    assert browser.text("#counts") == "1 running"
    assert browser.run("return view.lines()[0].y") == [0.25, 0.75, 0.5]


def test_a_new_record_appears_within_two_seconds(page, tmp_path):
    """Of several attempts one must do: the machine may be busy."""
    file = write(tmp_path / "a", record(0))
    browser, taken = page(), []
    for t in range(1, 11):
        append(file, record(t, t / 1000))
        start = time.monotonic()
        browser.wait(
            f"return document.querySelector('.runs tbody .value').textContent == {t / 1000}"
        )
        taken.append(time.monotonic() - start)
        if taken[-1] < 2:
            break
    assert min(taken) < 2


def test_new_runs_resumed_runs_and_ends(page, tmp_path):
    file = write(tmp_path / "a", *map(record, range(5)))
    browser = page()
    write(tmp_path / "b", record(0), head=header(seed=1))
    browser.wait(READY.format(2))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]))
    append(file, record(2, 0.125))
    browser.wait("return view.size()[0] == 3")
    assert browser.text(".runs tbody .value").split() == ["0.125", "0.5"]
    assert "Resumed while it was watched: 1 time." in browser.text("#events")
    append(file, {"status": "diverged", "reason": "the loss is not finite"}, kind="end")
    browser.wait("return document.querySelector('#counts').textContent == '1 running · 1 failed'")
    assert "diverged" in browser.text(".runs tbody .status")
    assert "The run diverged: the loss is not finite." in browser.text("#messages")


def test_a_crashed_run_damaged_lines_and_a_log(page, tmp_path):
    file = write(tmp_path / "a", record(0), record(1))
    with file.open("ab") as out:
        out.write(b"damage\n")
    (file.parent / "server.log").write_text(f"server says {HOSTILE}")
    old = time.time() - 240
    for path in (file, file.parent / "server.log"):
        os.utime(path, (old, old))
    browser = page()
    assert browser.text(".runs tbody .status") == "no news for 4 min, 1 damaged line"
    assert browser.text("#counts") == "1 without news"
    assert browser.text("#server-log") == f"server says {HOSTILE}"


def test_progress_between_evaluations(page, tmp_path):
    file = write(tmp_path / "a", record(0), record(10))
    (file.parent / "checkpoint-0000000042.npz").touch()
    assert page().text(".runs tbody .progress") == "42 of 100"


def test_waiting_for_runs_and_for_the_server(browser, start):
    server = start("from simfbo.cli.main import main; main()", "watch", ".", "--port", "0")
    browser.open(server.stdout.readline().split()[3])
    browser.wait("return !document.getElementById('waiting').hidden")
    server.terminate()
    server.outcome()
    browser.wait("return document.body.dataset.connection == 'lost'")
    assert browser.text("#connection") == "The server has stopped; waiting for it."
    browser.open("about:blank")


def test_means_and_bands_are_those_of_the_figures(page, tmp_path):
    compared(tmp_path)
    browser = page(6)
    for line, name in zip(browser.run("return view.lines()"), ("FedNest", "SimFBO")):
        runs = [History.load(tmp_path / f"{name}-{seed}") for seed in range(3)]
        places = [run.column("round") for run in runs]
        grid, middle, half = band(places, [run.column("test_accuracy") for run in runs])
        assert line["name"] == name
        for key, value in {
            "x": grid,
            "y": middle,
            "low": middle - half,
            "high": middle + half,
        }.items():
            np.testing.assert_allclose(line[key], value, atol=1e-5)
    assert browser.text("#note").startswith(
        "Lines are means over the seeds that have ended, bands the 95 % interval of the mean"
    )
    freedoms = [1, 2, 5, 10, 11, 20, 50, 1000]
    found = browser.run("return arguments[0].map(view.student)", freedoms)
    np.testing.assert_allclose(found, stats.t.ppf(0.975, freedoms), rtol=1e-4)


def test_runs_in_progress_are_not_in_the_mean(page, tmp_path):
    compared(tmp_path, ends=(True, True, False))
    names = [line["name"] for line in page(6).run("return view.lines()")]
    assert names == ["FedNest", "FedNest, seed 2", "SimFBO", "SimFBO, seed 2"]


def test_nothing_to_draw(page, tmp_path):
    """A run that has just begun, and one without metrics."""
    file = write(tmp_path / "a")
    browser = page()
    assert browser.text(".runs tbody .value") == "–"  # noqa: RUF001
    bare = {key: record(3)[key] for key in ("round", "bytes_up", "bytes_down", "seconds")}
    append(file, bare)
    browser.wait("return document.querySelector('.runs tbody .progress').innerText == '3 of 100'")
    append(file, record(4))
    browser.wait("return view.labels().length == 1")
    browser.run("document.querySelector('.runs tbody tr').click()")
    assert browser.run("return view.labels()") == []
    browser.run("document.querySelector('.runs tbody tr').click()")
    assert browser.run("return view.labels()") == ["SimFBO"]


def choose(browser, element, value):
    browser.run(
        "const e = document.getElementById(arguments[0]);"
        "if (e.type === 'checkbox') e.checked = arguments[1]; else e.value = arguments[1];"
        "e.dispatchEvent(new Event('input', {bubbles: true}))", element, value)  # fmt: skip


def test_controls(page, tmp_path):
    compared(tmp_path)
    browser = page(6)
    choose(browser, "along", "bytes")
    assert browser.run("return view.lines()[0].x")[1] == 10_000
    choose(browser, "seeds", "range")
    values = [
        History.load(tmp_path / f"FedNest-{seed}").column("test_accuracy") for seed in range(3)
    ]
    np.testing.assert_allclose(browser.run("return view.lines()[0].low"), np.min(values, axis=0))
    choose(browser, "seeds", "single")
    assert len(browser.run("return view.lines()")) == 6
    for box in ("log-x", "log-y"):
        choose(browser, box, True)
    choose(browser, "metric", "loss")
    assert browser.text("#multiples figcaption") == "test accuracy"
    browser.run("document.querySelector('.runs tbody tr').click()")
    assert len(browser.run("return view.lines()")) == 5
    browser.run("document.querySelector('.runs tbody .toggle').focus()")
    choose(browser, "focus", str(tmp_path / "SimFBO-1"))
    browser.run("document.getElementById('evaluations').open = true")
    browser.wait("return document.querySelectorAll('#evaluations tbody tr').length == 11")


def test_the_pointer_reads_zooms_and_highlights(page, tmp_path):
    compared(tmp_path)
    browser = page(6)
    box = (
        "const b = document.querySelector('{}').getBoundingClientRect(); return [b.x, b.y, b.width]"
    )
    left, top, width = browser.run(box.format("#chart .u-over"))
    for share in (0.49, 0.5):
        browser.mouse("Moved", left + share * width, top + 50)
    browser.wait("return document.querySelector('.tip').innerText.startsWith('iteration 50')")
    middle = {line["name"]: line["y"][5] for line in browser.run("return view.lines()")}
    assert all(f"{name}: {value:.4g} (" in browser.text(".tip") for name, value in middle.items())
    button = {"button": "left", "clickCount": 1}
    browser.mouse("Pressed", left + 0.5 * width, top + 50, **button)
    for share in (0.6, 0.7, 0.75):
        browser.mouse("Moved", left + share * width, top + 50, **button)
    browser.mouse("Released", left + 0.75 * width, top + 50, **button)
    np.testing.assert_allclose(browser.run("return view.range()"), [50, 75], atol=1)
    choose(browser, "metric", "loss")
    assert browser.run("return view.range()") == [0, 100]
    left, top, _ = browser.run(box.format(".runs tbody .name"))
    browser.mouse("Moved", left + 5, top + 5)
    browser.run("document.querySelector('#heat').dispatchEvent(new Event('pointermove'))")


def test_each_line_has_a_label(page, tmp_path):
    compared(tmp_path)
    browser = page(6)
    assert sorted(browser.run("return view.labels()")) == ["FedNest", "SimFBO"]
    choose(browser, "seeds", "single")
    assert len(set(browser.run("return view.labels()"))) == 6
    browser.show(380)  # there, numbers, which the table has too
    browser.wait("return view.labels().every(label => /^[12]$/.test(label))")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [380, 1280])
def test_readable(page, tmp_path, width, dark):
    """Nothing is wider than the window, and all text stands out from its background."""
    compared(tmp_path)
    long = "a_metric_with_a_very_long_name_" * 4
    file = write(tmp_path / "x", record(0, **{long: 1.0}), head=header("A method " * 20))
    append(file, {"round": 0, "client": 3, "reason": "no-reply"}, kind="refusal")
    append(file, {"round": 0, "text": "client 3 stands out" * 9}, kind="warning")
    append(file, record(1, bytes_x=3, bytes_y=5))
    browser = page(7)
    browser.show(width, dark=dark)
    choose(browser, "focus", str(tmp_path / "x"))
    browser.run("for (const e of document.querySelectorAll('details')) e.open = true")
    browser.wait("return document.querySelectorAll('#evaluations tbody tr').length == 2")
    sizes = "const e = document.documentElement; return [e.scrollWidth, e.clientWidth, innerWidth]"
    wide, inside, outside = browser.run(sizes)
    assert (wide, outside) == (inside, width)
    smallest, where = browser.run(webdriver.CONTRAST)
    assert smallest >= 4.5, where


def test_charts_follow_the_colour_scheme(page, tmp_path):
    write(tmp_path / "a", record(0), record(1))
    browser = page()
    picture = "return document.querySelector('#chart canvas').toDataURL()"
    light = browser.run(picture)
    browser.show(1280, dark=True)
    browser.run("window.light = arguments[0]", light)
    browser.wait(f"return (() => {{ {picture} }})() != window.light")


def test_hostile_names_do_nothing(page, tmp_path):
    hostile = record(0, **{HOSTILE: 0.5, "__proto__": 1.0, "constructor": 2.0})
    head = header(HOSTILE, metric=HOSTILE, colour="red;}") | {
        "seed": HOSTILE,
        "__proto__": {"a": 1},
    }
    folder = tmp_path / HOSTILE.replace("/", "")
    file = write(folder, hostile, {**hostile, "round": 1, "seconds": OBJECT}, head=head)
    append(file, {"round": 1, "client": 2, "reason": HOSTILE, "text": HOSTILE}, kind="refusal")
    append(file, {"round": 1, "client": HOSTILE, "reason": OBJECT}, kind="refusal")
    append(file, {"round": HOSTILE, "text": HOSTILE}, kind="warning")
    append(file, {"converged": True, "text": HOSTILE}, kind="verdict")
    append(file, {"status": HOSTILE, "reason": HOSTILE}, kind="end")
    browser = page()
    browser.wait("return document.getElementById('messages').children.length == 3")
    assert browser.run("return document.images.length") == 0
    assert HOSTILE in browser.text(".runs tbody .name")
    assert HOSTILE in browser.text("#metric option")
    assert HOSTILE in browser.text(".runs tbody .status")
    assert HOSTILE in browser.text("#reasons")


def test_memory_stays_flat(page, tmp_path):
    """However many records come, the page holds a bounded number of points."""
    file = write(tmp_path / "a", record(0), head=header(rounds=100_000))
    browser, heaps = page(), []
    for start in range(1, 50_000, 10_000):
        append(file, *(record(t) for t in range(start, start + 10_000)))
        text = f"{start + 9999:,} of 100,000"
        browser.wait(
            f"return document.querySelector('.runs .progress span')?.textContent == '{text}'"
        )
        heaps.append(browser.heap())
        assert browser.run("return view.size()")[0] <= MOST
    x = browser.run("return view.lines()[0].x")
    assert len(x) > MOST // 3
    assert x[-1] == 50_000
    assert set(np.diff(x[:-1])) == {16}  # thinned evenly
    assert max(heaps) < 1.5 * heaps[0]


def test_many_excluded_replies_stay_flat(page, tmp_path):
    file = write(tmp_path / "a", record(0))
    lines = [{"round": t, "client": 7 * t % 3000, "reason": "no-reply"} for t in range(20_000)]
    append(file, *lines, kind="refusal")
    append(file, record(20_000))
    browser = page()
    browser.wait("return document.querySelector('.runs tbody .status')"
                 " && document.getElementById('excluded').hidden === false")  # fmt: skip
    browser.wait("return document.querySelector('#reasons')?.innerText.includes('20,000')")
    assert "Clients 0 to 2,999 downwards, rounds 0 to 20,000 to the right" in browser.text(
        "#heat-text"
    )
    assert "64 clients in 256 rounds" in browser.text("#heat-text")


def test_the_frozen_page(browser, tmp_path):
    compared(tmp_path)
    runs = [
        History.load(tmp_path / f"{name}-{seed}")
        for name in ("SimFBO", "FedNest")
        for seed in (0, 1)
    ]
    browser = frozen(browser, tmp_path, runs, None, [{"method": HOSTILE, "MB": "3"}])
    browser.wait(READY.format(4))
    last = [f"{run.records[-1]['test_accuracy']:.4g}" for run in runs]
    assert browser.text(".runs tbody .value").split() == last
    assert sorted(browser.run("return view.labels()")) == ["FedNest", "SimFBO"]
    assert browser.text("#comparison td") == f"{HOSTILE}\n3"
    assert browser.text("#counts") == "4 finished"
    assert browser.log() == []


def test_a_frozen_page_without_an_end(browser, tmp_path):
    browser = frozen(browser, tmp_path, [History(header(), [record(0), record(1)])])
    assert browser.text(".runs tbody .status") == "stopped without an end record"
    assert browser.log() == []
