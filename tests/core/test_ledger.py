"""The ledger against counts by hand."""

import jax
import jax.numpy as jnp

from simfbo.core.exchange import EncodedBytes
from simfbo.core.ledger import Ledger, PerClient, Traffic
from simfbo.core.problem import Point


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


def test_bytes_are_counted_by_channel():
    """A payload's parts stand for x, y and v; a message names its channels."""
    ledger = Ledger()
    down = (
        jnp.zeros(3),
        {"a": jnp.zeros(2)},
        jnp.zeros(5),
        jnp.zeros(1),
        PerClient(jnp.zeros((2, 7))),
    )
    up = Point(x=jnp.zeros(3), v=jnp.zeros(5)), jnp.zeros(1)
    ledger.record("step", asked=2, replied=1, down=down, up=up, exchanges=1)
    assert ledger.by_channel == {"x": 8 * (6 + 3), "y": 8 * 4, "v": 8 * (10 + 5),
                                 "other": 8 * (2 + 14 + 1)}  # fmt: skip
    assert sum(ledger.by_channel.values()) == ledger.total.bytes_down + ledger.total.bytes_up
    ledger.record("step", 2, 1, down, up, coded=EncodedBytes(down=10.0, up=7.0))
    assert ledger.by_channel["coded"] == 17
    assert sum(ledger.by_channel.values()) == ledger.total.bytes_down + ledger.total.bytes_up
