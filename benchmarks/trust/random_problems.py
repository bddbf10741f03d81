"""Automatic steps on random logistic regressions with one learnt L2 weight per feature.

    python benchmarks/trust/random_problems.py --first-seed N [--group NAME] [--problems N]

The truth is computed in double precision with NumPy: y*(x) by Newton's method, the attainable upper
loss by L-BFGS on the exact hypergradient. Appends one line per problem to
results/random_problems.jsonl, skipping problems already there, and ends with exit code 1 if a
requirement fails.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from simfbo import BilevelProblem, SimulatedFederation, from_clients, run
from simfbo.algorithms import auto_steps, simfbo
from simfbo.core.sampling import without_replacement

FILE = Path(__file__).parent / "results" / "random_problems.jsonl"
ROWS = 40  # per client and level
BOUND = 12.0  # |x_j| of the reference solution

# group: (number of problems, range of condition numbers, minibatches and sampled cohorts)
GROUPS = {
    "moderate": (200, (1.0, 1e4), False),
    "severe": (50, (1e4, 1e6), False),
    "sampled": (50, (1.0, 1e4), True),
}


class Problem(NamedTuple):
    """One random problem: rows and labels of each client, and the initial x."""

    lower: list[tuple[np.ndarray, np.ndarray]]
    upper: list[tuple[np.ndarray, np.ndarray]]
    x0: np.ndarray
    kappa: float


class Solution(NamedTuple):
    """y*(x), the upper loss there, its exact gradient, and the lower Hessian."""

    y: np.ndarray
    loss: float
    hypergradient: np.ndarray
    hessian: np.ndarray


def upper_loss(x: Any, y: Any, batch: Any) -> Any:
    """Logistic loss on validation rows."""
    return jnp.mean(jnp.logaddexp(0.0, -batch[1] * (batch[0] @ y)))


def lower_loss(x: Any, y: Any, batch: Any) -> Any:
    """Logistic loss on training rows, with the L2 weight exp(x_j) on coefficient j."""
    return upper_loss(x, y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y**2)


PROBLEM = BilevelProblem(upper=upper_loss, lower=lower_loss)


def pooled(clients: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the clients' rows; they have equally many, so every client counts the same."""
    rows, labels = zip(*clients, strict=True)
    return np.concatenate(rows).astype(float), np.concatenate(labels).astype(float)


def solve_exactly(x: np.ndarray, problem: Problem) -> Solution:
    """Solve the lower problem by damped Newton steps; return the exact hypergradient as well."""
    (a, b), (av, bv), weights = pooled(problem.lower), pooled(problem.upper), np.exp(x)

    def value(y: np.ndarray) -> float:
        return float(np.mean(np.logaddexp(0, -b * (a @ y))) + 0.5 * weights @ y**2)

    y, hessian = np.zeros(len(x)), np.eye(len(x))
    for _ in range(300):
        s = 1 / (1 + np.exp(np.clip(b * (a @ y), -500, 500)))
        slope = -(a.T @ (b * s)) / len(b) + weights * y
        hessian = (a.T * (s * (1 - s))) @ a / len(b) + np.diag(weights)
        step = np.linalg.solve(hessian, slope)
        if slope @ step < 1e-24:
            break
        size, before = 1.0, value(y)
        while value(y - size * step) > before - 1e-4 * size * (slope @ step) and size > 1e-9:
            size /= 2
        if size <= 1e-9:
            break  # rounding errors are all that is left
        y = y - size * step
    margins = bv * (av @ y)
    grad_y = -(av.T @ (bv / (1 + np.exp(np.clip(margins, -500, 500))))) / len(bv)
    loss = float(np.mean(np.logaddexp(0, -margins)))
    return Solution(y, loss, -weights * y * np.linalg.solve(hessian, grad_y), hessian)


def attainable(problem: Problem, *starts: np.ndarray) -> float:
    """Return the lowest upper loss that L-BFGS finds from the given starting points.

    Each start is also a candidate itself, as x may lie outside the box of the search.
    """

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        at = solve_exactly(x, problem)
        return at.loss, at.hypergradient

    box, ends = [(-BOUND, BOUND)] * len(problem.x0), [value(start)[0] for start in starts]
    for start in starts:
        found = minimize(
            value, np.clip(start, -BOUND, BOUND), jac=True, method="L-BFGS-B", bounds=box,
            options={"maxiter": 500, "ftol": 1e-12, "gtol": 1e-10},
        )  # fmt: skip
        ends.append(float(found.fun))
    return min(ends)


def scaled(problem: Problem, sizes: np.ndarray) -> Problem:
    """Multiply the features by their sizes, and compute the condition number at x0."""
    lower, upper = (
        [((a * sizes).astype(np.float32), b.astype(np.float32)) for a, b in clients]
        for clients in (problem.lower, problem.upper)
    )
    problem = Problem(lower, upper, problem.x0, 0.0)
    values = np.linalg.eigvalsh(solve_exactly(problem.x0, problem).hessian)
    return problem._replace(kappa=float(values[-1] / values[0]))


