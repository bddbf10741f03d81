"""Clients in batches: chunks of a cohort stacked by `vmap`, one chunk after the other.

For small models, where the work of a single client is less than what it costs to start it. Within a
chunk everybody takes as many steps as the one who takes most, and what the others compute beyond
their own is masked. With several devices every device computes the clients whose data it holds, and
the sums are added up between them. It runs by itself, one exchange at a time, or inside the trace
of a block of rounds (`blocks`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from simfbo.core import trees
from simfbo.core.data import ClientData, FederatedData, OwnSplit, Split
from simfbo.core.federation import Client
from simfbo.core.gate import squared_norms, within
from simfbo.core.keys import client_key
from simfbo.core.local_work import LocalPlan
from simfbo.core.problem import PyTree
from simfbo.engines._cohort import Found, Inputs, Place, Sender, Sent, Stacks, send
from simfbo.engines._messages import slice_for, zeros_for
from simfbo.robust import anomalies

AXIS = "clients"
_WORKING_SET = 2**20  # numbers that a chunk may touch on a CPU
_DEVICE_SHARE = 0.2  # of an accelerator's memory that a chunk may take
_PADDING = 2  # how many times as large as the samples the stacks of them may be


class Layout(NamedTuple):
    """How a cohort is computed; it is a part of the compiled program.

    Attributes:
        chunk: clients computed side by side.
        chunks: how many chunks every device goes through.
        whole: whether the cohort is everyone, in order.
        mesh: the devices; None for the default one.
    """

    chunk: int
    chunks: int
    whole: bool
    mesh: Mesh | None = None


def layout_for(
    size: int, numbers: int, whole: bool, mesh: Mesh | None, chunk: int | None
) -> Layout:
    """Return how to compute a cohort.

    Args:
        size: clients in the cohort.
        numbers: that a client's step reads and writes.
        whole: whether the cohort is everyone.
        mesh: the devices.
        chunk: clients computed side by side; by default as many as the memory is good for.
    """
    devices = 1 if mesh is None else mesh.size
    share, most = -(-size // devices), chunk or max(1, _room() // max(1, numbers))
    if whole:
        chunks = -(-share // most)
        return Layout(-(-share // chunks), chunks, whole, mesh)
    # Of a sampled cohort one device may have to compute everybody.
    chunks = -(-size // min(share, most))
    return Layout(-(-size // chunks), chunks, whole, mesh)


def _room() -> int:
    """Return how many numbers a chunk may touch: the cache of a CPU, or a device's memory."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _WORKING_SET
    limit = (device.memory_stats() or {}).get("bytes_limit", 2**33)
    return int(_DEVICE_SHARE * limit / 4)


def stacks_of(data: FederatedData, clients: int, mesh: Mesh | None) -> Stacks | None:
    """Return the clients' data stacked, and divided between the devices; None if that wastes space.

    Args:
        data: the clients' data.
        clients: as many as there are places for; the last one is repeated.
        mesh: the devices.
    """
    if mesh is None and not all(map(_is_dense, (data.lower, data.upper))):
        return None
    lower = data.lower.stacked()
    upper = lower if _is_same(data.lower, data.upper) else data.upper.stacked()
    padded = jax.tree.map(lambda a: _padded(a, clients), lower)
    both = Stacks(
        padded, padded if upper is lower else jax.tree.map(lambda a: _padded(a, clients), upper)
    )
    if mesh is None:
        return trees.on_device(both)
    return jax.device_put(both, jax.NamedSharding(mesh, PartitionSpec(AXIS)))


def _is_dense(part: Split) -> bool:
    """Return whether a stack of a part, for whole batches, is hardly larger than the part."""
    return part.batch_size is None and part.start.size * part.largest <= _PADDING * part.rows.size


def _is_same(lower: Split, upper: Split) -> bool:
    """Return whether both parts hold the same samples."""
    shared = lower.samples is upper.samples and lower.rows.shape == upper.rows.shape
    pairs = ((lower.rows, upper.rows), (lower.start, upper.start))
    return shared and all(np.array_equal(a, b) for a, b in pairs)


def _padded(rows: jax.Array, count: int) -> Any:
    """Return rows with the last one repeated until there are `count`."""
    array, missing = np.asarray(rows), count - len(rows)
    return np.concatenate([array, np.repeat(array[-1:], missing, 0)]) if missing > 0 else rows


def compute(sender: Sender, like: PyTree, stacked: bool, layout: Layout, inputs: Inputs) -> Found:
    """Sum, or stack, the messages of a cohort.

    Args:
        sender: what each client does, and how its message travels.
        like: a message, abstract.
        stacked: whether to stack.
        layout: how to compute the cohort.
        inputs: what it is computed from.
    """
    if layout.mesh is None:
        return _computed(sender, like, stacked, layout, inputs, None)
    here, every = PartitionSpec(AXIS), PartitionSpec()
    specs = Inputs._make(here if name == "data" else every for name in Inputs._fields)
    return jax.shard_map(
        lambda given: _computed(sender, like, stacked, layout, given, AXIS),
        mesh=layout.mesh, in_specs=(specs,), out_specs=every, check_vma=False,
    )(inputs)  # fmt: skip


