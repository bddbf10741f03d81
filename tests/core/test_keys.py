"""Random draws on the host: every purpose has a number of its own, and no number ever changes."""

import jax
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from simfbo.core.keys import Purpose, client_key, host_rng, secret_key, seed_rng, uniform

FROZEN = {
    "LOCAL_STEPS": 2,
    "PARTITION": 3,
    "LEVELS": 4,
    "COEFFICIENTS": 5,
    "SCATTER": 6,
    "SERIES_LENGTH": 7,
    "LANCZOS_START": 8,
    "EVALUATION_ROWS": 9,
    "SYNTHETIC": 10,
    "HELD_OUT": 11,
    "FOLDS": 12,
    "WRONG_LABELS": 13,
    "TRUST_NETWORK": 14,
    "CLEAN_ROWS": 15,
    "LONG_TAIL": 16,
    "ROTATED": 17,
    "CHAINS": 18,
    "TRUSTED_ROWS": 19,
    "COHORT": 2**31 + 1,
    "LOCAL_STEPS_IN_ROUND": 2**31 + 2,
    "NOISE": 2**31 + 11,
    "DROP_OUT": 2**31 + 20,
    "LOCAL_RULES": 2**31 + 22,
}


def test_purposes_are_frozen():
    """Committed results were drawn with these numbers; a new purpose takes a new one."""
    found = {name: int(purpose) for name, purpose in Purpose.__members__.items()}
    assert {name: found.get(name) for name in FROZEN} == FROZEN
    assert len(set(found.values())) == len(found)


def words(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_draws_depend_on_purpose_and_key_alone():
    key = jax.random.key(0)
    draws = {
        (name, seed): host_rng(jax.random.key(seed), Purpose[name]).integers(2**62)
        for name in FROZEN
        for seed in (0, 1)
    }
    assert len(set(draws.values())) == 2 * len(FROZEN)
    assert host_rng(key, Purpose.CHAINS).integers(2**62) == draws["CHAINS", 0]
    with jax.enable_x64(False):
        assert host_rng(key, Purpose.CHAINS).integers(2**62) == draws["CHAINS", 0]


def test_draws_are_pinned():
    """A stored run must meet the same draws again, in whatever version."""
    assert host_rng(jax.random.key(3), Purpose.CHAINS).permutation(6).tolist() == [5, 4, 2, 1, 0, 3]
    assert seed_rng(3, Purpose.PARTITION).permutation(6).tolist() == [1, 5, 3, 2, 4, 0]


def test_a_client_key_is_that_of_exchange_client_and_repeat():
    keys = {
        words(client_key(jax.random.key(exchange), client, repeat))
        for exchange in (0, 1)
        for client in range(4)
        for repeat in range(3)
    }
    assert len(keys) == 2 * 4 * 3


def test_secret_keys_never_repeat():
    assert len({words(secret_key()) for _ in range(20)}) == 20
    assert secret_key().dtype == jax.random.key(0).dtype


def test_noise_shares_no_key_with_a_client():
    """Noise folds its purpose into the key of an exchange, as clients do their numbers."""
    key = jax.random.key(0)
    assert np.iinfo(np.int32).max < Purpose.NOISE  # no client and no step has such a number
    own = {words(k) for k in jax.random.split(jax.random.fold_in(key, int(Purpose.NOISE)), 3)}
    theirs = {words(client_key(key, client, repeat)) for client in range(30) for repeat in range(3)}
    assert len(own) == 3
    assert not own & theirs


def test_shapes_and_kinds_of_arrays_are_checked_in_tests():
    with pytest.raises(TypeCheckError):
        uniform(jax.random.key(0), Purpose.DROP_OUT, np.zeros(3))
