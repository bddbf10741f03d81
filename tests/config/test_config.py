"""Configurations: files and flags in, checked models or one sentence out."""

import importlib
import re
import sys
from pathlib import Path

import jax
import pytest

from simfbo.cli import arguments
from simfbo.cli.main import build_parser
from simfbo.config.build import build_local_work
from simfbo.config.files import as_toml, parse_override
from simfbo.config.run import RunConfig, load
from simfbo.errors import UserError
from simfbo.experiments import experiment
from simfbo.studies import comparison

FAULTS = Path(__file__).parents[2] / "benchmarks" / "faults"


def configuration(*flags: str) -> RunConfig:
    """Return what `simfbo run` would run with these flags."""
    return arguments.configuration(build_parser("run").parse_args(["run", *flags]))


def complaint(overrides: dict, file=None) -> str:
    """Return the sentence that these settings are answered with."""
    with pytest.raises(UserError) as caught:
        load(file, overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence[-1] in ".?"
    return sentence


QUADRATIC = {"task.name": "quadratic"}
IMAGES = {"task.name": "hyper-representation"}


def test_defaults():
    config = load(None, QUADRATIC)
    assert config.task.clients == 10
    assert (config.rounds, config.every, config.seed) == (500, None, 0)
    assert config.engine == "simulated"
    assert (config.algorithm.local.y, config.algorithm.local.v, config.algorithm.local.x) == (
        0.2,
        0.1,
        0.05,
    )
    assert config.algorithm.server is None
    assert config.algorithm.radius == 10.0
    assert config.local_work.tau == 1


@pytest.mark.parametrize(
    ("settings", "clients", "share"),
    [
        ({}, 20, 0.5),
        ({"task.dataset": "digits"}, 20, 0.5),
        ({"task.dataset": "mnist"}, 100, 0.5),
        ({"task.dataset": "cifar10", "task.partition": "iid"}, 100, 0.5),
        ({"task.partition": "shards"}, 20, 0.2),
        ({"task.dataset": "mnist", "task.partition": "dirichlet"}, 100, 0.2),
        ({"task.clients": 7, "task.upper_share": 0.3, "task.partition": "shards"}, 7, 0.3),
        ({"task.dataset": "exercises"}, 20, 0.2),
        ({"task.dataset": "exercises", "task.partition": "natural"}, 20, 0.2),
        ({"task.dataset": "exercises", "task.partition": "iid", "task.clients": 8}, 8, 0.5),
    ],
)
def test_defaults_that_depend_on_others(settings, clients, share):
    task = load(None, IMAGES | settings).task
    assert (task.clients, task.upper_share) == (clients, share)


@pytest.mark.parametrize(
    ("settings", "partition"),
    [
        ({}, "iid"),
        ({"task.dataset": "exercises"}, "natural"),
        ({"task.dataset": "exercises", "task.partition": "shards"}, "shards"),
    ],
)
def test_images_stay_with_their_own_clients(settings, partition):
    assert load(None, IMAGES | settings).task.partition == partition


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"task.partition": "natural"}, "digits has no clients of its own"),
        ({"task.dataset": "exercises", "task.clients": 9}, "exercises has 20 clients of its own"),
        ({"task.dataset": "exercises", "task.train_images": 9}, "leave train_images and"),
        ({"task.dataset": "exercises", "task.unseen": 20}, "must leave some of the 20 clients"),
    ],
)
def test_natural_clients_are_all_or_none(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        load(None, IMAGES | settings)


def test_steps_left_out_come_from_the_local_ones_and_the_paper():
    algorithm = load(None, QUADRATIC | {"algorithm.local.x": 0.3}).algorithm
    assert algorithm.local.model_dump() == {"y": 0.2, "v": 0.1, "x": 0.3}
    settings = {"algorithm.local.y": 0.4, "algorithm.server.x": 0.01}
    algorithm = load(None, QUADRATIC | settings).algorithm
    assert algorithm.server.model_dump() == {"y": 0.4, "v": 0.1, "x": 0.01}


def test_file_then_flags_then_set(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(
        'rounds = 7\nseed = 7\nevery = 7\n[task]\nname = "quadratic"\nclients = 7\n'
        "[algorithm.local]\ny = 0.7\nv = 0.7\nx = 0.7\n"
    )
    config = configuration(
        "--config", str(file), "--seed", "8", "--rounds", "8",
        "--set", "rounds=9", "--set", "algorithm.local.y=0.9",
    )  # fmt: skip
    assert (config.every, config.seed, config.rounds) == (7, 8, 9)
    assert config.task.clients == 7
    assert (config.algorithm.local.y, config.algorithm.local.x) == (0.9, 0.7)


def test_the_last_set_wins():
    config = configuration("quadratic", "--set", "rounds=3", "--set", "rounds=4")
    assert config.rounds == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5", (5, None, None)), ("1,2,3", ([1, 2, 3], None, None)), ("1..10", (1, 1, 10))],
)
def test_tau_flag(text, expected):
    work = configuration("quadratic", "--tau", text).local_work
    assert (work.tau, work.low, work.high) == expected


def test_tau_flag_wins_over_a_range_in_the_file(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('[task]\nname = "quadratic"\n[local_work]\nlow = 2\nhigh = 9\n')
    work = configuration("--config", str(file), "--tau", "3").local_work
    assert (work.tau, work.low, work.high) == (3, None, None)


def test_local_rules(tmp_path):
    """As a flag and in a file, where they reach the plan; one rule is for all clients."""
    flag = configuration("quadratic", "--clients", "4", "--tau", "3", "--rules",
                         "sgd,momentum:0.5,proximal:0.5,coefficients:1:2:3")  # fmt: skip
    file = tmp_path / "my.toml"
    file.write_text(as_toml(flag))
    for config in (flag, configuration("--config", str(file))):
        plan = build_local_work(config.local_work, 0)(jax.random.key(0), 4)
        assert plan.norm.tolist() == [3.0, 4.25, 1.75, 6.0]
    alone = configuration("quadratic", "--tau", "2", "--rules", "momentum:0.5").local_work
    assert build_local_work(alone, 0)(jax.random.key(0), 3).norm.tolist() == [2.5] * 3
    some = configuration("quadratic", "--rules", "sgd,momentum:0.5", "--tau", "2", "--set",
                         "local_work.rules_every_round=true").local_work  # fmt: skip
    assert set(build_local_work(some, 0)(jax.random.key(0), 50).norm.tolist()) == {2.0, 2.5}


@pytest.mark.parametrize("text", ["a", "1..", "1..2..3", "1,b"])
def test_tau_flag_that_is_invalid(text):
    with pytest.raises(UserError, match=re.escape(f"--tau takes 5, 1..10 or 1,2,3; got '{text}'.")):
        configuration("quadratic", "--tau", text)


def test_every_shortcut_reaches_its_key():
    config = configuration(
        "hyper-representation", "--dataset", "mnist", "--partition", "dirichlet", "--clients", "9",
        "--algorithm", "shrofbo", "--cohort", "4", "--every", "3", "--engine", "debug",
    )  # fmt: skip
    task = config.task
    assert (task.dataset, task.partition, task.clients) == ("mnist", "dirichlet", 9)
    assert (config.algorithm.name, config.sampling.size) == ("shrofbo", 4)
    assert (config.every, config.engine) == (3, "debug")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"task.client": 3}, "Unknown setting 'task.client'. Did you mean 'task.clients'?"),
        ({"qqqq": 3}, "Unknown setting 'qqqq'."),
        (
            {"algorithm.sever.x": 0.1},
            "Unknown setting 'algorithm.sever'. Did you mean 'algorithm.server'?",
        ),
        ({"rounds": "many"}, "'rounds' should be a valid integer, got 'many'."),
        ({"rounds": 3.5}, "'rounds' should be a valid integer, got 3.5."),
        ({"rounds": True}, "'rounds' should be a valid integer, got True."),
        ({"rounds": 0}, "'rounds' should be greater than 0, got 0."),
        (
            {"algorithm.local.x": -0.1},
            "'algorithm.local.x' should be greater than 0, got -0.1.",
        ),
        (
            {"algorithm.local.x": float("inf")},
            "'algorithm.local.x' should be a finite number, got inf.",
        ),
        ({"seed": -1}, "'seed' should be greater than or equal to 0, got -1."),
        (
            {"local_work.tau": 0},
            "'local_work.tau' should be greater than 0, got 0.",
        ),
        ({"aggregation.radius": 0.0}, "'aggregation.radius' should be greater than 0, got 0.0."),
        (
            {"aggregation.iterations": 0},
            "'aggregation.iterations' should be greater than or equal to 1, got 0.",
        ),
        ({"local_work.low": 3}, "'local_work' is invalid: give both low and high, got {'low': 3}."),
        ({"local_work.high": 3},
         "'local_work' is invalid: give both low and high, got {'high': 3}."),
        (
            {"local_work.low": 3, "local_work.high": 2},
            "'local_work' is invalid: low must not exceed high, got {'low': 3, 'high': 2}.",
        ),
        ({"engine": "fast"}, "'engine' should be 'simulated' or 'debug', "
         "got 'fast'."),
        ({"task.name": "quadratics"}, "Unknown task 'quadratics'. Did you mean 'quadratic'?"),
        ({"task": {"clients": 3}}, "'task.name' is missing: use "
         "quadratic, hyper-representation, regularisation, label-cleaning, long-tail or fair."),
        ({"rounds.x": 3}, "'rounds' should be a valid integer, "
         "got {'x': 3}."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_that_names_the_field(settings, sentence):
    assert complaint(QUADRATIC | settings) == sentence


def test_missing_task():
    assert complaint({}) == (
        "'task.name' is missing: use quadratic, hyper-representation, "
        "regularisation, label-cleaning, long-tail or fair."
    )
    with pytest.raises(UserError) as caught:
        configuration()
    assert str(caught.value) == (
        "Name a task (quadratic, hyper-representation, regularisation, label-cleaning, long-tail "
        "or fair), or give --config FILE."
    )


def test_a_value_is_not_a_table(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('task = "quadratic"\n')
    assert complaint({"task.clients": 3}, file) == (
        "'task.clients' cannot be set: 'task' is a value, not a table."
    )


def test_files_that_cannot_be_used(tmp_path):
    missing = tmp_path / "missing.toml"
    assert complaint({}, missing) == f"{missing} cannot be read: No such file or directory."
    assert complaint({}, tmp_path) == f"{tmp_path} cannot be read: Is a directory."
    bad = tmp_path / "bad.toml"
    bad.write_text("rounds = = 3\n")
    assert complaint({}, bad).startswith(f"{bad} is not valid TOML: Invalid value (at line 1")
    bad.write_bytes(b"\xff\xfe\x00")
    assert complaint({}, bad).startswith(f"{bad} is not valid TOML: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rounds=3", ("rounds", 3)),
        (" rounds = 3 ", ("rounds", 3)),
        ("task.noise=1e-3", ("task.noise", 1e-3)),
        ("task.dataset=mnist", ("task.dataset", "mnist")),
        ('task.dataset="mnist"', ("task.dataset", "mnist")),
        ("local_work.tau=[1, 2]", ("local_work.tau", [1, 2])),
        ("local_work.every_round=true", ("local_work.every_round", True)),
        ("a=b=c", ("a", "b=c")),
        ("rounds=3\nseed = 4", ("rounds", "3\nseed = 4")),
        (f"rounds={5000 * '9'}", ("rounds", 5000 * "9")),
        (f"rounds={5000 * '['}", ("rounds", 5000 * "[")),
    ],
)
def test_overrides_are_toml_or_text(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["rounds", "=3", "  =3", ""])
def test_an_override_needs_key_and_value(text):
    with pytest.raises(UserError) as caught:
        parse_override(text)
    assert str(caught.value) == f"Write '{text}' as KEY=VALUE, for example task.clients=50."


