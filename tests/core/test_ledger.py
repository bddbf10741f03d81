"""The ledger against counts by hand."""

import jax
import jax.numpy as jnp

from simfbo.core.ledger import Ledger, PerClient, Traffic


def test_everyone_receives_what_is_common_and_only_repliers_send():
    ledger = Ledger()
    down = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2), jnp.float32)}
    ledger.record("step", asked=5, replied=4, down=down, up=jnp.zeros(6, jnp.float16))
    assert ledger.total == Traffic(1, 5 * 7, 4 * 6, 5 * (24 + 16), 4 * 12)


def test_what_differs_by_client_is_counted_once():
    """The slices of all clients together are the whole, whoever receives which."""
    ledger = Ledger()
    down = jnp.zeros(2), PerClient((jnp.zeros((5, 3)), jnp.zeros(5)))
    ledger.record("step", asked=5, replied=5, down=down, up=jnp.zeros(()))
    assert ledger.total == Traffic(1, 5 * 2 + 5 * 3 + 5, 5, 8 * 30, 8 * 5)


def test_steps_are_counted_apart_and_together():
    ledger = Ledger()
    for name, size in (("ping", 1), ("pong", 2), ("ping", 3)):
        ledger.record(name, 2, 2, jnp.zeros(size), jnp.zeros(1))
    assert ledger.by_step == {
        "ping": Traffic(2, 8, 4, 64, 32),
        "pong": Traffic(1, 4, 2, 32, 16),
    }
    assert ledger.total == Traffic(3, 12, 6, 96, 48)
    assert Ledger() == Ledger(Traffic(), {})


def test_abstract_messages_weigh_as_much():
    ledger = Ledger()
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    ledger.record("step", 2, 2, like, like)
    assert ledger.total == Traffic(1, 6, 6, 24, 24)
