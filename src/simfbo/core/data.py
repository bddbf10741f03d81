"""Clients' data: stored once, assigned to clients by row numbers, sampled by key.

The samples of all clients are in one pytree of arrays. A client is a range of row numbers, so that
ten thousand clients need ten thousand pairs of integers, and lower and upper parts can share the
same arrays.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import Loss, PyTree, Scalar, Weighted, evaluate
from simfbo.core.trees import on_device
from simfbo.core.validation import require_alike, require_arrays, rows_not_finite
from simfbo.errors import UserError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Split:
    """One part (lower or upper) of the clients' data.

    The samples of all clients are in common arrays or, if `stacked`, client after client along a
    first axis: element i of every array is then the `Split` of client i.

    Attributes:
        samples: pytree of arrays, with samples along the first axis, or the second if stacked.
        rows: the clients' row numbers into `samples`, client after client; None if stacked.
        start: the position of each client's first row number; None if stacked.
        count: the number of samples of each client.
        batch_size: samples in a minibatch; None for full batches.
        largest: the largest count.
        equal: all counts are the same.
    """

    samples: PyTree
    rows: Any
    start: Any
    count: jax.Array
    batch_size: int | None = eqx.field(static=True)
    largest: int = eqx.field(static=True)
    equal: bool = eqx.field(static=True)

    @property
    def is_stacked(self) -> bool:
        """Whether each client's samples are stored separately."""
        return self.rows is None

    def size(self, client: Scalar) -> jax.Array:
        """Return a client's number of samples."""
        return self.count if self.is_stacked else self.count[client]

    def batch(self, client: Scalar, key: jax.Array) -> PyTree:
        """Sample a client's minibatch with replacement; or return its full batch."""
        if self.batch_size is None:
            return self.full(client)
        count = self.size(client)
        slots = jax.random.randint(key, (self.batch_size,), 0, count, count.dtype)
        return self._take(client, slots)

    def full(self, client: Scalar) -> PyTree:
        """Return all samples of a client, as a `Weighted` batch if counts are unequal."""
        if self.is_stacked and self.equal:
            return self.samples
        slots = jnp.arange(self.largest, dtype=self.count.dtype)
        if self.equal:
            return self._take(client, slots)
        count = self.size(client)
        weights = jnp.where(slots < count, 1 / count.astype(float), 0.0)
        if self.is_stacked:
            return Weighted(self.samples, weights)
        return Weighted(self._take(client, jnp.minimum(slots, count - 1)), weights)

    def _take(self, client: Scalar, slots: jax.Array) -> PyTree:
        rows = slots if self.is_stacked else self.rows[self.start[client] + slots]
        return jax.tree.map(lambda a: a[rows], self.samples)

    def stacked(self) -> "Split":
        """Copy the samples client by client, padded to `largest` with the client's last sample."""
        start, count = np.asarray(self.start)[:, None], np.asarray(self.count)[:, None]
        rows = np.asarray(self.rows)[start + np.minimum(np.arange(self.largest), count - 1)]
        samples = jax.tree.map(lambda a: np.asarray(a)[rows], self.samples)
        return replace(self, samples=samples, rows=None, start=None)


class ClientData(NamedTuple):
    """A client's view of the data."""

    lower: Split
    upper: Split
    client: Any

    def lower_batch(self, key: jax.Array) -> PyTree:
        """Return a batch of the client's lower data."""
        return self.lower.batch(self.client, key)

    def upper_batch(self, key: jax.Array) -> PyTree:
        """Return a batch of the client's upper data."""
        return self.upper.batch(self.client, key)