def test_none_and_full_stand_for_what_toml_cannot_say():
    quadratic = {"task.name": "quadratic"}
    assert load(None, {**quadratic, "algorithm.radius": "none"}).algorithm.radius is None
    assert load(None, {**quadratic, "task.batch_size": "full"}).task.batch_size is None


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"local_work.every_round": True}, "every_round needs low and high"),
        ({"local_work.optimiser": "momentum"}, "need a strength above 0"),
        ({"local_work.strength": 0.5}, "sgd takes none"),
        ({"local_work.rules": ["momentum:1.5"]}, "'local_work.rules.0' is invalid: write sgd, "),
        ({"local_work.rules": ["sgd", "sgd:1"]}, "'local_work.rules.1' is invalid: write sgd, "),
        ({"local_work.rules": ["adam"]}, r"one per step\), got 'adam'\."),
        ({"local_work.rules_every_round": True}, "rules_every_round needs rules to draw from"),
        (
            {
                "local_work.rules": ["sgd"],
                "local_work.optimiser": "momentum",
                "local_work.strength": 0.5,
            },
            "either rules or optimiser and strength, not both",
        ),
        ({"sampling.kind": "everyone", "sampling.size": 3}, "so omit size"),
        ({"algorithm.local": 3}, "'algorithm.local' should be a table of settings"),
        ({"seed": 2**32}, "'seed' should be less than 4294967296"),
    ],
)
def test_settings_that_do_not_fit_are_refused(keys, sentence):
    with pytest.raises(UserError, match=sentence):
        load(None, {"task.name": "quadratic", **keys})