def draw(seed: int, low: float, high: float) -> Problem:
    """Draw a problem whose lower Hessian at (x0, y*(x0)) has a condition number in this range.

    The condition number is log-uniform. Features have standard deviations between 0.5 and 20 to a
    power found by bisection (zero for condition numbers near 1); draws that cannot reach the
    condition number are repeated.
    """
    rng = np.random.default_rng(seed)
    kappa = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    while True:
        d, count = int(rng.choice([4, 8, 12])), int(rng.integers(3, 7))
        x0 = np.full(d, rng.choice([-4.0, -7.0]))
        spread = rng.uniform(np.log(0.5), np.log(20), d)
        truth = rng.normal(size=d) * (rng.random(d) < 0.6)
        shift = 0.5 * rng.normal(size=(count, d))
        rows = [[rng.normal(size=(ROWS, d)) + shift[i] for i in range(count)] for _ in "lu"]
        noise = [[rng.logistic(size=ROWS) for _ in range(count)] for _ in "lu"]
        levels = [
            [(a, np.where(a @ truth + e > 0, 1.0, -1.0)) for a, e in zip(*level, strict=True)]
            for level in zip(rows, noise, strict=True)
        ]
        plain = Problem(levels[0], levels[1], x0, 0.0)
        below, above = -1.0, 3.0
        ends = [scaled(plain, np.exp(power * spread)).kappa for power in (below, above)]
        if not min(ends) <= kappa <= max(ends):
            below = above = 0.0
        for _ in range(30 if below < above else 0):
            middle = (below + above) / 2
            if (scaled(plain, np.exp(middle * spread)).kappa < kappa) == (ends[0] < ends[1]):
                below = middle
            else:
                above = middle
        found = scaled(plain, np.exp(above * spread))
        if 0.8 < found.kappa / kappa < 1.25:
            return found


def judge(group: str, seed: int, rounds: int) -> dict[str, Any]:
    """Run SimFBO with automatic steps on one problem and compare the result with the truth."""
    _, kappas, sampled = GROUPS[group]
    problem = draw(seed, *kappas)
    begin = time.process_time()
    x0 = problem.x0.astype(np.float32)
    batch = ROWS // 2 if sampled else None
    data = from_clients(problem.lower, problem.upper, batch_size=batch)
    cohort = {"sampler": without_replacement(2)} if sampled else {}
    method = auto_steps(lambda plan: simfbo(PROBLEM, plan.local, plan.server), PROBLEM, x0, rounds)
    history = run(
        method, SimulatedFederation(data, **cohort), x0, np.zeros_like(x0), rounds=rounds,
        every=rounds, seed=seed,
    )  # fmt: skip
    seconds = time.process_time() - begin
    x, y = np.asarray(history.state.x, float), np.asarray(history.state.y, float)
    start, end = solve_exactly(problem.x0, problem), solve_exactly(x, problem)
    best = attainable(problem, problem.x0, x, *(np.full_like(problem.x0, c) for c in (-9, -4, 1)))
    drop = start.loss - best
    verdict = history.verdict or {}
    line = {
        "group": group, "seed": seed, "kappa": problem.kappa, "start": start.loss,
        "end": end.loss, "best": best,
        "decrease": (start.loss - end.loss) / drop if drop > 1e-6 else 1.0,
        "hypergradient": float(
            np.linalg.norm(end.hypergradient) / np.linalg.norm(start.hypergradient)
        ),
        "y_error": float(np.linalg.norm(y - end.y) / np.linalg.norm(end.y)),
        "converged": verdict.get("converged"), "text": verdict.get("text"),
        "exchanges": history.records[-1]["communication_rounds"],
        "seconds": seconds,
    }  # fmt: skip
    line["false"] = line["converged"] is True and (line["decrease"] < 0.9 or line["y_error"] > 0.1)
    return line


def summary(lines: list[dict[str, Any]]) -> bool:
    """Print what was required and what was found; return whether every requirement holds."""
    passed = True
    for group, (count, _, _) in GROUPS.items():
        own = [line for line in lines if line["group"] == group]
        if not own:
            continue
        false = sum(line["false"] for line in own)
        worse = sum(line["end"] > 1.01 * line["start"] for line in own)
        near = sum(line["decrease"] >= 0.95 for line in own)
        said = {str(v): sum(line["converged"] is v for line in own) for v in (True, False, None)}
        print(
            f"{group}: {len(own)} of {count}; falsely converged {false}, over 1 % above the start "
            f"{worse}, 95 % of the attainable decrease {near}; verdicts {said}; median processor "
            f"time {np.median([line['seconds'] for line in own]):.1f} s"
        )
        passed &= not false and not worse and (group != "moderate" or near >= 0.75 * len(own))
    return passed


def main() -> None:
    """Run the problems that have no result yet, then compare all results with the requirements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--first-seed", type=int, required=True)
    parser.add_argument("--group", choices=list(GROUPS), action="append")
    parser.add_argument("--problems", type=int, help="at most so many of each group")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args()
    file = options.output
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(line["group"], line["seed"]) for line in lines}
    with file.open("a") as out:
        for group in options.group or GROUPS:
            count = min(GROUPS[group][0], options.problems or GROUPS[group][0])
            for seed in range(options.first_seed, options.first_seed + count):
                if (group, seed) in done:
                    continue
                lines.append(judge(group, seed, options.rounds))
                out.write(json.dumps(lines[-1]) + "\n")
                out.flush()
                print({k: v for k, v in lines[-1].items() if k != "text"}, flush=True)
    sys.exit(0 if summary(lines) else 1)


if __name__ == "__main__":
    main()