@dataclass(frozen=True)
class FederatedData:
    """The data of n clients and their weights p_i.

    Created by `federate` (one data set and a partition) or `from_clients` (a list of clients).

    Attributes:
        lower: the lower parts.
        upper: the upper parts.
        p: the clients' weights.
        n: the number of clients.
        ids: the clients' numbers in the federation, of which these may be a subset. Random draws
            depend on these numbers.
    """

    lower: Split
    upper: Split
    p: np.ndarray
    n: int
    ids: np.ndarray

    def client(self, i: Scalar | None) -> ClientData:
        """Return client i's data; for None, a view without a client."""
        return ClientData(self.lower, self.upper, i)

    @cached_property
    def not_finite(self) -> list[int]:
        """The clients with NaN or infinite numbers in their samples."""
        affected = np.zeros(self.n, bool)
        for part in (self.lower, self.upper):
            if len(bad := rows_not_finite(part.samples)):
                is_bad = np.isin(np.asarray(part.rows), bad)
                affected |= np.logical_or.reduceat(is_bad, np.asarray(part.start))
        return self.ids[affected].tolist()

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of samples, their assignment, weights, ids and batch sizes."""
        lower, upper = self.lower, self.upper
        shared = lower.samples is upper.samples
        parts = [
            jax.tree.leaves(lower.samples),
            [] if shared else jax.tree.leaves(upper.samples),
            *((part.rows, part.start, part.count, part.batch_size or 0) for part in (lower, upper)),
            (self.p, self.ids),
        ]
        return digest(*(array for part in parts for array in part))


def federate(
    samples: PyTree,
    lower: Sequence[np.ndarray],
    upper: Sequence[np.ndarray],
    *,
    batch_size: int | None = None,
    p: Sequence[float] | None = None,
) -> FederatedData:
    """Assign the rows of one data set to clients.

    Args:
        samples: pytree of arrays; the first axis counts samples.
        lower: row numbers of each client's lower (training) samples.
        upper: row numbers of each client's upper (validation) samples.
        batch_size: samples in a minibatch of either part, drawn with replacement; None for full
            batches.
        p: the clients' weights, normalised to sum to one; by default proportional to their numbers
            of samples.

    Returns:
        The federated data, holding `samples` once.

    Example:
        >>> import numpy as np
        >>> rows = [np.array([0, 1]), np.array([2, 3])]
        >>> federate(np.arange(4.0), lower=rows, upper=rows).n
        2
    """
    require_arrays(samples, "The samples")
    samples = on_device(samples)
    length = _length(samples)
    for rows in map(np.asarray, (*lower, *upper)):
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise UserError(
                "Give each client an array of row numbers; np.flatnonzero makes them of a mask."
            )
        if rows.size and not 0 <= rows.min() <= rows.max() < length:
            raise UserError(f"A client's rows must lie between 0 and {length - 1}.")
    return _assemble((samples, lower), (samples, upper), batch_size, p)


def from_clients(
    lower: Sequence[PyTree],
    upper: Sequence[PyTree],
    *,
    batch_size: int | None = None,
    p: Sequence[float] | None = None,
    ids: Sequence[int] | None = None,
) -> FederatedData:
    """Combine the data of single clients, each a pytree of arrays.

    Args:
        lower: each client's lower samples.
        upper: each client's upper samples; identical objects are stored once.
        batch_size: as in `federate`.
        p: as in `federate`.
        ids: the clients' numbers, for a subset of a federation; 0, 1, ... by default.

    Returns:
        The federated data.

    Example:
        >>> import numpy as np
        >>> parts = [np.ones((3, 2)), np.ones((5, 2))]
        >>> from_clients(lower=parts, upper=parts).p.tolist()
        [0.375, 0.625]
    """
    lower, upper = list(lower), list(upper)
    if not lower or not upper:
        raise UserError("Give at least one client's lower and upper samples.")
    if ids is not None and len(ids) != len(lower):
        raise UserError(f"Give one of ids per client: got {len(ids)} for {len(lower)} clients.")
    for name, parts in (("lower", lower), ("upper", upper)):
        require_alike(parts, range(len(parts)) if ids is None else ids, name)

    def concatenated(parts: Sequence[PyTree]) -> _Assigned:
        samples = jax.tree.map(lambda *arrays: on_device(np.concatenate(arrays)), *parts)
        ends = np.cumsum([_length(part) for part in parts])
        return samples, np.split(np.arange(ends[-1]), ends[:-1])

    below = above = concatenated(lower)
    if any(a is not b for a, b in zip_longest(lower, upper)):
        above = concatenated(upper)
    return _assemble(below, above, batch_size, p, ids)


def pad_to_buckets(data: FederatedData) -> FederatedData:
    """Pad all arrays to bucket sizes, without effect on the clients' computations.

    Data sets of similar sizes, such as the folds of a cross-validation, then share compiled
    programs.
    """

    def padded(array: Any) -> jax.Array:
        extra = bucket_size(len(array)) - len(array)
        return on_device(np.pad(array, [(0, extra), *[(0, 0)] * (np.ndim(array) - 1)]))

    def split(part: Split) -> Split:
        samples, rows = jax.tree.map(padded, (part.samples, part.rows))
        largest = bucket_size(part.largest)
        return replace(part, samples=samples, rows=rows, largest=largest, equal=False)

    lower, upper = split(data.lower), split(data.upper)
    if data.lower.samples is data.upper.samples:  # still stored once
        upper = replace(upper, samples=lower.samples)
    return replace(data, lower=lower, upper=upper)


def bucket_size(count: int) -> int:
    """Round a count up to three significant bits, by a quarter at most.

    Example:
        >>> [bucket_size(count) for count in (3, 9, 455, 456)]
        [3, 10, 512, 512]
    """
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


def pooled(loss: Loss, part: Split, p: np.ndarray) -> Callable[[PyTree, PyTree], jax.Array]:
    """Return (x, y) -> sum_i p_i loss_i(x, y) over all samples of all clients."""

    def total(x: PyTree, y: PyTree) -> jax.Array:
        one = jax.checkpoint(lambda i: evaluate(loss, x, y, part.full(i)))
        losses = jax.lax.map(one, jnp.arange(len(p)))
        return jnp.asarray(p, losses.dtype) @ losses

    return total


_Assigned = tuple[PyTree, Sequence[np.ndarray]]  # samples, rows of each client


def _assemble(
    lower: _Assigned,
    upper: _Assigned,
    batch_size: int | None,
    p: Sequence[float] | None,
    ids: Sequence[int] | None = None,
) -> FederatedData:
    """Create the data from its lower and upper parts."""
    n, count = len(lower[1]), len(upper[1])
    if n != count or not n:
        raise UserError(f"Give lower and upper parts for the same clients: got {n} and {count}.")
    if batch_size is not None and (int(batch_size) != batch_size or batch_size < 1):
        raise UserError(f"batch_size must be a whole number of at least 1, got {batch_size}.")

    def split(part: _Assigned, name: str) -> Split:
        samples, rows = part
        count = np.array(list(map(len, rows)), np.int32)
        if (count == 0).any():
            raise UserError(
                f"Client {np.argmin(count)} has no {name} samples: use fewer clients or another "
                "partition."
            )
        return Split(
            samples=samples,
            rows=on_device(np.concatenate(rows).astype(np.int32)),
            start=on_device((np.cumsum(count) - count).astype(np.int32)),
            count=on_device(count),
            batch_size=None if batch_size is None else int(batch_size),
            largest=int(count.max()),
            equal=bool((count == count[0]).all()),
        )

    sizes = [len(a) + len(b) for a, b in zip(lower[1], upper[1], strict=True)]
    return FederatedData(
        lower=split(lower, "lower"),
        upper=split(upper, "upper"),
        p=checked_weights(sizes if p is None else p, n),
        n=n,
        ids=np.asarray(range(n) if ids is None else ids, np.int32),
    )


def _length(samples: PyTree) -> int:
    """Return the common length of the arrays in a pytree."""
    lengths = {len(leaf) for leaf in jax.tree.leaves(samples)}
    if len(lengths) != 1:
        raise UserError(
            f"All arrays of a client must hold one number of samples, got {sorted(lengths)}."
        )
    return lengths.pop()


def checked_weights(p: Sequence[float], n: int) -> np.ndarray:
    """Normalise the clients' weights to sum to one; raise unless they are positive."""
    array = np.asarray(p, float)
    if n < 1 or array.shape != (n,) or not (array > 0).all() or not np.isfinite(array).all():
        raise UserError(f"The weights p must be {n} positive numbers, one per client.")
    return array / array.sum()


def digest(*arrays: Any) -> str:
    """Compute the SHA-256 of arrays, their types and shapes, in hexadecimal."""
    result = hashlib.sha256()
    for array in map(np.asarray, arrays):
        result.update(f"{array.dtype}{array.shape}".encode())
        result.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return result.hexdigest()