# What benchmarks/faults/configs.py found.


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"clients": 3}, "Unknown setting 'clients'. Did you mean 'task.clients'?"),
        ({"tau": 3}, "Unknown setting 'tau'. Did you mean 'local_work.tau'?"),
        ({"task.rounds": 3}, "Unknown setting 'task.rounds'. Did you mean 'rounds'?"),
        ({"local-work": {}}, "Unknown setting 'local-work'. Did you mean 'local_work'?"),
        ({"algorithm.y": 0.1}, "Unknown setting 'algorithm.y'. Did you mean 'algorithm.local.y' or "
         "'algorithm.server.y'?"),
        ({"algorithm.penalty": 2.0}, "Unknown setting 'algorithm.penalty'. The settings in "
         "'algorithm' are independent_batches, local, radius, server, server_optimiser, "
         "server_schedule."),
        ({"task.hidden": 3}, "Unknown setting 'task.hidden'. The settings in 'task' are "
         "batch_size, clients, dim_x, dim_y, heterogeneity, noise, samples."),
        ({"methods": {}}, "Unknown setting 'methods'. A file with methods is for simfbo compare."),
        ({"fednest": {}}, "Unknown setting 'fednest'."),
        ({"task.quadratic": 1}, "Unknown setting 'task.quadratic'. The settings in 'task' are "
         "batch_size, clients, dim_x, dim_y, heterogeneity, noise, samples."),
        ({"a\nb": 1}, "Unknown setting '\"a\\nb\"'."),
        ({5000 * "x": 1}, f"Unknown setting '{67 * 'x'}...{10 * 'x'}'."),
    ],
)  # fmt: skip
def test_an_unknown_key_is_answered_with_a_known_one(settings, sentence):
    assert complaint(QUADRATIC | settings) == sentence


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"local_work.tau": [1, 0]}, "'local_work.tau.1' should be greater than 0, "
         "got 0."),
        ({"local_work.tau": 1001}, "'local_work.tau' should be less than or equal "
         "to 1000, got 1001."),
        ({"rounds": 2**31}, "'rounds' should be less than 2147483648, got "
         "2147483648."),
        ({"rounds": 16**6000}, "'rounds' should be less than 2147483648, got a "
         "value too long to show."),
        ({"rounds": 1000 * [1]}, "'rounds' should be a valid integer, got "
         f"[{22 * '1, '}...{3 * ', 1'}]."),
        ({"task.name": 16**6000}, "'task.name' must be text, got a "
         "value too long to show."),
        ({"algorithm.name": []}, "'algorithm.name' must be text, got "
         "[]."),
        ({"task": 3}, "'task' must be a table of settings, got 3."),
        ({"task.noise": float("inf")}, "'task.noise' should be a finite number, "
         "got inf."),
        ({"task.clients": 10**6, "local_work.tau": 101}, "'task.clients' times the most local "
         "steps must not exceed 100,000,000: lower one of them."),
        ({"task.batch_size": 10**9}, "'task.batch_size' should be less than or "
         "equal to 100000, got 1000000000."),
    ],
)  # fmt: skip
def test_a_value_beyond_all_bounds_is_one_short_sentence(settings, sentence):
    assert complaint(QUADRATIC | settings) == sentence


