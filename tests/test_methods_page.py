"""The table of methods is what its generator writes, and what it says of methods is true."""

import runpy
from pathlib import Path

import pytest

from simfbo.checks import SINGLE_LOOP_LAWS
from simfbo.config.build import law_factory
from simfbo.config.catalogue import METHODS, factory_of

DOCS = Path(__file__).parent.parent / "docs"
RECORDS = [METHODS.find(name) for name in METHODS.names()]
WRITER = runpy.run_path(str(DOCS / "make_methods.py"))


@pytest.mark.usefixtures("single_precision")
def test_the_page_is_what_the_generator_writes():
    page = (DOCS / "reference-methods.md").read_text(encoding="utf-8")
    assert page == WRITER["page"](), "run make methods"


def test_every_method_says_when_to_use_it():
    for record in RECORDS:
        assert record.when, record.name
        assert record.paper, record.name
        assert bool(record.sampled) != record.one_exchange, record.name


def test_methods_written_from_abstracts_say_so():
    """On their pages and in their docstrings; figures and tables take it from the record."""
    for record in RECORDS:
        page = (DOCS / f"reference-{record.name}.md").read_text(encoding="utf-8")
        texts = (" ".join(page.split()), factory_of(record).__doc__)
        said = ["our reading of the abstract" in text.lower() for text in texts]
        assert said == [record.from_abstract] * 2, record.name


# The others that make one exchange are in tests/algorithms/test_laws.py, with all laws.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedbio", "memfbo", "fedbioacc", "fedbioacc_local"])
def test_methods_that_say_so_are_unbiased_if_clients_are_sampled(name):
    (law,) = (law for law in SINGLE_LOOP_LAWS if law.name == "unbiased sampling")
    assert law.measure(law_factory(name)) <= law.limit


@pytest.mark.parametrize(
    ("floats", "text"),
    [(10_200, "$d_x + 2 d_y$"), (120_001, "$12 d_x + 1$"), (401, "$4 d_y + 1$")],
)
def test_numbers_of_floats_are_read_as_multiples(floats, text):
    assert WRITER["multiples"](floats) == text


def test_second_derivatives_are_noticed():
    found = {name: WRITER["_derivatives"](METHODS.find(name)) for name in ("simfbo", "memfbo")}
    assert found == {"simfbo": "second", "memfbo": "first only"}
