"""Configurations: files and flags in, checked models or one sentence out."""

import re

import pytest

from simfbo.cli import _configuration, _parser
from simfbo.config import RunConfig, load, parse_override
from simfbo.errors import UserError


def configuration(*arguments: str) -> RunConfig:
    """Return what `simfbo run` would run with these arguments."""
    return _configuration(_parser().parse_args(["run", *arguments]))


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
    ],
)
def test_defaults_that_depend_on_others(settings, clients, share):
    task = load(None, IMAGES | settings).task
    assert (task.clients, task.upper_share) == (clients, share)


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


@pytest.mark.parametrize("text", ["a", "1..", "1..2..3", "1,b"])
def test_tau_flag_that_is_none(text):
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
        ({"task.client": 3}, "'task.client' is no setting. Did you mean 'clients'?"),
        ({"qqqq": 3}, "'qqqq' is no setting."),
        (
            {"algorithm.sever.x": 0.1},
            "'algorithm.sever' is no setting. Did you mean 'server'?",
        ),
        ({"rounds": "many"}, "'rounds' is wrong: input should be a valid integer, got 'many'."),
        ({"rounds": 3.0}, "'rounds' is wrong: input should be a valid integer, got 3.0."),
        ({"rounds": True}, "'rounds' is wrong: input should be a valid integer, got True."),
        ({"rounds": 0}, "'rounds' is wrong: input should be greater than 0, got 0."),
        (
            {"algorithm.local.x": -0.1},
            "'algorithm.local.x' is wrong: input should be greater than 0, got -0.1.",
        ),
        (
            {"algorithm.local.x": float("inf")},
            "'algorithm.local.x' is wrong: input should be a finite number, got inf.",
        ),
        ({"seed": -1}, "'seed' is wrong: input should be greater than or equal to 0, got -1."),
        (
            {"local_work.tau": 0},
            "'local_work.tau' is wrong: input should be greater than 0, got 0.",
        ),
        ({"local_work.low": 3}, "'local_work' is wrong: give both low and high, got {'low': 3}."),
        ({"local_work.high": 3}, "'local_work' is wrong: give both low and high, got {'high': 3}."),
        (
            {"local_work.low": 3, "local_work.high": 2},
            "'local_work' is wrong: low must not exceed high, got {'low': 3, 'high': 2}.",
        ),
        ({"engine": "fast"}, "'engine' is wrong: input should be 'simulated' or 'debug', "
         "got 'fast'."),
        ({"task.name": "quadratics"}, "'task.name' is wrong: use quadratic or "
         "hyper-representation, got 'quadratics'."),
        ({"task": {"clients": 3}}, "'task.name' is missing from the configuration."),
        ({"rounds.x": 3}, "'rounds' is wrong: input should be a valid integer, "
         "got {'x': 3}."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_that_names_the_field(settings, sentence):
    assert complaint(QUADRATIC | settings) == sentence


def test_missing_task():
    assert complaint({}) == "'task' is missing from the configuration."
    with pytest.raises(UserError) as caught:
        configuration()
    assert str(caught.value) == (
        "Name a task: quadratic or hyper-representation; or give --config FILE."
    )


def test_a_value_is_no_table(tmp_path):
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
    ],
)
def test_overrides_are_toml_or_text(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["rounds", "=3", "  =3", ""])
def test_an_override_needs_key_and_value(text):
    with pytest.raises(UserError) as caught:
        parse_override(text)
    assert str(caught.value) == f"'{text}' is no setting: write KEY=VALUE, as in task.clients=50."


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
        ({"sampling.kind": "everyone", "sampling.size": 3}, "leave size out"),
        ({"algorithm.local": 3}, "'algorithm.local' is wrong: input should be a table of settings"),
        ({"seed": 2**32}, "'seed' is wrong: input should be less than 4294967296"),
    ],
)
def test_settings_that_do_not_fit_are_refused(keys, sentence):
    with pytest.raises(UserError, match=sentence):
        load(None, {"task.name": "quadratic", **keys})
