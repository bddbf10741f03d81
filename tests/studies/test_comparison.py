"""Comparisons: who runs with what, the numbers of the table and the figures."""

import math

import numpy as np
import pytest
from scipy import stats

from simfbo.config.build_task import build_task
from simfbo.errors import UserError
from simfbo.runs.history import History
from simfbo.studies import comparison, figures, tables

TREE = {
    "rounds": 30,
    "task": {"name": "quadratic", "clients": 4},
    "methods": {
        "plain": {"algorithm": {"name": "simfbo"}},
        "nested": {"rounds": 5, "algorithm": {"name": "fednest", "neumann_terms": 2}},
        "fedmbo": {},
    },
}


def history(values, seed=0, status="finished", scale=1):
    records = [
        {
            "round": 10 * j,
            "communication_rounds": scale * 10 * j,
            "bytes_down": 2_000_000 * j,
            "bytes_up": 1_000_000 * j,
            "seconds": 0.1 * j,
            "cpu_seconds": 0.5 * j,
            "test_accuracy": value,
        }
        for j, value in enumerate(values)
    ]
    header = {"algorithm": "A", "seed": seed, "rounds": 20, "config": {"task": {"name": "t"}}}
    return History(header, records, {"status": status})


def test_plan_shares_what_is_common_and_keeps_what_is_not():
    methods = comparison.plan(TREE, {"seed": 3})
    assert list(methods) == ["plain", "nested", "fedmbo"]
    assert {config.task.clients for config in methods.values()} == {4}
    assert {config.seed for config in methods.values()} == {3}
    assert [config.rounds for config in methods.values()] == [30, 5, 30]
    assert methods["nested"].algorithm.neumann_terms == 2
    assert methods["fedmbo"].algorithm.name == "fedmbo"
    assert methods["fedmbo"].sampling.kind == "with-replacement"
    assert "methods" in TREE


def test_methods_written_from_abstracts_are_named_below_the_table(tmp_path):
    methods = comparison.plan(TREE, {}, ["plain", "fedmbo"])
    assert comparison.caveat(methods) == ""
    methods["free"] = methods["plain"].model_copy(update={"steps": "tuning-free"})
    methods |= comparison.plan({"task": {"name": "quadratic"}}, {}, ["fedmsa"])
    note = comparison.caveat(methods)
    assert note == "free, fedmsa: our reading of the abstract."
    groups = {"fedmsa": [history([0.1, 0.2])]}
    rows = tables.rows(groups, "test_accuracy")
    figures.save(groups, "test_accuracy", rows, tmp_path, note=note)
    assert (tmp_path / "table.md").read_text().endswith(f" |\n\n{note}\n")


def test_plan_merges_tables_key_by_key():
    tree = {**TREE, "sampling": {"size": 2}, "methods": {"simfbo": {"sampling": {
        "kind": "with-replacement"}}}}  # fmt: skip
    (config,) = comparison.plan(tree, {}).values()
    assert (config.sampling.kind, config.sampling.size) == ("with-replacement", 2)
    with pytest.raises(UserError, match="'algorithm' differs between methods: move it"):
        comparison.plan({**TREE, "algorithm": {"radius": 3.0}}, {})


def test_plan_lets_flags_win_and_takes_some():
    methods = comparison.plan(TREE, {"rounds": 2, "task.clients": 3}, ["nested"])
    assert list(methods) == ["nested"]
    assert (methods["nested"].rounds, methods["nested"].task.clients) == (2, 3)


def test_plan_without_a_file_takes_names_of_algorithms():
    methods = comparison.plan({}, {"task.name": "quadratic"}, ["lfednest", "memfbo"])
    assert [config.algorithm.name for config in methods.values()] == ["lfednest", "memfbo"]
    everything = comparison.plan({}, {"task.name": "quadratic"})
    assert len(everything) == 11
    assert "fedbioacc_local" not in everything  # which solves another problem


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ({}, "'methods' must hold a table per method, for example [methods.fednest]."),
        ([1], "'methods' must hold a table per method, for example [methods.fednest]."),
        ({"a": 1}, "'methods.a' must be a table of settings, got 1."),
        (
            {"../a": {}},
            "'../a' names a folder: use at most 60 letters, digits, '.', '-' and '_', with a "
            "letter or digit first and last.",
        ),
        ({"a": {"seed": 1}}, "'methods.a.seed' cannot be set: all methods share the seed."),
        (
            {"fednest": {"algorithm": {"name": "fednest", "terms": 3}}},
            "In method 'fednest': Unknown setting 'algorithm.terms'. Did you mean "
            "'algorithm.neumann_terms'?",
        ),
        (
            {"a": {}},
            "In method 'a': Unknown algorithm 'a'. Use simfbo, shrofbo, fednest, lfednest, aggitd, "
            "fedbio, fedmbo, memfbo, fedmsa, fedbioacc, mimefbo or fedbioacc_local.",
        ),
    ],
)
def test_plan_of_nonsense(methods, sentence):
    with pytest.raises(UserError) as caught:
        comparison.plan({**TREE, "methods": methods}, {})
    assert str(caught.value) == sentence


