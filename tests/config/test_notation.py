"""Whole numbers and names as people write them, in TOML and by name."""

import pytest

from simfbo import datasets
from simfbo.config.build import law_factory
from simfbo.config.catalogue import METHODS, TASKS
from simfbo.config.files import read
from simfbo.config.run import checked
from simfbo.errors import UserError
from simfbo.studies.comparison import plan

TEXT = """
rounds = 1e3
every = 50.0
engine = "Debug"
[task]
name = "Hyper_Representation"
dataset = "DIGITS"
partition = "IID"
clients = 1e1
regularisation = 1
[algorithm]
name = "FedNest"
lower_rounds = 2.0
[local_work]
tau = [1.0, 2, 1e0, 1, 1, 1, 1, 1, 1, 1]
[aggregation]
iterations = 1e1
"""


def test_whole_floats_and_names_in_any_case_are_what_they_stand_for(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(TEXT)
    plain = TEXT.replace("1e3", "1000").replace("50.0", "50").replace("1e1", "10")
    plain = plain.replace("2.0", "2").replace("1.0", "1").replace("1e0", "1").lower()
    other = tmp_path / "b.toml"
    other.write_text(plain.replace("hyper_representation", "hyper-representation"))
    found = checked(read(file), {})
    assert found == checked(read(other), {})
    assert type(found.rounds) is type(found.task.clients) is int
    assert found.task.upper_share == 0.5  # a default that depends on the partition


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("rounds", 1.5, "'rounds' should be a valid integer, got 1.5"),
        ("rounds", float("inf"), "'rounds' should be .*, got inf"),
        ("rounds", "1e3", "'rounds' should be a valid integer, got '1e3'"),
        ("rounds", 1e10, "'rounds' should be less than 2147483648, got 10000000000"),
        ("engine", "Fast", "'engine' should be 'simulated' or 'debug', got 'Fast'"),
    ],
)
def test_what_is_neither_is_refused(key, value, sentence):
    with pytest.raises(UserError, match=sentence):
        checked({"task": {"name": "quadratic"}}, {key: value})


@pytest.mark.parametrize("name", ["SimFBO", "SIMFBO", "simfbo"])
def test_methods_are_found_in_any_case(name):
    assert METHODS.find(name).name == "simfbo"
    assert plan({"task": {"name": "quadratic"}}, {}, [name])["simfbo"].algorithm.name == "simfbo"
    assert callable(law_factory(name))


def test_hyphens_and_underscores_are_one():
    assert METHODS.find("FedBiOAcc-Local").name == "fedbioacc_local"
    assert TASKS.find("hyper_representation").name == "hyper-representation"


def test_data_sets_are_found_in_any_case():
    assert datasets.load("Digits").name == "digits"
    with pytest.raises(UserError, match="Unknown dataset of images 'schools'"):
        datasets.load("Schools")