class _Sums(NamedTuple):
    """What chunks of clients add up to."""

    total: PyTree
    square: jax.Array
    probes: jax.Array | None


def _computed(
    sender: Sender,
    like: PyTree,
    stacked: bool,
    layout: Layout,
    inputs: Inputs,
    axis: str | None,
) -> Found:
    """Compute this device's clients, and add up what all devices found."""
    size, cohort = len(inputs.places), _Cohort(sender, inputs, layout, axis)
    probe = anomalies.probe_of(like, size)
    count = anomalies.compared(size)
    probes = None if inputs.window is None else jnp.zeros((count, sum(probe.widths)))
    small = axis is None and layout.chunks == 1 and count == size

    def probed(messages: PyTree, positions: Any, probes: Any) -> Any:
        if probes is None:
            return None
        if small:
            return jax.vmap(lambda z: anomalies.take(probe, z))(messages)
        rows = jnp.where(positions < size, (positions - inputs.window) % size, size)
        return _probed(probe, probes, messages, rows)

    def looked_at(messages: PyTree, positions: Any, probes: Any) -> tuple[Any, Any]:
        """Return squared norms and probes, where somebody looks at them."""

        def look() -> tuple[Any, Any]:
            return jax.vmap(squared_norms)(messages), probed(messages, positions, probes)

        if inputs.look is None:
            return None, probes
        nothing = jnp.zeros((layout.chunk, len(jax.tree.leaves(like)))), probes
        return jax.lax.cond(inputs.look, look, lambda: nothing)

    def step(sums: _Sums, c: Any) -> tuple[_Sums, PyTree]:
        positions, (sent, squares, ok) = cohort.chunk(c)
        messages = sent.message
        total, square, probes = sums
        if not stacked:
            own = jax.tree.map(partial(_weighted, cohort.weights(positions)), messages)
            total = own if total is None else trees.add(total, own)
        if ok is None:
            square = square + jnp.sum(squared_norms(messages))
            squares, probes = looked_at(messages, positions, probes)
        else:
            probes = probed(messages, positions, probes)
        kept = messages if stacked else ()
        rows = kept, squares, ok, sent.octets, sent.memory, positions
        return _Sums(total, square, probes), rows

    sums = _Sums(None, jnp.zeros(()), probes)
    if layout.chunks == 1:
        sums, rows = step(sums, 0)
    else:
        total = () if stacked else zeros_for(size, False, like)
        steps = jnp.arange(layout.chunks, dtype=jnp.int32)
        sums, rows = jax.lax.scan(step, sums._replace(total=total), steps)
        rows = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), rows)
    *rows, positions = rows
    if axis is not None:
        rows = jax.tree.map(
            lambda a: jnp.zeros((size, *a.shape[1:]), a.dtype).at[positions].set(a, mode="drop"),
            rows,
        )
        sums, rows = jax.lax.psum((sums, rows), axis)
    elif layout.chunks * layout.chunk != size:
        rows = jax.tree.map(lambda a: a[:size], rows)
    messages, squares, ok, octets, memory = rows
    total = messages if stacked else sums.total
    return Found(total, squares, ok, sums.probes, jnp.isfinite(sums.square), octets, memory)


