"""How x's pace follows from how y, v and the hypergradient move, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from simfbo import Point
from simfbo.algorithms.steps import pacing

RNG = np.random.default_rng(3)


def window(move=None, pulls=(), before=()):
    """Return a window after these hypergradients and those of the window before it."""
    first = pacing.opened(np.zeros(3), np.ones(4), np.ones(4))
    for pull in before:
        first = pacing.add_pull(first, jnp.asarray(pull))
    if before or move is not None:
        first, _ = pacing.closed(first, Point(y=jnp.ones(4), v=jnp.ones(4)), 1.0)
    if move is not None:
        first = first._replace(move=Point(y=jnp.asarray(move[0]), v=jnp.asarray(move[1])))
    for pull in pulls:
        first = pacing.add_pull(first, jnp.asarray(pull))
    return first


def found(at, y, v, settles=2.0):
    """Return lag, turn and noise of a window in which y and v moved from 1 by these."""
    after = Point(y=jnp.ones(4) + jnp.asarray(y), v=jnp.ones(4) + jnp.asarray(v))
    return tuple(map(float, pacing.closed(at, after, settles)[1]))


def test_the_lag_is_the_larger_relative_move_in_the_time_of_settling():
    y, v = RNG.normal(size=4), RNG.normal(size=4)
    expected = max(np.linalg.norm(z) / np.linalg.norm(1 + z) for z in (y, v)) / 2
    assert found(window(), y, v)[0] == pytest.approx(expected, rel=1e-12)


def test_a_move_across_the_previous_one_is_noise():
    y, v = np.array([1.0, 0, 0, 0]), np.array([0, 0.1, 0, 0])
    along = found(window(move=(y, v)), y, v)[0]
    across, _, noise = found(window(move=(np.roll(y, 1), v)), y, v)
    assert along == pytest.approx(1 / np.sqrt(7) / 2)
    assert across == pytest.approx(0.1 / np.linalg.norm(1 + v) / 2)
    assert noise == pytest.approx(1 / np.sqrt(7))


def test_the_turn_is_the_share_of_the_hypergradient_that_is_used_up():
    old, new = [[3.0, 0, 0]] * 5, [[0.6, 1.0, 0]] * 5
    turn = found(window(pulls=new, before=old), np.zeros(4), np.zeros(4))[1]
    assert turn == pytest.approx(1 - 0.6 / 3)
    flipped = found(window(pulls=-np.array(new), before=old), np.zeros(4), np.zeros(4))[1]
    assert flipped == pytest.approx(1 + 0.6 / 3)


def test_the_turn_is_unknown_where_noise_exceeds_the_hypergradient():
    noise = RNG.normal(size=(50, 3)) * [1, 1, 1]
    assert found(window(pulls=noise, before=[[1.0, 0, 0]] * 50), np.zeros(4), np.zeros(4))[1] == 0


@pytest.mark.parametrize(("lag", "turn", "early", "factor"), [
    (0.31, 0.0, True, 0.5), (0.0, 0.81, True, 0.5), (0.31, 0.61, False, 0.5),
    (0.14, 0.14, True, 2.0), (0.14, 0.14, False, 1.0), (0.2, 0.0, True, 1.0),
    (0.0, 0.41, True, 1.0), (0.0, -0.5, True, 2.0),
])  # fmt: skip
def test_the_next_pace(lag, turn, early, factor):
    assert pacing.next_pace(0.3, 100.0, lag, turn, early) == pytest.approx(0.3 * factor)


def test_the_pace_has_a_ceiling():
    assert pacing.next_pace(0.3, 0.4, 0.0, 0.0, True) == 0.4


def test_windows_last_twice_the_time_of_settling_within_a_tenth_of_the_run():
    assert pacing.length_of(0.02, 3000) == 100
    assert pacing.length_of(0.001, 3000) == 300
    assert pacing.length_of(1.0, 3000) == 10
    assert pacing.length_of(1.0, 60) == 5


def test_x_stands_still_and_remembers_nothing_until_it_has_a_pace():
    rule, x = pacing.paced_adam({"w": 2.0}, 10), {"w": jnp.zeros(2)}
    state = rule.init(x)
    for _ in range(3):
        step, state = rule.update({"w": jnp.array([5.0, -7.0])}, state)
        assert not np.any(step["w"])
    state = pacing.with_rates((state, 1.0), 0.1, 0.0, 0.0, 8)[0]
    step, state = rule.update({"w": jnp.array([1e-9, -1e-9])}, state)
    assert abs(step["w"][0]) == pytest.approx(0.2, rel=2e-4)  # the decay begins with the first move
    step, state = rule.update({"w": jnp.array([1e-9, -1e-9])}, state)
    share = (1 + np.cos(np.pi / 2)) / 2  # x moved once, and has one iteration left
    np.testing.assert_allclose(step["w"], [-0.2 * share, 0.2 * share], rtol=2e-4)


def test_the_direction_is_adam_s():
    rule, reference = pacing.paced_adam(1.0, 10**9), optax.adam(0.1, b2=0.99, eps=0.0)
    state = pacing.with_rates(rule.init(jnp.zeros(3)), 0.1, 0.0, 0.0, 0)
    other = reference.init(jnp.zeros(3))
    for g in RNG.normal(size=(6, 3)):
        got, state = rule.update(jnp.asarray(g), state)
        with jax.numpy_dtype_promotion("standard"):
            want, other = reference.update(jnp.asarray(g), other)
    np.testing.assert_allclose(got, want, rtol=1e-3)


def test_a_coordinate_far_below_the_others_is_noise():
    rule = pacing.paced_adam(1.0, 10)
    state = pacing.with_rates(rule.init(jnp.zeros(2)), 1.0, 0.0, 0.0, 0)
    step, _ = rule.update(jnp.array([1.0, 1e-9]), state)
    assert abs(float(step[0])) > 0.99
    assert abs(float(step[1])) < 1e-4
