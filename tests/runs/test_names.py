"""What runs are called: the algorithm and what tells them apart."""

from simfbo.runs.names import differences, groups, labels


def header(algorithm="SimFBO", seed=0, **task):
    config = {"task": {"name": "quadratic", **task}, "algorithm": {"name": algorithm.lower()}}
    return {"algorithm": algorithm, "rounds": 100, "seed": seed, "config": config}


def test_names_mention_what_tells_runs_apart():
    derived = {"inputs": {"data": "ab"}, "versions": {"jax": "1"}, "about": {"colour": "#fff"}}
    own = header("FedNest") | derived
    own["config"]["algorithm"]["inner"] = 5
    assert labels([header(), own]) == ["SimFBO", "FedNest"]
    assert labels([header(clients=3), header(clients=9)]) == [
        "SimFBO, clients 3", "SimFBO, clients 9"]  # fmt: skip
    other = header()
    other["config"]["task"] = {"name": "long-tail", "model": "mlp"}
    assert labels([header(), other]) == ["SimFBO, task quadratic", "SimFBO, task long-tail"]
    assert labels([header(seed=1, clients=3), header(seed=2, clients=9)])[0] == (
        "SimFBO, clients 3, seed 1"
    )
    longer = header() | {"rounds": 200}
    assert labels([header(), longer]) == ["SimFBO, rounds 100", "SimFBO, rounds 200"]
    assert labels([header(seed=0), longer | {"seed": 1}]) == ["SimFBO, seed 0", "SimFBO, seed 1"]
    assert labels([{}]) == ["unknown"]
    many = [header(**{f"key{i}": value for i in range(9)}) for value in (1, 2)]
    assert labels(many)[0] == "SimFBO, key0 1, key1 1, key2 1, key3 1, …"


def test_groups_are_the_same_but_for_the_seed():
    first, second, third = groups([header(seed=0), header(seed=1), header(seed=0, clients=3)])
    assert first == second != third
    assert differences([header(seed=0), header(seed=1)]) == ["seed"]


def test_runs_of_one_seed_are_never_a_sample():
    """What tells them apart is in the numbers they were built with, or in nothing that is known."""
    one = {"algorithm": "SimFBO", "seed": 0, "config": {}}
    inputs = [{"inputs": {"data": "d", "algorithm": {"local.x": x}}} for x in (0.1, 0.02)]
    first, second = groups([one | inputs[0], one | inputs[1]])
    assert first != second
    assert labels([one | inputs[0], one | inputs[1]]) == ["SimFBO, x 0.1", "SimFBO, x 0.02"]
    assert len(set(groups([one, one]))) == 2
    assert len(set(groups([one, {**one, "seed": 1}]))) == 1
