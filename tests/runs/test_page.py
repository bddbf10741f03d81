"""The page in one file: its data survive, its policy allows its own parts and nothing else."""

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import simfbo.runs
from simfbo.runs import page, report
from simfbo.runs.history import BOOKKEEPING, History
from simfbo.runs.palette import COLOURS

VIEW = Path(simfbo.runs.__file__).parent / "view"
HOSTILE = "</script><script>alert('x')</script><!--<img src=x onerror=alert(1)>"


def history(name="SimFBO", count=3, seed=0, **record):
    header = {
        "algorithm": name,
        "seed": seed,
        "rounds": count - 1,
        "config": {"task": {HOSTILE: 1}},
    }
    cost = {"bytes_down": 8, "bytes_up": 8, "seconds": 0.1}
    records = [
        {"round": t, "communication_rounds": t, **cost, "loss": 1 / (1 + t), **record}
        for t in range(count)
    ]
    return History(header, records, {"status": "finished"})


class Parser(HTMLParser):
    """Notes the elements of a page, and what is within scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.content, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag in ("script", "style")
        self.content += [""] * self.inside

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.content[-1] += data


def parts(text):
    """Return the style, the data, the library and the script of a page."""
    found = Parser(text).content
    assert len(found) == 4
    return found


def data(text):
    return json.loads(parts(text)[1])


def policy(text):
    content = next(attrs["content"] for _, attrs in Parser(text).elements
                   if attrs.get("http-equiv") == "Content-Security-Policy")  # fmt: skip
    rules = [rule.split() for rule in content.split("; ")]
    return {rule[0]: rule[1:] for rule in rules}


@pytest.mark.parametrize("text", [page.live(), report.page([history()])], ids=["live", "frozen"])
def test_the_policy_allows_the_parts_of_the_page_and_nothing_else(text):
    style, _, library, script = parts(text)

    def digest(part):
        return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"

    rules = policy(text)
    assert rules.pop("script-src") == [digest(library), digest(script)]
    assert rules.pop("style-src") == [digest(style)]
    connect = ["'self'"] if data(text)["live"] else ["'none'"]
    none = {name: ["'none'"] for name in ("default-src", "base-uri", "form-action")}
    assert rules == {"connect-src": connect, **none}


@pytest.mark.parametrize("text", [page.live(), report.page([history()])], ids=["live", "frozen"])
def test_nothing_is_loaded_from_elsewhere(text):
    assert text.startswith("<!doctype html>")
    for tag, attrs in Parser(text).elements:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        assert not {name for name in attrs if name in ("src", "href") or name.startswith("on")}
    style, _, _, script = parts(text)
    assert not re.search(r"@import|url\(", style)
    assert not re.search(r"https?://", script)


def test_scripts_make_no_html_of_text():
    """All text goes through textContent; our scripts and the library parse none."""
    for file in (*VIEW.glob("*.js"), VIEW / "uplot" / "uPlot.iife.min.js"):
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|"
                             r"new Function|DOMParser|setHTML", text), file  # fmt: skip
        assert "</script" not in text.lower(), file
        assert "<!--" not in text, file


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("uPlot.iife.min.js", "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"),
        ("uPlot.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
    ],
)
def test_the_library_is_as_published(name, digest):
    assert hashlib.sha256((VIEW / "uplot" / name).read_bytes()).hexdigest() == digest


def test_the_library_is_named_with_its_licence():
    library = parts(page.live())[2]
    assert "The MIT License" in library
    assert "Leon Sorokin" in library
    assert "uPlot (v1.6.32)" in library


def test_every_part_is_in_the_page():
    """A file that is not named in page.py would be missing."""
    text = page.live()
    for file in (*VIEW.glob("*.js"), *VIEW.glob("*.css")):
        assert file.read_text() in text, file


def test_hostile_names_are_data():
    bad = history(HOSTILE, **{HOSTILE: 0.5})
    bad.end = {"status": HOSTILE, "reason": HOSTILE}
    bad.refusals = [{"round": 1, "client": 2, "reason": HOSTILE, "text": HOSTILE}]
    bad.warnings = [{"round": 1, "text": HOSTILE}]
    bad.verdict = {"converged": False, "text": HOSTILE}
    text = report.page([bad], [HOSTILE], [{HOSTILE: HOSTILE}])
    assert [tag for tag, _ in Parser(text).elements].count("script") == 3
    assert "img" not in [tag for tag, _ in Parser(text).elements]
    found = data(text)
    (run,) = found["runs"]
    kinds = [line["kind"] for line in run["lines"]]
    assert kinds == ["header"] + ["record"] * 3 + ["refusal", "warning", "verdict", "end"]
    assert run["name"] == run["lines"][0]["algorithm"] == HOSTILE
    assert run["lines"][1][HOSTILE] == 0.5
    assert run["lines"][4] == {
        "kind": "refusal",
        "round": 1,
        "client": 2,
        "reason": HOSTILE,
        "count": 1,
    }
    assert run["lines"][7] == {"kind": "end", "status": HOSTILE, "reason": HOSTILE}
    assert found["table"] == [{HOSTILE: HOSTILE}]
    assert html.escape(HOSTILE) in text  # for readers without JavaScript


def test_data_are_those_of_the_histories():
    runs = [history(seed=seed) for seed in (0, 1)]
    found = data(report.page(runs))
    assert found["palette"] == list(COLOURS)
    assert found["bookkeeping"] == list(BOOKKEEPING)
    assert found["differ"] == ["seed"]
    assert [run["name"] for run in found["runs"]] == ["SimFBO, seed 0", "SimFBO, seed 1"]
    assert len({run["group"] for run in found["runs"]}) == 1
    assert {run["title"] for run in found["runs"]} == {"SimFBO"}
    for run, own in zip(found["runs"], runs):
        assert [line for line in run["lines"] if line["kind"] == "record"] == [
            {"kind": "record", **record} for record in own.records
        ]


def test_given_names_make_the_groups():
    runs = [history(seed=seed) for seed in (0, 1, 0)]
    found = data(report.page(runs, ["a, seed 0", "a, seed 1", "b, seed 0"]))["runs"]
    assert [run["group"] for run in found] == ["a", "a", "b"]


def test_numbers_that_are_not_finite_are_null():
    found = data(report.page([history(loss=float("nan"), other=float("inf"))]))
    record = found["runs"][0]["lines"][1]
    assert (record["loss"], record["other"]) == (None, None)


def test_long_runs_are_thinned_and_end_where_they_end():
    lines = data(report.page([history(count=10_001)]))["runs"][0]["lines"]
    rounds = [line["round"] for line in lines if line["kind"] == "record"]
    assert rounds[:3] == [0, 3, 6]
    assert len(rounds) <= 4001
    assert rounds[-1] == 10_000
    runs = data(report.page([history(count=3001)] * 10))["runs"]
    assert sum(len(run["lines"]) for run in runs) <= 20_000 + 10 * 3


def test_excluded_replies_are_counted():
    run = history(count=1001)
    run.refusals = [{"round": t, "client": t % 2, "reason": "no-reply", "text": "..."}
                    for t in range(1001)]  # fmt: skip
    lines = [line for line in data(report.page([run]))["runs"][0]["lines"] if "count" in line]
    assert len(lines) < 2 * 97
    assert sum(line["count"] for line in lines) == 1001
    assert {line["round"] % 11 for line in lines} == {0}  # 96 columns of 11 rounds


def test_an_empty_page():
    assert data(report.page([]))["runs"] == []
