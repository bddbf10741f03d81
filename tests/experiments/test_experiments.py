"""The experiments in benchmarks/: their configurations, and the results and pages beside them."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from simfbo.errors import UserError
from simfbo.experiments import retune as search
from simfbo.experiments import summary
from simfbo.experiments.experiment import NAMES, chosen, file, load
from simfbo.experiments.results import Resources, place, run_part
from simfbo.runs.history import History
from simfbo.studies import tuning

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
THEORY = ("speedup", "objective-mismatch")
RUNS = [name for name in NAMES if name not in THEORY]


def refuse(*ignored):
    raise AssertionError("a run is missing")


def test_names():
    assert chosen("all") == list(NAMES)
    assert chosen("speedup") == ["speedup"]
    with pytest.raises(UserError, match=r"^Unknown experiment 'mnist'\. Did you mean 'mnist-"):
        chosen("mnist")
    with pytest.raises(UserError, match=r"'qq'\. simfbo reproduce --list lists them\.$"):
        chosen("qq")


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_configurations_are_whole(name, quick):
    experiment = load(name, quick)
    assert file(name) == BENCHMARKS / name / "experiment.toml"
    assert experiment.minutes > 0
    assert experiment.title
    assert all(claim and verdict for claim, verdict in experiment.claims)
    if name in RUNS:
        for part in experiment.parts:
            assert len(part.seeds) >= (1 if quick else 3)
            assert len({method.label for method in part.methods.values()}) == len(part.methods)


def test_quick_takes_five_minutes_in_all():
    assert sum(load(name, quick=True).minutes for name in NAMES) <= 5


def test_short_runs_are_shares_of_long_ones():
    (long,), (short,) = load("mnist-iid").parts, load("mnist-iid", quick=True).parts
    assert set(short.methods) < set(long.methods)
    for name, method in short.methods.items():
        assert method.config.rounds == round(0.05 * long.methods[name].config.rounds)
        assert method.config.every <= max(1, method.config.rounds // 6)
        assert method.config.algorithm == long.methods[name].config.algorithm


def test_parts_differ_as_they_say():
    iid, digit, small = load("heterogeneous").parts
    assert [part.name for part in (iid, digit, small)] == ["iid", "one-digit", "small-local"]
    assert set(iid.methods) > set(small.methods) == {"simfbo", "shrofbo"}
    assert set(digit.methods) - set(small.methods) == {"mimefbo", "mimefbo-memory"}
    a, b = digit.methods["shrofbo"].config, small.methods["shrofbo"].config
    assert a.task == b.task
    assert a.task.partition == "shards" != iid.methods["simfbo"].config.task.partition
    assert a.algorithm.server is None
    for name in ("y", "v", "x"):
        server = getattr(b.algorithm.server, name)
        assert server == getattr(a.algorithm.local, name)
        assert getattr(b.algorithm.local, name) == pytest.approx(server / 10)


@pytest.mark.parametrize("name", ["mnist-iid", "mnist-noniid"])
def test_tuned_steps_are_what_the_search_found(name):
    """The steps in use are the kept winner's, and that is the best trial of the last stage."""
    experiment = load(name)
    (part,) = experiment.parts
    rules = experiment.tree["tuning"]
    again = search.tuned(part, rules, BENCHMARKS / name, Resources())
    tuned = [key for key, method in part.methods.items() if method.tuned]
    assert len(tuned) == 8 + ("memfbo2" in tuned)
    for key in tuned:
        assert again.methods[key].config == part.methods[key].config
        lines = (BENCHMARKS / name / "tuning" / f"{key}.jsonl").read_text().splitlines()
        trials = [json.loads(line) for line in lines]
        assert sum(trial["stage"] == 0 for trial in trials) == rules["trials"]
        assert sum(trial["communication_rounds"] for trial in trials) <= 1.1 * rules["budget"]
        first = {step: trials[0]["settings"][step] for step in trials[0]["settings"]}
        assert first == {step: rules["begin"][step[-1]] for step in first}
        last = [trial for trial in trials if trial["stage"] == trials[-1]["stage"]]
        best = max(last, key=lambda trial: trial["score"] or 0)["settings"]
        assert {step: tuning.lookup(part.methods[key].config, step) for step in best} == best


def test_running_time_takes_the_tuned_steps():
    (timed,), (tuned,) = load("running-time").parts, load("mnist-iid").parts
    for name, method in timed.methods.items():
        theirs = tuned.methods[name].config
        assert method.config.algorithm == theirs.algorithm
        assert method.config.local_work == theirs.local_work
        assert method.config.task == theirs.task


@pytest.mark.parametrize("name", RUNS)
def test_results_are_those_of_the_configuration(name, monkeypatch):
    """What results/ holds is all there, ended, and made with the settings of today."""
    monkeypatch.setattr("simfbo.experiments.results.sweep", refuse)
    kept = set()
    for part in load(name).parts:
        groups = run_part(part, BENCHMARKS / name, Resources())
        for histories in groups.values():
            assert all(history.end["status"] in ("finished", "diverged") for history in histories)
        kept |= {place(BENCHMARKS / name, part, m, seed) for m in groups for seed in part.seeds}
    assert kept == set((BENCHMARKS / name / "results").iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_readme_shows_the_table(name):
    """A page's numbers are the results', line by line."""
    page = (BENCHMARKS / name / "README.md").read_text()
    table = (BENCHMARKS / name / "table.md").read_text()
    for line in table.splitlines():
        assert line in page, line
    for part in ("**Claim.**", "**Set-up.**", "**Command.**", "**Time.**", "**Our figures.**",
                 "**The paper's figures.**", "**What differs, and why.**"):  # fmt: skip
        assert page.count(part) == 1, part
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page):
        assert (BENCHMARKS / name / picture).is_file()


def test_summary_is_of_these_results(tmp_path):
    for name in ("mnist-iid", "mnist-noniid", "cifar-iid"):
        (tmp_path / name).symlink_to(BENCHMARKS / name)
    assert summary.write(tmp_path, quick=False)
    assert (tmp_path / "summary.md").read_text() == (BENCHMARKS / "summary.md").read_text()
    page = (ROOT / "docs" / "explanation-reproduction.md").read_text()
    for line in (BENCHMARKS / "summary.md").read_text().splitlines():
        assert line in page


def test_the_wheel_carries_the_configurations():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["force-include"] == {
        f"benchmarks/{name}/experiment.toml": f"simfbo/experiments/{name}.toml" for name in NAMES
    }


def test_numbers_that_were_asked_for():
    """The paper's accuracies are reached, and half its rounds suffice, in the kept results."""

    def accuracies(name, part, method):
        found = {p.name: p for p in load(name).parts}[part]
        files = [place(BENCHMARKS / name, found, method, seed) for seed in found.seeds]
        return [History.load(file) for file in files]

    def mean(histories):
        return sum(h.records[-1]["test_accuracy"] for h in histories) / len(histories)

    def first(history, target):
        return next(r["bytes_up"] + r["bytes_down"] for r in history.records
                    if r["test_accuracy"] >= target)  # fmt: skip

    paper = accuracies("mnist-iid", "", "simfbo-paper")
    ours = accuracies("mnist-iid", "", "simfbo-local")
    assert mean(paper) >= 0.974
    assert mean(accuracies("mnist-noniid", "", "simfbo-paper")) >= 0.952
    assert mean(accuracies("cifar-iid", "upper80", "simfbo-momentum")) >= 0.625
    for one, other in zip(ours, paper, strict=True):
        assert 2 * first(one, 0.974) <= first(other, 0.974)
