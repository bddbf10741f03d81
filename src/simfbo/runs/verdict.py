"""Whether a run has converged, from residuals that its messages carry anyway.

An algorithm names the channels of its sums that vanish at the solution (`Algorithm.residuals`):
grad_y G on y, the residual of the linear system on v, the hypergradient on x. Their norms are taken
in about 200 rounds of a run. At its end, each is the root mean square over the last tenth of the
run, less what is noise, relative to the largest norm that was seen; that of the hypergradient since
y and v first came near their solutions, for before that it is something else.
"""

import math
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

CONVERGED = 0.05  # of the largest residual
_SETTLED = 0.1
_SAMPLES = 200
_TAIL = 0.9  # of a run, after which its end begins
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

    def begin(self, t: int) -> None:
        """Begin a round."""
        self._sums.clear()
        every = max(1, self._rounds // _SAMPLES)
        self._on = t % every == 0 or t == 1

    def end(self, t: int, seen: Seen) -> Seen:
        """Return what was seen so far, with this round's residuals."""
        if not self._sums:
            return seen
        norms, places = _measured(self._sums)
        found = {name: (float(norms[name]), np.asarray(places[name], float)) for name in norms}
        return _added(seen, found, t > _TAIL * self._rounds or t == self._rounds)

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
        `lower`, `linear` and `hypergradient`, relative to the largest; `converged`, which is None
        where the hypergradient is not known; `text`, one sentence.
    """
    found = {_NAMES[name]: _residual(seen[name]) for name in ("y", "v", "x") if name in seen}
    if not found:
        return None
    small = all(value <= CONVERGED for value in found.values())
    converged = small if "hypergradient" in found else None if small else False
    return {**found, "converged": converged, "text": _text(found, converged, seen)}


def _text(found: Mapping[str, float], converged: bool | None, seen: Seen) -> str:
    """Return a verdict as a sentence."""
    parts = []
    if "lower" in found:
        parts.append(f"lower problem solved to {_percent(found['lower'])}")
    if "linear" in found:
        parts.append(f"linear system to {_percent(found['linear'])}")
    if "hypergradient" in found:
        parts.append(f"hypergradient fell to {_percent(found['hypergradient'])}")
    if converged is not False:
        return f"{'converged: ' if converged else ''}{', '.join(parts)}"
    return f"not converged: {', '.join(parts)}; {_advice(found, seen)}"


def _advice(found: Mapping[str, float], seen: Seen) -> str:
    worst = max(found, key=lambda name: found[name])
    channel = next(key for key, name in _NAMES.items() if name == worst)
    if seen[channel]["now"] > 1.5 * seen[channel]["tail"]["first"]:
        return "it is growing: use smaller or automatic steps"
    return "use more rounds, or larger or automatic steps"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def _added(seen: Seen, found: Found, tail: bool) -> Json:
    """Return what was seen with one round more."""
    settled = seen.get("settled", False)
    seen = {**seen, **{name: _with(seen.get(name), *one, tail) for name, one in found.items()}}
    near = all(
        seen[name]["now"] <= _SETTLED * seen[name]["largest"] for name in "yv" if name in seen
    )
    if near and not settled and "x" in seen:
        seen["x"] = {**seen["x"], "largest": seen["x"]["now"]}
    return {**seen, "settled": settled or near}


def _with(one: Json | None, norm: float, places: np.ndarray, tail: bool) -> Json:
    """Return what was seen of a channel, with one norm more."""
    one = one or {"largest": 0.0, "tail": None}
    end = one["tail"] if tail else None
    if tail and end is None:
        end = {"count": 1, "square": norm**2, "first": norm, "likeness": 0.0, "power": 0.0}
    elif end is not None:
        end = {
            "count": end["count"] + 1,
            "square": end["square"] + norm**2,
            "first": end["first"],
            "likeness": end["likeness"] + float(places @ np.asarray(one["places"])),
            "power": end["power"] + float(places @ places),
        }
    largest = max(one["largest"], norm)
    return {"now": norm, "largest": largest, "tail": end, "places": places.tolist()}


def _residual(one: Json) -> float:
    """Return the norm at the end of a run, less what is noise, relative to the largest.

    Noise differs from one sum to the next, and drift does not: of the squared norm, the share that
    is not noise is the mean of <sum, previous sum>.
    """
    end = one["tail"]
    if not one["largest"]:
        return 0.0
    share = min(1.0, abs(end["likeness"]) / end["power"]) if end["power"] else 1.0
    return math.sqrt(end["square"] / end["count"] * share) / one["largest"]


@jax.jit
def _measured(sums: dict[str, PyTree]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the norm of every sum, and its numbers at some places."""
    norms = {name: jnp.sqrt(trees.squared_norm(tree)) for name, tree in sums.items()}
    return norms, {name: _picked(tree) for name, tree in sums.items()}


def _picked(tree: PyTree) -> jax.Array:
    """Return some numbers of a tree, evenly from each leaf."""
    leaves = [jnp.ravel(leaf).astype(float) for leaf in jax.tree.leaves(tree)]
    each = max(1, _PLACES // len(leaves))
    return jnp.concatenate([leaf[:: max(1, leaf.size // each)] for leaf in leaves])
