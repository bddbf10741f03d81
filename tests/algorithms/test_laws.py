"""Every law on every method of the library."""

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
# Slow: all about a variant whose method is tried, but what it declares within few rounds.
VARIANTS = {"fednest-as-released", "memfbo-order-2", "mimefbo-storm"}
# Slow: laws about how a method is written, for those written with the same parts as another.
ALIKE = {"shrofbo", "lfednest", "aggitd", "fedmbo", "fedbio", "fedmsa", "fedbioacc_local"}
WRITTEN = {"any pytree", "repeatable", "sends changes", "ledger is cost", "engines agree"}
# Slow: that local work moves the solution, or draws do, where a method says so.
MOVED = {"lfednest", "aggitd", "fedmbo", "fedbio", "memfbo", "fedbioacc", "fedbioacc_local"}
LONG = {"unequal local work", "sends changes"}  # a hundred rounds


def pairs(names, laws, is_slow):
    """Return all methods with all laws, some of them marked as slow."""
    return [
        pytest.param(
            name, law, id=f"{name}-{law.name}",
            marks=[pytest.mark.slow] if is_slow(name, law.name) else [],
        )
        for name in names
        for law in laws
    ]  # fmt: skip


def covered(name, law):
    """Return whether a law is tried on a similar method, so that this pair can be slow."""
    declared = law in DECLARED[name]
    variant = name in VARIANTS and (law in LONG or not declared)
    alike = name in ALIKE and law in WRITTEN and (law in LONG or not declared)
    moved = name in MOVED and declared and law in ("unequal local work", "finds the solution")
    return variant or alike or moved


@pytest.mark.parametrize(("name", "law"), pairs(FACTORIES, checks.LAWS, covered))
def test_laws(name, law):
    finding = checks.examine(FACTORIES[name], law)
    assert finding.passed, checks.describe(finding)
    assert (finding.violation is not None) == (law.name in DECLARED[name])


def is_variant(name, law):
    """Return whether a pair can be slow: what drifts is not exact, and what is does not drift."""
    other = {"simfbo": "exact at any local step", "mimefbo": "linear drift"}
    long = law in other.values()
    return other.get(name) == law or (name == "shrofbo" and long) or name.startswith("mimefbo-")


@pytest.mark.parametrize(("name", "law"), pairs(SINGLE_LOOP, checks.SINGLE_LOOP_LAWS, is_variant))
def test_single_loop_laws(name, law):
    finding = checks.examine(FACTORIES[name], law)
    assert finding.passed, checks.describe(finding)
    assert (finding.violation is not None) == (law.name in SINGLE_LOOP[name])


def smoothed(problem, local, server):
    return with_momenta(FACTORIES["shrofbo"](problem, local, server), 0.3)


def private(problem, local, server):
    return FACTORIES["simfbo"](problem._replace(lower_level="private"), local, server)


REMEMBER = {"mimefbo-memory": FACTORIES["mimefbo-memory"], "smoothed": smoothed, "private": private}


def is_engines(name, law):
    """Return whether a pair can be slow: whose replies count is the engine's, not the method's."""
    return law == "refused" and name != "smoothed"


@pytest.mark.parametrize(("name", "law"), pairs(REMEMBER, checks.MEMORY_LAWS, is_engines))
def test_memory_laws(name, law):
    factory = REMEMBER[name]
    assert checks.remembers(factory)
    finding = checks.examine(factory, law)
    assert finding.passed, checks.describe(finding)
