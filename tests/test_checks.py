"""Every law must catch an algorithm that breaks it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional import Changed, unchanged

from simfbo import checks
from simfbo.algorithms import mimefbo, simfbo
from simfbo.checks import LAWS, MEMORY_LAWS, SINGLE_LOOP_LAWS, CheckError, check_algorithm
from simfbo.core import memory, trees
from simfbo.core.federation import View, WithMemory
from simfbo.core.problem import Point

BY_NAME = {law.name: law for law in LAWS + SINGLE_LOOP_LAWS + MEMORY_LAWS}


def forgetful(problem, local, server):
    """Draws from a hidden generator."""
    rng = np.random.default_rng(0)

    def change(round, state, federation, key):
        return round(state, federation, jax.random.key(int(rng.integers(1000))))

    return Changed(simfbo(problem, local, server), change)


def engine_dependent(problem, local, server):
    """Looks at which engine it runs on."""

    def change(round, state, federation, key):
        after = round(state, federation, key)
        seen = 1e-3 * float(type(federation).__name__ == "DebugFederation")
        return after._replace(x=jax.tree.map(lambda a: a + seen, after.x))

    return Changed(simfbo(problem, local, server), change)


def talkative(problem, local, server):
    """Sends something more every second round."""
    count = []

    def hello(payload, client):
        return payload

    def change(round, state, federation, key):
        count.append(1)
        if len(count) % 2 == 0:
            federation.sum(hello, jnp.ones(3), federation.cohort(key), key)
        return round(state, federation, key)

    return Changed(simfbo(problem, local, server), change)


def arrays_only(problem, local, server):
    """Takes x to be one array."""

    def change(round, state, federation, key):
        after = round(state, federation, key)
        return after._replace(x=jax.tree.map(lambda a: a * (1 if a.size > 2 else 0.9), after.x))

    return Changed(simfbo(problem, local, server), change)


def averages_iterates(problem, local, server):
    """Sends iterates instead of changes."""
    base = simfbo(problem, local, server)

    def iterate(payload, client):
        q = base.simfbo_step(payload, client)
        steps = Point(x=server.x, y=server.y, v=server.v)
        return Point(
            *(trees.add_scaled(z, -s, d) for z, s, d in zip(payload, steps, q, strict=True))
        )

    def change(round, state, federation, key):
        cohort = federation.cohort(key)
        found = federation.sum(iterate, Point(state.x, state.y, state.v), cohort, key)
        return state._replace(x=found.x, y=found.y, v=found.v)

    return Changed(base, change)


def unscaled_weights(problem, local, server):
    """Adds p_i z_i over the cohort without n/P."""

    def change(round, state, federation, key):
        def biased_sum(client_step, payload, cohort, *rest):
            wrong = cohort._replace(weights=federation.p[cohort.ids])
            return federation.sum(client_step, payload, wrong, *rest)

        return round(state, View(federation, biased_sum, federation.gather), key)

    return Changed(simfbo(problem, local, server), change)


def no_implicit_term(problem, local, server):
    """Holds v at zero."""

    def change(round, state, federation, key):
        after = round(state, federation, key)
        return after._replace(v=trees.zeros_like(after.v))

    return Changed(simfbo(problem, local, server), change)


def wrong_sign(problem, local, server):
    """Confuses the sign of v."""
    return simfbo(problem, local, server._replace(v=-server.v / 10))


def unnormalised(problem, local, server):
    """SimFBO without its declared violation."""
    return Changed(simfbo(problem, local, server), unchanged, {})


def local_steps_on_server(problem, local, server):
    """Uses eta where gamma belongs."""
    return simfbo(problem, local, local)


def scaffold(problem, local, server):
    return mimefbo(problem, local, server, control="memory")


def leaky(problem, local, server):
    """Mixes what clients remember after every round."""

    def change(round, state, federation, key):
        after = round(state, federation, key)
        federation.client_memory = jax.tree.map(
            lambda a: jnp.broadcast_to(a.mean(0), a.shape), federation.client_memory
        )
        return after

    return Changed(scaffold(problem, local, server), change)


def gullible(problem, local, server):
    """Lets clients remember replies that were refused."""

    def change(round, state, federation, key):
        before = federation.client_memory
        after = round(state, federation, key)
        latest = federation.latest
        federation.client_memory = memory.kept(before, latest.memory, latest.request.ids, None)
        return after

    return Changed(scaffold(problem, local, server), change)


def by_number(problem, local, server):
    """Treats clients by their numbers."""
    base = scaffold(problem, local, server)

    def numbered(payload, client):
        message, kept = base.mimefbo_step(payload, client)
        return WithMemory(
            message, trees.scale(1 + 1e-3 * jnp.asarray(client.data.client, float), kept)
        )

    def change(round, state, federation, key):
        def other(client_step, *rest):
            return federation.sum(numbered, *rest)

        return round(state, View(federation, other, federation.gather), key)

    return Changed(base, change)


def first_h(problem, local, server):
    """Corrects local steps by the direction of the first round, for ever."""

    def change(round, state, federation, key):
        after = round(state, federation, key)
        return after._replace(h=after.h if int(state.norm_count) == 0 else state.h)

    return Changed(mimefbo(problem, local, server), change)


def earlier_h(problem, local, server):
    """Corrects local steps by the direction of the round before the last, which it hides."""
    kept = []

    def change(round, state, federation, key):
        state = state._replace(h=kept[-2]) if len(kept) > 1 else state
        after = round(state, federation, key)
        kept.append(after.h)
        return after

    return Changed(mimefbo(problem, local, server), change)


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (leaky, "asked"),
        (gullible, "refused"),
        (by_number, "order"),
        (first_h, "exact at any local step"),
        (earlier_h, "resumed"),
        (forgetful, "repeatable"),
        (engine_dependent, "engines agree"),
        (talkative, "ledger is cost"),
        (arrays_only, "any pytree"),
        (unscaled_weights, "identical clients"),
        (averages_iterates, "sends changes"),
        (no_implicit_term, "finds the solution"),
        (wrong_sign, "finds the solution"),
        (unnormalised, "unequal local work"),
        (no_implicit_term, "centralised SOBA"),
        (local_steps_on_server, "eta at one step"),
        (unscaled_weights, "unbiased sampling"),
        (local_steps_on_server, "linear drift"),
    ],
)
def test_law_catches(factory, name):
    finding = checks.examine(factory, BY_NAME[name])
    assert not finding.passed, f"{name} let {factory.__name__} through: {finding.measured}"


def test_a_declared_violation_that_is_none_is_caught():
    def modest(problem, local, server):
        violations = {"any pytree": "it might be biased"}
        return Changed(simfbo(problem, local, server), unchanged, violations)

    finding = checks.examine(modest, BY_NAME["any pytree"])
    assert not finding.passed
    assert "declared as violated (it might be biased) but it holds" in checks.describe(finding)


def test_check_algorithm_lists_what_is_broken():
    laws = [BY_NAME["finds the solution"], BY_NAME["centralised SOBA"]]
    with pytest.raises(CheckError, match=r"(?s)finds the solution: .*centralised SOBA: "):
        check_algorithm(no_implicit_term, laws)
    assert [finding.passed for finding in check_algorithm(simfbo, laws)] == [True, True]