def test_a_table_of_5000_levels_is_one_short_sentence():
    """Python shows it from 3.13 on; before, it is too deep."""
    said = complaint(QUADRATIC | {f"rounds{5000 * '.a'}": 1})
    assert said.startswith("'rounds' should be a valid integer, got ")
    assert len(said) <= 121


def test_a_quadratic_larger_than_memory_is_refused():
    found = complaint(QUADRATIC | {"task.clients": 10**6, "task.dim_x": 10**5})
    assert found.startswith(
        "'task' is invalid: clients times samples times the square of the larger"
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"rounds = " + 5000 * b"9", "{} holds a number with too many digits."),
        (b"rounds = " + 5000 * b"[", "{} is nested too deeply."),
        (b"a." * 3000 + b"a = 1", "'a' is nested too deeply."),
        (b"# \xff", "{} is not valid TOML: save it as UTF-8 text."),
    ],
)
def test_a_file_that_python_cannot_take_is_one_sentence(tmp_path, content, sentence):
    file = tmp_path / "my.toml"
    file.write_bytes(content)
    assert complaint({}, file) == sentence.format(file)


def test_a_byte_order_mark_is_ignored(tmp_path):
    file = tmp_path / "my.toml"
    file.write_bytes(b'\xef\xbb\xbf[task]\r\nname = "quadratic"\r\n')
    assert load(file, {}) == load(None, QUADRATIC)


