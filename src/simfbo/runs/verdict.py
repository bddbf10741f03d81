"""Whether a run has converged, from residuals that its messages carry anyway.

An algorithm names the channels of its sums that vanish at the solution (`Algorithm.residuals`):
grad_y G on y, the residual of the linear system on v, the hypergradient on x. Their norms are taken
in about 200 rounds of a run, in 20 parts. A part's residual is the root mean square of its norms,
less what is noise. The verdict compares the last tenth of a run with the largest part of its first
quarter; for the hypergradient, with the first parts in which y and v were near their solutions, for
before that it is something else.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.federation import Algorithm, ClientStep, Federation, View
from simfbo.core.problem import Point, PyTree, point_of
from simfbo.core.sampling import Cohort
from simfbo.runs.files import Json

SOLVED, CONVERGED = 0.05, 0.1  # residuals of a converged run: of y and v; of x
_NEAR = 0.2  # the residual at which y and v are near their solutions
_SAMPLES, _PARTS, _TAIL = 200, 20, 2  # norms, parts of a run, parts at its end
_PLACES = 64  # numbers of a sum that tell noise from drift
_NAMES = {"y": "lower", "v": "linear", "x": "hypergradient"}

Seen = Mapping[str, Any]  # by channel, as JSON values
Found = dict[str, tuple[float, np.ndarray]]  # norm and places, by channel


class Residuals:
    """Takes the norms of an algorithm's residuals as they pass by."""

    def __init__(self, algorithm: Algorithm, federation: Federation, rounds: int) -> None:
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
        """Return whether the residuals of a round are taken."""
        return t % self.every == 0 or t == 1

    def begin(self, t: int) -> None:
        """Begin a round."""
        self._sums.clear()
        self._on = self.due(t)

    def end(self, t: int, seen: Seen) -> Seen:
        """Return what was seen so far, with this round's residuals."""
        return self.added(t, seen, measured(self._sums) if self._sums else ())

    def added(self, t: int, seen: Seen, found: Any) -> Seen:
        """Return what was seen so far, with what `measured` found in a round."""
        if not found:
            return seen
        norms, places = found
        found = {name: (float(norms[name]), np.asarray(places[name], float)) for name in norms}
        part = (t - 1) * _PARTS // self._rounds
        return {**seen, **{name: _added(seen.get(name), part, *one) for name, one in found.items()}}

    def _sum(
        self,
        client_step: ClientStep,
        payload: PyTree,
        cohort: Cohort,
        key: jax.Array,
        eta: Point[PyTree],
    ) -> PyTree:
        found = self._federation.sum(client_step, payload, cohort, key, eta)
        if self._on:
            for name in self._channels.get(client_step.__name__, ""):
                self._sums[name] = getattr(point_of(found), name)
        return found


def verdict(seen: Seen) -> Json | None:
    """Return the verdict on a run; None if its algorithm has no residuals.

    Returns:
        `lower`, `linear` and `hypergradient`, relative to the start; `converged`, which is None
        where the hypergradient is not known; `text`, one sentence.
    """
    parts = {name: _residuals(seen[name]) for name in ("y", "v", "x") if name in seen}
    if not parts:
        return None
    solved = {name: one / _first(one) for name, one in parts.items() if name != "x"}
    found = {_NAMES[name]: float(one[-1]) for name, one in solved.items()}
    small = all(value <= SOLVED for value in found.values())
    converged = None if small else False
    if "x" in parts:
        h = parts["x"]
        near = np.all([one <= _NEAR for one in (*solved.values(), 0 * h)], axis=0)
        start = np.max(h[near][:2], initial=0.0) or h[-1] or 1.0
        found["hypergradient"] = float(h[-1] / start)
        converged = small and found["hypergradient"] <= CONVERGED
    growing = any(one[-1] > 1.5 * np.median(one[len(one) // 2 :]) for one in parts.values())
    return {**found, "converged": converged, "text": _text(found, converged, growing)}


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


def _text(found: Mapping[str, float], converged: bool | None, growing: bool) -> str:
    """Return a verdict as a sentence."""
    said = {
        "lower": "lower problem solved to",
        "linear": "linear system to",
        "hypergradient": "hypergradient fell to",
    }
    facts = ", ".join(f"{said[name]} {_percent(value)}" for name, value in found.items())
    if converged is not False:
        return f"converged: {facts}" if converged else facts
    advice = "use more rounds or, with steps of your own, larger ones"
    return f"not converged: {facts}; {'use smaller or automatic steps' if growing else advice}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def _added(one: Json | None, part: int, norm: float, places: np.ndarray) -> Json:
    """Return what was seen of a channel, with one norm more."""
    parts = [list(numbers) for numbers in one["parts"]] if one else []
    before = np.asarray(one["places"]) if one else np.zeros_like(places)
    if not parts or one is None or one["part"] != part:
        parts.append([0, 0.0, 0.0, 0.0])
    new = [1, norm**2, float(places @ before), float(places @ places) if one else 0.0]
    parts[-1] = [old + more for old, more in zip(parts[-1], new, strict=True)]
    return {"part": part, "parts": parts, "places": places.tolist()}


@jax.jit
def measured(sums: dict[str, PyTree]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the norm of every sum, and its numbers at some places."""
    norms = {name: jnp.sqrt(trees.squared_norm(tree)) for name, tree in sums.items()}
    return norms, {name: _picked(tree) for name, tree in sums.items()}


def _picked(tree: PyTree) -> jax.Array:
    """Return some numbers of a tree, evenly from each leaf."""
    leaves = [jnp.ravel(leaf).astype(float) for leaf in jax.tree.leaves(tree)]
    each = max(1, _PLACES // len(leaves))
    return jnp.concatenate([leaf[:: max(1, leaf.size // each)] for leaf in leaves])
