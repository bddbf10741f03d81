"""Partial sums: the server's checks of a node's sum, and the combination of sums.

The server sees no single message here, so it checks a node's sum against the norms that the node
reports: the sum S_k of the messages m_i that passed, with the server's weights w_i, obeys the
triangle inequality in every leaf,

    ||S_k|| <= sum_i |w_i| ||m_i||,   i over the node's clients that passed,

with the norms ||m_i|| that the node reports, each of which must pass the server's gate. It follows
that no node's sum is larger than max_norm times the weights of its clients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.exchange import Reason, Request
from simfbo.core.gate import Gate, mismatch, too_large
from simfbo.core.problem import Point, PyTree
from simfbo.core.sampling import Cohort
from simfbo.flower.node import is_answer, messages_in
from simfbo.flower.transport import Package
from simfbo.flower.wire import BadPackage
from simfbo.robust import aggregation
from simfbo.robust.aggregation import Aggregator


class Partial(NamedTuple):
    """A node's weighted sum.

    Attributes:
        sums: sum_i w_i m_i over the clients that passed.
        passed: a mask of the node's clients in the sum.
        squares: squared norms of all messages, by client and leaf, as the node reports them.
        weight: sum_i w_i over the clients that passed.
    """

    sums: PyTree
    passed: np.ndarray
    squares: np.ndarray
    weight: float


def partial_sum(package: Package, request: Request, part: Cohort, gate: Gate) -> Partial:
    """Validate the sum in a node's response as far as possible.

    A sum that is no larger than one of admissible messages cannot be rejected, even if it is wrong;
    a square array, for example, may be transposed.

    Args:
        package: from the node.
        request: to the whole cohort.
        part: the clients requested from this node, with the weights of their messages.
        gate: the rules for each of their messages.
    """
    sums = messages_in(package, request.like, part.ids, ("ids", "squares", "passed"))
    if not is_answer(package, request.number):
        raise BadPackage("a response to another exchange", Reason.WRONG_EXCHANGE)
    if reason := mismatch(sums, request.like):
        raise BadPackage(f"a sum that does not match the request: it {reason}")
    if not all(np.isfinite(array).all() for array in sums.values()):
        raise BadPackage("a sum that is not finite", Reason.NOT_FINITE)
    passed, squares = _admissions(package, len(part.ids), len(sums))
    _require_gated(squares, passed, request, part.ids, gate)
    _require_bounded(sums, squares[passed], part.weights[passed], part.ids)
    tree = jax.tree.unflatten(jax.tree.structure(request.like), sums.values())
    return Partial(tree, passed, squares, float(part.weights[passed].sum()))


def combined_sums(
    parts: Sequence[Partial | None], aggregators: Point[Aggregator | None], like: PyTree
) -> PyTree:
    """Combine the sums of the nodes, in order; None stands for a node without a valid one.

    Without aggregators the sums S_k are added. With them, a node counts as one client whose message
    is its mean S_k / W_k and whose weight is W_k, the sum of the weights of its clients that
    passed:

        mean          sum_k W_k (S_k / W_k) = sum_k S_k
        median        W median_k(S_k / W_k), weighted by W_k, with W = sum_k W_k
        trimmed mean  W times the weighted mean of the S_k / W_k without the largest and smallest
        clipped mean  sum_k W_k min(1, c / ||S_k / W_k||) S_k / W_k
        others        W times the geometric median, or the clipped centre, of the S_k / W_k

    If all nodes have the same mean, each of these is the sum of the S_k.
    """
    if not parts or not aggregation.needs_stack(aggregators, like):
        total = trees.zeros_like(like)
        for part in parts:
            total = total if part is None else trees.add(total, part.sums)
        return total
    # Zeros for missing sums: another shape would be compiled again.
    means = [trees.zeros_like(like) if partial is None else _mean(partial) for partial in parts]
    weights = np.array([0.0 if partial is None else partial.weight for partial in parts])
    stack = jax.tree.map(lambda *rows: jnp.stack(rows), *means)
    return aggregation.combine(aggregators, stack, weights)


def _mean(part: Partial) -> PyTree:
    """Return a node's weighted mean; zero if none of its clients passed."""
    return trees.scale(1 / part.weight if part.weight else 0.0, part.sums)


