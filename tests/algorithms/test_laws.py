"""Every law on every method of the library; `make test` runs a third of the pairs."""

import pytest

from simfbo import checks
from simfbo.algorithms import with_momenta
from simfbo.config.build import law_factories

FACTORIES = law_factories()

DRAWN = {"ledger is cost", "sends changes", "finds the solution", "unequal local work"}
DECLARED = {
    "simfbo": {"unequal local work"},
    "shrofbo": set(),
    "fednest": set(),
    "fednest-as-released": {"sends changes", "finds the solution", "unequal local work"},
    "lfednest": {"finds the solution", "unequal local work"},
    "aggitd": DRAWN,
    "fedbio": {"unequal local work"},
    "fedmbo": DRAWN,
    "memfbo": {"unequal local work"},
    "memfbo-order-2": {"unequal local work"},
    "fedmsa": set(),
    "fedbioacc": {"unequal local work"},
    "fedbioacc_local": {"finds the solution", "unequal local work", "identical clients"},
    "mimefbo": set(),
    "mimefbo-storm": set(),
    "mimefbo-memory": {"identical clients"},
}
SINGLE_LOOP = {
    "simfbo": {"exact at any local step"},
    "shrofbo": {"exact at any local step"},
    "mimefbo": set(),
    "mimefbo-storm": set(),
    "mimefbo-memory": set(),
}


def pairs(names, laws):
    """Return all methods with all laws; every third pair, so that each occurs, is quick."""
    return [
        pytest.param(
            name, law, id=f"{name}-{law.name}",
            marks=[pytest.mark.slow] if (i + j) % 3 else [],
        )
        for i, name in enumerate(names)
        for j, law in enumerate(laws)
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "law"), pairs(FACTORIES, checks.LAWS))
def test_laws(name, law):
    finding = checks.examine(FACTORIES[name], law)
    assert finding.passed, checks.describe(finding)
    assert (finding.violation is not None) == (law.name in DECLARED[name])


@pytest.mark.parametrize(("name", "law"), pairs(SINGLE_LOOP, checks.SINGLE_LOOP_LAWS))
def test_single_loop_laws(name, law):
    finding = checks.examine(FACTORIES[name], law)
    assert finding.passed, checks.describe(finding)
    assert (finding.violation is not None) == (law.name in SINGLE_LOOP[name])


def smoothed(problem, local, server):
    return with_momenta(FACTORIES["shrofbo"](problem, local, server), 0.3)


def private(problem, local, server):
    return FACTORIES["simfbo"](problem._replace(lower_level="private"), local, server)


REMEMBER = {"mimefbo-memory": FACTORIES["mimefbo-memory"], "smoothed": smoothed, "private": private}


@pytest.mark.parametrize(("name", "law"), pairs(REMEMBER, checks.MEMORY_LAWS))
def test_memory_laws(name, law):
    factory = REMEMBER[name]
    assert checks.remembers(factory)
    finding = checks.examine(factory, law)
    assert finding.passed, checks.describe(finding)
