"""The theorems' experiments, on small grids, against what the theory says."""

import jax
import numpy as np
import pytest

from simfbo.errors import UserError
from simfbo.experiments import theory, theory_figures
from simfbo.experiments.experiment import load


def grid(value):
    """Return cells of a full grid with the given values."""
    tree = {**load("speedup").tree, "cohorts": [1, 4, 64], "taus": [1, 2, 8], "seeds": [0, 1]}
    return [{**cell, "mean_grad_norm_squared": value(cell)} for cell in theory.speedup_cells(tree)]


def test_exponents_of_a_power_law():
    rng = np.random.default_rng(0)
    cells = grid(lambda c: 3 * c["P"] ** -0.5 * c["tau"] ** 0.25 * np.exp(0.01 * rng.normal()))
    found = theory_figures.exponents(cells)
    assert found["P"] == pytest.approx((-0.5, 0.0), abs=0.01)
    assert found["tau"] == pytest.approx((0.25, 0.0), abs=0.01)
    everyone = [cell for cell in cells if cell["P"] == 64]
    assert list(theory_figures.exponents(everyone)) == ["tau"]
    table = theory_figures.exponent_table(cells)
    assert table[2]["P"] == ""
    assert table[0]["P"].startswith("-0.50")
    assert [row["P"] for row in theory_figures.speedup_table(cells)] == ["1", "4", "64"] * 2
    assert len(theory_figures.draw_speedup(cells).axes) == 2


def test_interval_of_an_exponent_covers_it():
    """Of 200 fits to noisy powers, about 95 per cent of the intervals hold the true exponent."""
    rng, hits = np.random.default_rng(1), 0
    for _ in range(200):
        cells = grid(lambda c: c["P"] ** -0.5 * np.exp(0.3 * rng.normal()))
        middle, half = theory_figures.exponents(cells)["P"]
        hits += abs(middle + 0.5) <= half
    assert 180 <= hits <= 199


def test_speedup_is_the_mean_along_the_run_with_the_theorem_s_steps():
    """Two clients that differ, both take part, three local steps, no noise: written down."""
    T, P, tau, scale = 5, 2, 3, 0.4
    cell = {"clients": 2, "rounds": T, "noise": 0.0, "scale": scale, "heterogeneity": 1.0, "P": P,
            "tau": tau, "seed": 0}  # fmt: skip
    with jax.enable_x64(True):
        found = theory.speedup(cell)["mean_grad_norm_squared"]
    clients = theory.random_quadratic(2, heterogeneity=1.0)
    truth = clients.closed_form()
    gamma, eta = scale * np.sqrt(P / (tau * T)), scale / (tau * np.sqrt(T))
    x, y, v = np.zeros(4), np.zeros(5), np.zeros(5)
    squares = [np.sum(truth.hypergradient(x) ** 2)]
    for _ in range(T):
        sums = []
        for A, B, c, C, t, D, s in zip(*clients):
            xi, yi, vi, q = x, y, v, np.zeros(14)
            for _ in range(tau):
                dy, dv = A @ yi - B @ xi - c, A @ vi - C @ (yi - t)
                dx = D @ (xi - s) + B.T @ vi
                xi, yi, vi = xi - eta * dx, yi - eta * dy, vi - eta * dv
                q = q + np.concatenate([dx, dy, dv])
            sums.append(q)
        qx, qy, qv = np.split(np.mean(sums, axis=0), [4, 9])
        x, y, v = x - gamma * qx, y - 2 * gamma * qy, v - 2 * gamma * qv
        squares.append(np.sum(truth.hypergradient(x) ** 2))
    assert found == pytest.approx(np.mean(squares), rel=1e-10)


def test_a_run_that_diverges_is_no_result():
    cell = {"clients": 1, "rounds": 200, "noise": 0.0, "scale": 99.0, "heterogeneity": 0.0, "P": 1,
            "tau": 1, "seed": 0}  # fmt: skip
    with pytest.raises(UserError, match="diverged: its steps are too large"):
        theory.speedup(cell)


UNEQUAL = {"taus": [1, 2, 6]}
DIFFERENT = {"taus": [3, 3, 3], "rules": ["sgd", "momentum:0.9", "proximal:0.5"]}


@pytest.mark.parametrize(("method", "near", "far", "work"),
                         [("simfbo", "to_phi_tilde", "to_phi", UNEQUAL),
                          ("shrofbo", "to_phi", "to_phi_tilde", UNEQUAL),
                          ("simfbo", "to_phi_tilde", "to_phi", DIFFERENT)])  # fmt: skip
def test_mismatch(method, near, far, work):
    cells = [{**work, "rounds": 120, "method": method, "eta": eta, "seed": 0}
             for eta in (0.004, 0.002)]  # fmt: skip
    with jax.enable_x64(True):
        coarse, fine = map(theory.mismatch, cells)
    assert fine[near] < 0.05 * fine["apart"] < 0.5 * fine[far]
    assert coarse[near] / fine[near] == pytest.approx(2, rel=0.1)  # the drift is of first order
    rows = theory_figures.mismatch_table(
        [cell | found for cell, found in zip(cells, (coarse, fine))]
    )
    assert [row["η"] for row in rows] == ["0.004", "0.002"]