def test_equal_costs_by_hand():
    """An iteration of fednest is ten exchanges here, of aggitd thirteen, of simfbo one."""
    names = ["simfbo", "fednest", "aggitd"]
    tree = {"rounds": 260, "every": 26, "task": {"name": "quadratic", "clients": 4}}
    methods = comparison.plan(tree, {}, names)
    task = build_task(methods["simfbo"], None)
    costs = {name: comparison.iteration_cost(one, task) for name, one in methods.items()}
    assert [cost.exchanges for cost in costs.values()] == [1, 10, 13]
    found = comparison.equal(methods, {name: cost.exchanges for name, cost in costs.items()})
    assert [(one.rounds, one.every) for one in found.values()] == [(260, 26), (26, 3), (20, 2)]
    # Of 4 clients with float64, dimensions 4 and 5, 14 numbers go each way, and the x-step's 9.
    assert costs["simfbo"].bytes == 4 * 8 * 2 * 14
    found = comparison.equal(methods, {name: cost.bytes for name, cost in costs.items()})
    spent = [one.rounds * costs[name].bytes for name, one in found.items()]
    assert max(spent) == spent[0] < min(spent) + max(cost.bytes for cost in costs.values())


def test_presets_of_methods_on_another_task_are_refused():
    tree = {"task": {"name": "hyper-representation", "dataset": "mnist"}, "methods": {
        "paper": {"preset": "paper", "algorithm": {"name": "simfbo"}},
        "few": {"preset": "few-bytes", "algorithm": {"name": "simfbo"}}}}  # fmt: skip
    assert [one.rounds for one in comparison.plan(tree, {}).values()] == [2000, 350]
    tree["methods"]["few"]["preset"] = "private"
    with pytest.raises(UserError, match=r"^'paper' and 'few' differ in the task: methods are "):
        comparison.plan(tree, {})


def test_methods_with_iterations_of_their_own_keep_them():
    names = list(TREE["methods"])
    assert comparison.without_rounds(TREE, {}, names) == ["plain", "fedmbo"]
    assert comparison.without_rounds(TREE, {"rounds": 3}, names) == names
    coded = {"methods": {"a": {"preset": "few-bytes"}, "b": {}}}
    assert comparison.without_rounds(coded, {}, ["a", "b"]) == ["b"]


def test_plan_of_an_unknown_method():
    with pytest.raises(UserError, match=r"Unknown method 'x'. The file has plain, nested, fedmbo."):
        comparison.plan(TREE, {}, ["x"])


def test_rows():
    groups = {
        "good": [history([0.1, 0.8, 0.9]), history([0.1, 0.9, 0.96], 1)],
        "bad": [history([0.1, 0.2, 0.2], scale=7), history([0.1, 0.1, 0.8], 1, scale=7)],
        "lost": [history([0.1, math.nan], status="diverged"), history([0.1, 0.5, 0.5])],
    }
    good, bad, lost = tables.rows(groups, "test_accuracy", [0.8, 0.95])
    assert good["test accuracy"] == "0.93 ± 0.042"
    assert (good["iterations"], good["exchanges"], good["MB"], good["CPU s"]) == (
        "20",
        "20",
        "6",
        "1.0",
    )
    assert good["to 0.8: exchanges / MB / CPU s"] == "10 / 3 / 0.5"
    assert good["to 0.95: exchanges / MB / CPU s"] == "1 of 2 seeds"
    assert bad["exchanges"] == "140"
    assert bad["to 0.8: exchanges / MB / CPU s"] == "1 of 2 seeds"
    assert bad["to 0.95: exchanges / MB / CPU s"] == "–"  # noqa: RUF001
    assert lost["test accuracy"] == "1 of 2 diverged"


def test_verdicts_of_the_runs_are_counted():
    groups = {"a": [history([0.1, 0.8]), history([0.1, 0.9], 1), history([0.1, 0.9], 2)]}
    for run, status in zip(groups["a"], ("still improving", "converged", "still improving")):
        run.verdict = {"status": status}
    (row,) = tables.rows(groups, "test_accuracy")
    assert row["verdict"] == "1 converged, 2 still improving"
    (row,) = tables.rows({"a": groups["a"][:1]}, "test_accuracy")
    assert row["verdict"] == "still improving"
    groups["a"][0].verdict = None
    assert "verdict" not in tables.rows(groups, "test_accuracy")[0]