class _Cohort:
    """The clients of a cohort that one device computes."""

    def __init__(self, sender: Sender, inputs: Inputs, layout: Layout, axis: str | None) -> None:
        self._sender, self._in, self._layout = sender, inputs, layout
        self._step = sender.step(inputs)
        self._size = len(inputs.places)
        self._first = 0  # the place of the first client whose data is here
        count = layout.chunks * layout.chunk
        self._positions: Any = np.minimum(np.arange(count, dtype=np.int32), self._size)
        if axis is not None:
            assert isinstance(inputs.data, Stacks)
            held = inputs.data.lower.count.shape[0]
            self._first = jax.lax.axis_index(axis).astype(jnp.int32) * held
            if layout.whole:
                self._positions = jnp.minimum(
                    self._first + np.arange(count, dtype=np.int32), self._size
                )
            else:
                places = jnp.asarray(inputs.places)
                mine = (places >= self._first) & (places < self._first + held)
                self._positions = jnp.nonzero(mine, size=count, fill_value=self._size)[0].astype(
                    jnp.int32
                )

    def slot(self, j: Any) -> tuple[PyTree, ...]:
        """Return what a client sends is made of: payload, data, work, memory and place."""
        given, plan = self._in, self._in.plan
        place = Place(given.key, jnp.asarray(given.ids)[j], jnp.asarray(given.repeats)[j])
        own = plan if jnp.ndim(plan.tau) == 0 else jax.tree.map(lambda a: jnp.asarray(a)[j], plan)
        memory = jax.tree.map(lambda a: jnp.asarray(a)[j], given.memory)
        data = self._data(jnp.asarray(given.places)[j])
        return slice_for(given.payload, j), data, own, memory, place

    def sent(
        self, j: Any, payload: PyTree, data: ClientData, plan: LocalPlan, memory: PyTree, at: Place
    ) -> Sent:
        """Return what arrives from the client at a position."""
        given, client = self._in, Client(data, plan, client_key(*at), memory)
        return send(self._sender.codecs, self._step, payload, client, at, given.is_weighed(j))

    def chunk(self, c: Any) -> tuple[Any, PyTree]:
        """Return the positions of a chunk of clients, and what they send; see `_sent`."""
        chunk, (_, chunks, whole, mesh) = self._layout.chunk, self._layout
        positions = self._positions
        if chunks > 1:
            positions = jax.lax.dynamic_slice_in_dim(jnp.asarray(positions), c * chunk, chunk)
        if mesh is None or whole:
            return positions, self._sent(positions, c)
        # A device may hold none of a sampled cohort, or all of it: most chunks are empty.
        like = jax.eval_shape(self._sent, positions, 0)
        return positions, jax.lax.cond(
            jnp.any(positions < self._size),
            lambda: self._sent(positions, c),
            lambda: trees.zeros_like(like),
        )

    def weights(self, positions: Any) -> Any:
        """Return the weights of the clients at some positions; zero for padding."""
        weights = jnp.asarray(self._in.weights)
        if isinstance(positions, np.ndarray) and len(positions) == self._size:
            return weights
        return jnp.where(positions < self._size, weights[jnp.minimum(positions, self._size - 1)], 0)

    def _sent(self, positions: Any, c: Any) -> tuple[Sent, Any, Any]:
        """Return what was sent, squared norms and admissions; what does not count is zero.

        Where only what is not finite is refused, which shows in the sum, messages are all.
        """
        chunk, size = self._layout.chunk, self._size
        safe = np.minimum if isinstance(positions, np.ndarray) else jnp.minimum
        at = safe(positions, size - 1)
        if chunk == 1:
            found = jax.tree.map(lambda a: a[None], self.sent(at[0], *self.slot(at[0])))
        else:
            found = self._batch(at, c)
        if self._in.present is None:
            return found, None, None
        z = found.message
        present = jnp.asarray(self._in.present)[at] & jnp.asarray(positions < size)
        squares = jnp.where(present[:, None], jax.vmap(squared_norms)(z), 0.0)
        ok = jax.vmap(within, (0, None))(squares, self._in.limit) & present
        z = jax.tree.map(lambda a: jnp.where(_column(ok, a), a, jnp.zeros_like(a)), z)
        return found._replace(message=z), squares, ok

    def _batch(self, at: Any, c: Any) -> Sent:
        """Return what the clients at some positions send, computed side by side."""
        given, chunk = self._in, self._layout.chunk
        if not (self._layout.whole and isinstance(given.data, Stacks)):
            return jax.vmap(lambda j: self.sent(j, *self.slot(j)))(at)
        # Everyone in order: the data is there as it is needed, with nothing to gather.
        own = given.data if self._layout.chunks == 1 else jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, c * chunk, chunk), given.data
        )  # fmt: skip

        def one(j: Any, lower: OwnSplit, upper: OwnSplit) -> Sent:
            payload, _, *rest = self.slot(j)
            data = ClientData(lower, upper, jnp.asarray(given.places)[j])
            return self.sent(j, payload, data, *rest)

        return jax.vmap(one)(at, *own)

    def _data(self, place: Any) -> ClientData:
        """Return the data of one client, by its place."""
        data = self._in.data
        if not isinstance(data, Stacks):
            return data._replace(client=place)
        lower, upper = jax.tree.map(lambda a: a[place - self._first], data)
        return ClientData(lower, upper, place)


def _column(ok: jax.Array, like: jax.Array) -> jax.Array:
    """Return one value per client in a shape that broadcasts over the clients' arrays."""
    return ok.reshape(-1, *[1] * (like.ndim - 1))


def _weighted(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the weighted sum of the clients' arrays."""
    if len(rows) == 1:
        return weights[0].astype(rows.dtype) * rows[0]
    return jnp.tensordot(weights.astype(rows.dtype), rows, 1, precision="highest")


def _probed(
    probe: anomalies.Probe, probes: jax.Array, messages: PyTree, rows: jax.Array
) -> jax.Array:
    """Return the probed numbers, with those of a chunk whose rows are among them."""
    count = len(probes)

    def put(probes: jax.Array) -> jax.Array:
        found = jax.vmap(lambda z: anomalies.take(probe, z))(messages)
        return probes.at[rows].set(found, mode="drop")

    if not probes.size:
        return probes
    return jax.lax.cond(jnp.any(rows < count), put, lambda same: same, probes)