def _admissions(package: Package, clients: int, leaves: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the mask of the clients in a sum, and the squared norms of all messages."""
    passed, squares = package.arrays.get("passed"), package.arrays.get("squares")
    if passed is None or passed.dtype != bool or passed.shape != (clients,):
        raise BadPackage("a sum without a list of the clients in it")
    if squares is None or squares.dtype != np.float64 or squares.shape != (clients, leaves):
        raise BadPackage("a sum without the norms of the messages in it")
    if (squares < 0).any():
        raise BadPackage("a sum with negative squares of norms")
    return passed, squares


def _require_gated(
    squares: np.ndarray, passed: np.ndarray, request: Request, ids: np.ndarray, gate: Gate
) -> None:
    """Raise if a message admitted by a node fails the server's gate."""
    if not passed.any():
        return
    # The node adds squares in another order, so a norm at the limit may differ by rounding.
    shrink = 1 - 8 * squares.shape[1] * float(_wide().eps)
    with np.errstate(over="ignore"):
        largest = int(np.argmax(np.where(passed, squares.sum(1), -1.0)))  # or the first NaN
        square = np.asarray(shrink * squares[largest], jnp.result_type(float))
    if rejection := too_large(square, trees.names(request.like), gate):
        reason, text = rejection
        raise BadPackage(f"a sum for {_listed(ids)} although client {ids[largest]} {text}", reason)


def _require_bounded(
    sums: dict[str, np.ndarray], squares: np.ndarray, weights: np.ndarray, ids: np.ndarray
) -> None:
    """Raise if a leaf of a sum exceeds the bound given by its messages.

    Args:
        sums: the leaves of the sum.
        squares: squared norms of the messages in it, by client and leaf.
        weights: of these messages.
        ids: all clients of the node.
    """
    for (name, leaf), leaf_squares in zip(sums.items(), squares.T, strict=True):
        bound = _largest_norm(leaf, leaf_squares, weights)
        norm = float(np.linalg.norm(np.asarray(leaf, np.float64).ravel()))
        if norm > bound:
            raise BadPackage(
                f"a sum for {_listed(ids)} whose {name or 'array'} has norm {norm:.3g}, more than "
                f"the {bound:.3g} that the reported norms of {len(weights)} messages allow",
                Reason.TOO_LARGE,
            )


def _largest_norm(leaf: np.ndarray, squares: np.ndarray, weights: np.ndarray) -> float:
    """Bound the norm of a sum of messages with these squared norms, including rounding.

    A sum of k terms of d numbers has k + 2 roundings in the leaf's precision, a squared norm d in
    that of the computation; rounding to nearest can at most double a sum. A number whose square
    underflows is missing from its norm, and numbers near zero have an absolute error.
    """
    precision, wide, count = jnp.finfo(leaf.dtype), _wide(), len(weights)
    roundings = (count + 2) * float(precision.eps) + leaf.size * float(wide.eps)
    step = float(precision.smallest_subnormal)
    norms = np.sqrt(squares + leaf.size * float(wide.tiny))
    largest = (1 + min(1.0, roundings)) * ((np.abs(weights) + step) @ norms)
    return float(largest + 2 * count * np.sqrt(leaf.size) * step)


def _wide() -> Any:
    """Return the precision in which both sides compute norms."""
    return jnp.finfo(jnp.result_type(float))


def _listed(ids: np.ndarray, most: int = 5) -> str:
    """List clients by number, at most five.

    Example:
        >>> _listed(np.array([3, 8])), _listed(np.arange(40))
        ('clients 3, 8', 'clients 0, 1, 2, 3, 4 and 35 more')
    """
    shown = ", ".join(map(str, ids[:most].tolist()))
    rest = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f"client{'s' if len(ids) > 1 else ''} {shown}{rest}"
