"""Clients in two lanes: a cohort in two compiled calls that run side by side.

Within a call clients run one after the other and are added up as they finish, so memory does not
grow with the cohort, matrix products keep their full size, and a client that takes few local steps
costs few local steps. Two calls side by side keep two cores busy where one call would have to split
every small product between them. Measured in docs/explanation-performance.md.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.data import ClientData
from simfbo.core.federation import Client
from simfbo.core.gate import squared_norms, within
from simfbo.core.keys import client_key
from simfbo.core.problem import PyTree
from simfbo.engines._cohort import Found, Inputs, Place, Sender, Sent, send
from simfbo.engines._messages import slice_for, zeros_for
from simfbo.robust import anomalies

_SECOND_LANE = ThreadPoolExecutor(1, thread_name_prefix="simfbo")
Program = Callable[..., Any]


def build(sender: Sender, stacked: bool, inputs: Inputs) -> Program:
    """Compile the program of a lane.

    Compiled ahead of the call: the second thread does not share JAX's thread-local settings and
    must have nothing left to trace.
    """
    zero, order = np.int32(0), np.zeros(len(inputs.ids), np.int32)
    job = jax.jit(partial(_gated_sum, sender, stacked))
    return job.lower(inputs, order, zero, zero).compile()


def compute(program: Program, inputs: Inputs, tau: np.ndarray, present: np.ndarray) -> Found:
    """Run a cohort in two lanes."""
    order, middle, end = deal(tau, ~present)
    if middle == end:
        return _found(program(inputs, order, np.int32(0), end))
    wide = jnp.result_type(float) == jnp.float64
    second = _SECOND_LANE.submit(_run_lane, wide, program, (inputs, order, middle, end))
    return _found(_ADD(program(inputs, order, np.int32(0), middle), second.result()))


def _found(sums: PyTree) -> Found:
    *rest, octets, memory = sums
    return Found(*rest, octets=octets, memory=memory)


def _run_lane(wide: bool, program: Program, inputs: tuple[Any, ...]) -> PyTree:
    """Run a program in the second thread, in the precision of the calling thread."""
    with jax.enable_x64(wide):
        return program(*inputs)


def deal(tau: np.ndarray, absent: np.ndarray) -> tuple[np.ndarray, np.int32, np.int32]:
    """Return an order of the cohort and where to cut it, so that both lanes work equally long.

    It depends only on who works how long, so neither does the order in which messages are added.
    The absent come after the second cut.

    Example:
        >>> deal(np.array([1, 9, 5, 4, 7]), np.array([False, False, False, False, True]))
        (array([1, 0, 2, 3, 4], dtype=int32), np.int32(2), np.int32(4))
    """
    descending = np.argsort(np.where(absent, 1, -tau), kind="stable").astype(np.int32)
    end = len(tau) - np.count_nonzero(absent)
    place = np.arange(end) % 4
    first = (place == 0) | (place == 3)
    working, away = descending[:end], descending[end:]
    order = np.concatenate([working[first], working[~first], away])
    return order, np.int32(first.sum()), np.int32(end)


def _gated_sum(
    sender: Sender,
    stacked: bool,
    inputs: Inputs,
    order: jax.Array,
    start: jax.Array,
    stop: jax.Array,
) -> PyTree:
    """Sum, or stack, the messages of the clients order[start:stop], one after the other."""
    size = len(inputs.ids)
    keys = jax.vmap(client_key, (None, 0, 0))(inputs.key, inputs.ids, inputs.repeats)
    assert isinstance(inputs.data, ClientData)
    view, step = inputs.data, sender.step(inputs)

    def sent_by(j: jax.Array | int) -> Sent:
        data = view._replace(client=inputs.places[j])
        own = jax.tree.map(lambda a: jnp.asarray(a)[j], inputs.memory)
        client = Client(data, inputs.plan[j], keys[j], own)
        place = Place(inputs.key, jnp.asarray(inputs.ids)[j], jnp.asarray(inputs.repeats)[j])
        payload, weigh = slice_for(inputs.payload, j), inputs.is_weighed(j)
        return send(sender.codecs, step, payload, client, place, weigh)

    def add(k: jax.Array, carry: PyTree) -> PyTree:
        total, squares, passed, probes, octets, memory = carry
        j = order[k]
        z, sent, after = sent_by(j)
        own = squared_norms(z)
        ok = within(own, inputs.limit)
        z = jax.tree.map(lambda a: jnp.where(ok, a, jnp.zeros_like(a)), z)
        if stacked:
            total = jax.tree.map(lambda rows, row: rows.at[j].set(row), total, z)
        else:
            total = trees.add_scaled(total, inputs.weights[j], z)
        squares, passed = squares.at[j].set(own), passed.at[j].set(ok.astype(jnp.int32))
        if probes is not None:
            row = (j - inputs.window) % size
            probes = probes.at[row].set(anomalies.take(probe, z), mode="drop")
        octets = None if octets is None else octets.at[j].set(sent)
        memory = jax.tree.map(lambda rows, row: rows.at[j].set(row), memory, after)
        return total, squares, passed, probes, octets, memory

    like = jax.eval_shape(sent_by, 0).message
    squares = jnp.zeros((size, len(jax.tree.leaves(like))))
    probe = anomalies.probe_of(like, size)
    probes = None
    if inputs.window is not None:
        probes = jnp.zeros((anomalies.compared(size), sum(probe.widths)))
    octets = None if sender.codecs is None else jnp.zeros(size)
    passed, memory = jnp.zeros(size, jnp.int32), trees.zeros_like(inputs.memory)
    carry = zeros_for(size, stacked, like), squares, passed, probes, octets, memory
    return jax.lax.fori_loop(start, stop, add, carry)


_ADD = jax.jit(trees.add, donate_argnums=0)