def test_targets_of_a_loss_are_reached_from_above():
    runs = [history([1.0, 0.3, 0.2])]
    for record in runs[0].records:
        record["loss"] = record.pop("test_accuracy")
    (row,) = tables.rows({"a": runs}, "loss", [0.3])
    assert row["to 0.3: exchanges / MB / CPU s"] == "10 / 3 / 0.5"


def test_band_is_students_interval_at_every_evaluation():
    places, values = [[0, 2, 4], [0, 4, 6, 8], [0, 3, 5]], [[0, 2, 4], [1, 3, 5, 9], [2, 4, 6]]
    along, middle, half = figures.band(places, values)
    np.testing.assert_allclose(along, [0, 3, 5])
    np.testing.assert_allclose(middle, [1, 3, 5])
    low, high = stats.t.interval(0.95, 2, middle, stats.sem([0, 1, 2]))
    np.testing.assert_allclose([middle - half, middle + half], [low, high])


def test_band_of_one_run_has_no_width():
    grid, middle, half = figures.band([[0, 1]], [[3, 4]])
    assert (grid.tolist(), middle.tolist(), half.tolist()) == ([0, 1], [3, 4], [0, 0])


def test_draw_has_a_line_and_a_band_per_method():
    groups = {"a": [history([0.1, 0.5]), history([0.1, 0.7], 1)], "b": [history([0.2, 0.3])]}
    figure = figures.draw(groups, "test_accuracy")
    labels = [ax.get_xlabel() for ax in figure.axes]
    assert labels == ["communication rounds", "megabytes sent, both ways", "processor seconds"]
    for ax, ends in zip(figure.axes, ([10, 10], [3, 3], [0.5, 0.5]), strict=True):
        assert [line.get_xdata()[-1] for line in ax.lines] == ends
        assert [line.get_ydata()[-1] for line in ax.lines] == pytest.approx([0.6, 0.3])
        assert len(ax.collections) == 2
    gap = figures.band([[0, 1], [0, 1]], [[1, math.inf], [1, 2]])[1]
    assert gap[0] == 1
    assert math.isnan(gap[1])
    with pytest.raises(UserError, match="nothing to draw"):
        figures.draw({"a": [history([])]}, "test_accuracy")


def test_titles_say_where_methods_end_the_best_first():
    groups = {name: [history([0.1, end - 0.01]), history([0.1, end + 0.01], 1)]
              for name, end in {"a": 0.5, "b": 0.7, "c": 0.6}.items()}  # fmt: skip
    assert figures.ends(groups, "test_accuracy") == "Test accuracy at the end: b 0.7, c 0.6, a 0.5"
    groups["d"] = [history([0.1, 0.2])]
    assert figures.ends(groups, "test_accuracy") == (
        "Test accuracy at the end: best b 0.7, worst d 0.2"
    )
    groups["d"] = [history([0.1, 0.9], status="diverged")]
    assert figures.ends(groups, "test_accuracy") == "Test accuracy of 4 methods"


def test_bands_that_reach_below_zero_have_an_upper_half_on_logarithmic_axes():
    groups = {"a": [history([1000, 1.0]), history([1000, 100.0], 1)]}
    ax = figures.draw(groups, "test_accuracy").axes[0]
    assert ax.get_yscale() == "log"
    (band,) = ax.collections
    (path,) = band.get_paths()
    assert path.vertices[:, 1].min() == pytest.approx(50.5)  # the mean of 1 and 100


def test_jobs_share_seeds(tmp_path):
    methods = comparison.plan(TREE, {}, ["plain", "nested"])
    jobs = comparison.jobs(methods, [4, 7], tmp_path)
    assert [(job.directory.name, job.config.seed) for job in jobs] == [
        ("plain-seed4", 4), ("nested-seed4", 4), ("plain-seed7", 7), ("nested-seed7", 7),
    ]  # fmt: skip
    for wrong in ("a", -1, 0.5, True):
        with pytest.raises(UserError, match="'seeds' must be how many there are"):
            comparison.jobs(methods, [0, wrong], tmp_path)


def test_the_task_says_which_metrics_are_to_be_large():
    described, bare = history([0.1]), history([0.1])
    described.header["about"] = {"metric": "f1", "goal": "max", "maximise": ["recall"]}
    names = ("f1", "recall", "loss", "test_accuracy")
    assert [tables.goal([described], name) for name in names] == ["max", "max", "min", "min"]
    assert [tables.goal([bare], name) for name in names] == ["min", "min", "min", "max"]
