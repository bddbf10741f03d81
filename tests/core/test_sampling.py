"""Samplers by enumeration of everything they can draw."""

import itertools
from collections import Counter
from math import comb, factorial

import jax
import numpy as np
import pytest

from simfbo.core.sampling import everyone, with_replacement, without_replacement
from simfbo.errors import UserError

N, P = 5, 2
WEIGHTS = np.array([1.0, 2.0, 3.0, 4.0, 5.0]) / 15
Z = np.random.default_rng(0).normal(size=(N, 3))
EXACT = WEIGHTS @ Z
# The population the uniform samplers draw from: n p_i z_i, whose mean is the exact sum.
POPULATION = N * WEIGHTS[:, None] * Z
VARIANCE = ((POPULATION - EXACT) ** 2).sum(axis=1).mean()


def draws(sampler, count=3000):
    """Return each distinct cohort that was drawn, and how often."""
    cohorts, seen = {}, Counter()
    for key in jax.random.split(jax.random.key(1), count):
        cohort = sampler(key, WEIGHTS)
        ids = tuple(cohort.ids.tolist())
        cohorts[ids] = cohort
        seen[ids] += 1
    return cohorts, seen


def moments(cohorts, probabilities):
    """Return the exact mean and variance of the weighted sum."""
    sums = {ids: cohort.weights @ Z[cohort.ids] for ids, cohort in cohorts.items()}
    mean = sum(probabilities[ids] * total for ids, total in sums.items())
    spread = sum(probabilities[ids] * ((total - mean) ** 2).sum() for ids, total in sums.items())
    return mean, spread


def assert_frequencies(seen, probabilities, count=3000):
    """Check frequencies against probabilities: chi-square within five standard deviations."""
    chi = sum((seen[ids] - count * q) ** 2 / (count * q) for ids, q in probabilities.items())
    freedom = len(probabilities) - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom)


def test_without_replacement_over_all_subsets():
    cohorts, seen = draws(without_replacement(P))
    probabilities = dict.fromkeys(itertools.combinations(range(N), P), 1 / comb(N, P))
    assert set(cohorts) == set(probabilities)
    assert_frequencies(seen, probabilities)
    mean, spread = moments(cohorts, probabilities)
    np.testing.assert_allclose(mean, EXACT, atol=1e-14)
    np.testing.assert_allclose(spread, VARIANCE * (N - P) / (P * (N - 1)), rtol=1e-12)


def test_with_replacement_over_all_multisets():
    cohorts, seen = draws(with_replacement(P))
    probabilities = {
        ids: factorial(P) / np.prod([factorial(c) for c in Counter(ids).values()]) / N**P
        for ids in itertools.combinations_with_replacement(range(N), P)
    }
    assert set(cohorts) == set(probabilities)
    assert_frequencies(seen, probabilities)
    mean, spread = moments(cohorts, probabilities)
    np.testing.assert_allclose(mean, EXACT, atol=1e-14)
    np.testing.assert_allclose(spread, VARIANCE / P, rtol=1e-12)


@pytest.mark.parametrize("sampler", [everyone(), without_replacement(N)])
def test_everyone_is_exact(sampler):
    cohort = sampler(jax.random.key(0), WEIGHTS)
    assert cohort.ids.tolist() == list(range(N))
    np.testing.assert_allclose(cohort.weights @ Z, EXACT, atol=1e-14)


@pytest.mark.parametrize("size", [0, N + 1])
def test_impossible_cohorts_are_refused(size):
    with pytest.raises(UserError, match=f"A cohort of {size} cannot be drawn from 5 clients"):
        without_replacement(size)(jax.random.key(0), WEIGHTS)


def test_cohorts_are_pinned():
    """A stored run must meet the same cohorts again, in whatever version."""
    key, p = jax.random.key(3), np.full(20, 0.05)
    assert without_replacement(4)(key, p).ids.tolist() == [5, 6, 10, 19]
    assert with_replacement(4)(key, p).ids.tolist() == [5, 14, 16, 18]


@pytest.mark.parametrize("sampler", [without_replacement, with_replacement])
def test_a_cohort_of_one(sampler):
    cohort = sampler(1)(jax.random.key(0), np.array([0.25, 0.75]))
    assert len(cohort.ids) == 1
    assert cohort.weights.tolist() == [[0.5, 1.5][cohort.ids[0]]]