def test_a_file_without_end_is_refused():
    assert complaint({}, Path("/dev/zero")) == ("/dev/zero is too long for a configuration file.")


@pytest.mark.parametrize(
    "seeds", [[16**6000], [0, "a"], [True], [-1], [2**32], [], {}, [1, 1], 0, -3, True, 10**9]
)
def test_seeds_that_are_invalid(seeds):
    with pytest.raises(UserError, match=r"^'seeds' must be how many there are"):
        comparison.checked_seeds(seeds)


def test_a_comparison_nested_too_deeply_is_one_sentence():
    tree: dict = {}
    for _ in range(3000):
        tree = {"methods": tree}
    with pytest.raises(UserError, match=r"^'methods' is nested too deeply"):
        comparison.plan(tree, {})


@pytest.fixture
def faults(monkeypatch):
    """Return the benchmark that spoils configurations."""
    monkeypatch.syspath_prepend(str(FAULTS))
    monkeypatch.delitem(sys.modules, "mutations", raising=False)
    return importlib.import_module("configs")


def test_no_spoilt_configuration_ends_in_anything_but_a_sentence(faults, tmp_path):
    found = [(case, faults.examine(case, tmp_path)) for case in faults.cases(300, seed=1)]
    assert [(case, finding) for case, finding in found if finding.failed] == []
    outcomes = {finding.outcome for _, finding in found}
    assert outcomes == {"accepted", "refused"}
    assert [case for case, _ in found[:9]] == list(faults.cases(9, seed=1))


def test_an_accepted_configuration_survives_its_file(tmp_path):
    config = load(None, QUADRATIC | {"algorithm.radius": "none", "local_work.tau": [1] * 10})
    (tmp_path / "my.toml").write_text(as_toml(config))
    assert load(tmp_path / "my.toml", {}) == config


def test_presets_lie_between_the_file_and_the_flags(tmp_path):
    few = configuration("quadratic", "--preset", "few-bytes", "--tau", "7")
    assert (few.rounds, few.sampling.size, few.local_work.tau) == (350, 1, 7)
    assert few.codecs is not None
    file = tmp_path / "mine.toml"
    file.write_text('rounds = 9\nseed = 4\n[task]\nname = "quadratic"\n')
    above = configuration("--config", str(file), "--preset", "few-bytes")
    assert (above.rounds, above.seed) == (350, 4)
    file.write_text('preset = "few-bytes"\n' + file.read_text())
    inside = configuration("--config", str(file))
    assert (inside.rounds, inside.seed, inside.local_work.tau) == (9, 4, 25)
    sentence = "'preset' must be few-bytes, few-bytes-non-iid, paper or private, got 'few'."
    assert complaint(QUADRATIC | {"preset": "few"}) == sentence


@pytest.mark.parametrize(
    ("preset", "method", "dataset"),
    [("few-bytes", "small", "iid"), ("few-bytes-non-iid", "shards-97", "shards")],
)
def test_presets_are_the_settings_that_were_measured(preset, method, dataset):
    (measured,) = (
        part for part in experiment.load("bytes").parts if part.name == f"mnist-{dataset}"
    )
    flags = ("--dataset", "mnist", "--partition", dataset, "--preset", preset)
    config = configuration("hyper-representation", *flags)
    ours = measured.methods[method].config.model_copy(update={"every": None})
    assert config == ours
