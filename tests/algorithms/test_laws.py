"""Every law on every method of the library."""

import pytest

from simfbo import checks
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
}


@pytest.mark.parametrize("law", checks.LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("name", FACTORIES)
def test_laws(name, law):
    finding = checks.examine(FACTORIES[name], law)
    assert finding.passed, checks.describe(finding)
    assert (finding.violation is not None) == (law.name in DECLARED[name])


@pytest.mark.parametrize("law", checks.SINGLE_LOOP_LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("name", ["simfbo", "shrofbo"])
def test_single_loop_laws(name, law):
    finding = checks.examine(FACTORIES[name], law)
    assert finding.passed, checks.describe(finding)
    assert finding.violation is None
