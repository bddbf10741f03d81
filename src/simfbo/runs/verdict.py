"""Whether a run has converged, from residuals that its messages carry and from what it measured.

An algorithm names the channels of its sums that vanish at the solution (`Method.residuals`):
grad_y G on y, the residual of the linear system on v, the hypergradient on x. Their norms are taken
in about 200 rounds of a run, in 20 parts. A part's residual is the root mean square of its norms,
less what is noise, relative to the largest of the run's first quarter; for the hypergradient,
relative to the first parts in which y and v were near their solutions.

A small residual does not bound an error: in a direction of small curvature y may still be far from
its solution. So a run is "converged" only where the algorithm measured the curvature
(`Method.evidence`, as automatic step sizes do): the residuals divided by mu bound the relative
errors of y and v, the hypergradient has fallen, and the upper loss no longer falls.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.federation import ClientStep, Federation, View
from simfbo.core.method import Method
from simfbo.core.problem import PyTree, point_of
from simfbo.core.sampling import Cohort
from simfbo.runs.files import Json

SOLVED, CONVERGED = 0.05, 0.1  # residuals of a converged run: of y and v; of x
_NEAR = 0.2  # the residual at which y and v are near their solutions
_SAMPLES, _PARTS, _TAIL = 200, 20, 2  # norms, parts of a run, parts at its end
_PLACES = 64  # numbers of a sum that tell noise from drift
_LEVEL = 0.05  # share of the decrease of the upper loss that its last quarter may have
_NAMES = {"y": "lower", "v": "linear", "x": "hypergradient"}
_TEXTS = {
    "lower": "lower-level residual {} of its start",
    "linear": "linear-system residual {}",
    "hypergradient": "hypergradient norm {}",
    "y_error": "error of y at most {}",
    "v_error": "of v at most {}",
}

Seen = Mapping[str, Any]  # by channel, as JSON values


class Residuals:
    """Takes the norms of an algorithm's residuals as they pass by."""

    def __init__(self, algorithm: Method, federation: Federation, rounds: int) -> None:
        """Take the algorithm, the federation and the rounds of a run."""
        self._channels, self._rounds = algorithm.residuals, rounds
        self._sums: dict[str, PyTree] = {}
        self._federation, self._on = federation, False
        self.federation: Federation = (
            View(federation, self._sum, federation.gather) if self._channels else federation
        )

    @property
    def every(self) -> int:
        """Return the rounds between two whose residuals are taken."""
        return max(1, self._rounds // _SAMPLES)

    def due(self, t: int) -> bool:
        """Check whether the residuals of a round are measured."""
        return t % self.every == 0 or t == 1

    def due_rounds(self, first: int, last: int) -> list[int]:
        """List the rounds from `first` to `last` whose residuals are taken."""
        multiples = range(-(-first // self.every) * self.every, last + 1, self.every)
        return [1, *multiples] if first == 1 < self.every else list(multiples)

    def begin(self, t: int) -> None:
        """Begin a round."""
        self._sums.clear()
        self._on = self.due(t)

    def end(self, t: int, seen: Seen) -> Seen:
        """Return the residuals so far, with this round's unless it was given up half-way."""
        complete = self._sums.keys() == set("".join(self._channels.values()))
        return self.added(t, seen, measured(self._sums) if complete and self._sums else ())

    def added(self, t: int, seen: Seen, found: Any) -> Seen:
        """Add the residuals that `measured` returned for a round."""
        if not found:
            return seen
        part = (t - 1) * _PARTS // self._rounds
        numbers = {name: np.asarray(one, float) for name, one in found.items()}
        return {
            **seen,
            **{
                name: _added(seen.get(name), part, float(one[0]), one[1:])
                for name, one in numbers.items()
            },
        }

    def _sum(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        found = self._federation.sum(client_step, payload, cohort, key)
        if self._on:
            for name in self._channels.get(client_step.__name__, ""):
                self._sums[name] = getattr(point_of(found), name)
        return found


def verdict(
    seen: Seen, evidence: Mapping[str, float] | None = None, losses: Sequence[float] = ()
) -> Json | None:
    """Return the verdict on a run; None if its algorithm has no residuals.

    Args:
        seen: the residuals, from `Residuals`.
        evidence: what the algorithm measured at its last check (`Method.evidence`).
        losses: the upper loss at the run's evaluations, or the test loss where it has none.

    Returns:
        `lower`, `linear` and `hypergradient`, relative to the start, as far as they are known; with
        evidence `y_error` and `v_error`, bounds on relative errors; `status`, one of converged,
        still improving, not converged and unknown; `converged`, which is None where it is unknown;
        `text`, one sentence.
    """
    parts = {name: _residuals(seen[name]) for name in ("y", "v", "x") if name in seen}
    if not parts:
        return None
    relative = {name: one / _first(one) for name, one in parts.items() if name != "x"}
    found = {_NAMES[name]: float(one[-1]) for name, one in relative.items()}
    if "x" in parts:
        h = parts["x"]
        near = np.all([one <= _NEAR for one in (*relative.values(), 0 * h)], axis=0)
        start = np.max(h[near][:2], initial=0.0) or h[-1] or 1.0
        found["hypergradient"] = float(h[-1] / start)
    solved = all(found.get(name, 0.0) <= SOLVED for name in ("lower", "linear"))
    still = found.get("hypergradient", 0.0) <= CONVERGED
    improving, bounded, fallen = _falls(losses), False, True
    if evidence is not None:
        found |= {"y_error": evidence["y"], "v_error": evidence["v"]}
        found.pop("hypergradient", None)
        if evidence["first"]:  # else x never moved from a point where it was known
            found["hypergradient"] = evidence["hypergradient"] / evidence["first"]
        bounded = max(evidence["y"], evidence["v"]) <= SOLVED
        solved = solved or bounded
        improving = evidence["gain"] - evidence["late"] > _LEVEL * abs(evidence["gain"])
        still = found.get("hypergradient", 1.0) <= CONVERGED
        fallen = evidence["gain"] > evidence["doubt"]  # for certain
    if solved and still and bounded and fallen and not improving:
        status, advice = "converged", ""
    elif improving:
        status, advice = "still improving", "; more iterations would lower the loss further"
    elif solved and still and bounded:
        status, advice = "unknown", "; the upper loss has not fallen by more than its uncertainty"
    elif solved and still:
        status, advice = "unknown", "; residuals are small, but the error of y and v is not bounded"
        advice += "" if evidence else " (automatic steps of bilevel methods bound it)"
    else:
        status, advice = "not converged", "; use more iterations"
        if evidence is None:
            grow = any(one[-1] > 1.5 * np.median(one[len(one) // 2 :]) for one in parts.values())
            advice += " or larger step sizes"
            advice = "; residuals grow: use smaller or automatic step sizes" if grow else advice
    facts = ", ".join(_TEXTS[name].format(_percent(value)) for name, value in found.items())
    converged = None if status == "unknown" else status == "converged"
    return {**found, "status": status, "converged": converged, "text": f"{status}: {facts}{advice}"}


def _falls(losses: Sequence[float]) -> bool:
    """Check whether the last quarter of some losses is clearly below the quarter before it.

    Clearly: by twice the standard error, and by 5 % of the whole decrease or of the loss itself; of
    a network's loss, nearly all of the decrease happens in its first rounds.
    """
    quarter = len(losses) // 4
    if quarter < 2:
        return False
    late, before = np.asarray(losses[-quarter:]), np.asarray(losses[-2 * quarter : -quarter])
    fall = before.mean() - late.mean()
    error = np.sqrt((late.var(ddof=1) + before.var(ddof=1)) / quarter)
    scale = min(losses[0] - late.mean(), abs(before.mean()))
    return bool(fall > max(2 * error, _LEVEL * scale))


def _first(parts: np.ndarray) -> float:
    """Return the largest residual of a run's first quarter: later ones may be accidents."""
    return float(np.max(parts[: max(1, len(parts) // 4)])) or 1.0


def _residuals(one: Json) -> np.ndarray:
    """Return the residuals of a run's parts; the last is that of its end.

    Noise differs from one sum to the next, and drift does not: of the squared norms, the share that
    is not noise is that of <sum, previous sum>.
    """
    parts = np.asarray(one["parts"], float)
    end = max(0, len(parts) - _TAIL)
    count, square, likeness, power = np.vstack([parts[:end], parts[end:].sum(0)]).T
    known = power > 0
    share = np.where(known, np.abs(likeness) / np.where(known, power, 1), 1.0)
    return np.sqrt(square / count * np.minimum(share, 1.0))


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * min(share, 1e6):.0f} %"


def _added(one: Json | None, part: int, norm: float, places: np.ndarray) -> Json:
    """Add a norm to the residuals of a channel."""
    if one is None:
        return {"part": part, "parts": [[1, norm**2, 0.0, 0.0]], "places": places.tolist()}
    new = [1, norm**2, float(places @ np.asarray(one["places"])), float(places @ places)]
    if one["part"] != part:
        return {"part": part, "parts": [*one["parts"], new], "places": places.tolist()}
    *parts, last = one["parts"]
    last = [old + more for old, more in zip(last, new, strict=True)]
    return {"part": part, "parts": [*parts, last], "places": places.tolist()}


@jax.jit
def measured(sums: dict[str, PyTree]) -> dict[str, jax.Array]:
    """Return the norm of every sum, followed by some of its numbers, evenly from each leaf."""

    def numbers(tree: PyTree) -> jax.Array:
        leaves = [jnp.ravel(leaf).astype(float) for leaf in jax.tree.leaves(tree)]
        each = max(1, _PLACES // len(leaves))
        norm = jnp.sqrt(trees.squared_norm(tree)).astype(float)
        return jnp.concatenate([norm[None], *(a[:: max(1, a.size // each)] for a in leaves)])

    return {name: numbers(tree) for name, tree in sums.items()}
