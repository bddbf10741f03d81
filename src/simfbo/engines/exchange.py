"""One exchange with clients on this machine: the only place where client steps run.

    prepare_exchange    draw local work and drop-outs, code the payload
    run_clients         run the client step on the cohort, in chunks
    finish_exchange     combine the messages, write the report

`exchange` runs the three in a compiled program of its own, or in the trace of many rounds
(`rounds`). `vmap` runs the clients of a chunk side by side: all of them take as many local steps as
the client with the most, and the surplus steps are masked. Large steps, such as those of networks,
run one client at a time.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from simfbo.codecs.messages import Codecs, code_message, code_payload, down_key, start_of, up_key
from simfbo.core import memory as memories
from simfbo.core import trees
from simfbo.core.data import ClientData, Split
from simfbo.core.exchange import EVALUATION, ExchangeReport, Shapes
from simfbo.core.federation import Client, ClientStep, WithMemory
from simfbo.core.gate import squared_norms, within
from simfbo.core.keys import client_key
from simfbo.core.ledger import is_per_client
from simfbo.core.local_work import LocalPlan, Work
from simfbo.core.method import is_uncoded
from simfbo.core.problem import Point, PyTree, Scalar
from simfbo.core.sampling import Absence, Cohort, Sampler
from simfbo.errors import NeedsHost, UserError
from simfbo.privacy import clipped_again
from simfbo.robust import aggregation, anomalies
from simfbo.robust.aggregation import Aggregator

AXIS = "clients"
Strategy = Literal["auto", "lanes", "batches"]
LARGE = 2 * 10**7  # operations of a client's step from which on clients run one by one on a CPU
_WORKING_SET = 2**20  # numbers that a chunk may touch on a CPU
_WHOLE = 4  # times as many, which a cohort may touch before it is divided: chunks are copied
_DEVICE_SHARE = 0.2  # of an accelerator's memory that a chunk may take


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Clients:
    """The clients of a simulated federation and the rules of every exchange, as inputs of programs.

    Attributes:
        lower: their lower samples: stacked client by client, or rows of a common array.
        upper: their upper samples.
        p: their weights.
        ids: their numbers, which random draws depend on.
        sampler: draws the clients that take part.
        work: their local work.
        absence: draws the clients that fail to reply; None for none.
        limit: the largest norm that passes the gate; None lets everything pass.
        start: x0 and y0, for codecs that are relative to them; else None.
        aggregators: how messages are combined, by channel.
        codecs: how messages are coded; None for not at all.
        detect: whether messages are compared.
        checks: whether every reply is checked; otherwise all are added up, and the report says
            whether the sum was finite.
        chunk: clients in a chunk; None for as many as fit the cache, or an accelerator's memory.
        mesh: the devices that share the clients; None for one device.
        strategy: which steps are computed in two threads, see `uses_threads`.
    """

    lower: Split
    upper: Split
    p: Float[Any, " n"]
    ids: Int[Any, " n"]
    sampler: Sampler
    work: Work
    absence: Absence | None
    limit: Scalar | None
    start: Point[PyTree] | None
    aggregators: Point[Aggregator | None] = eqx.field(static=True)
    codecs: Codecs | None = eqx.field(static=True)
    detect: bool = eqx.field(static=True)
    checks: bool = eqx.field(static=True)
    chunk: int | None = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)
    strategy: Strategy = eqx.field(static=True)

    @property
    def n(self) -> int:
        """The number of clients."""
        return self.p.shape[0]

    def uses_threads(self, cost: "Cost", size: int) -> bool:
        """Whether a cohort is computed in two threads rather than in one program."""
        large = self.strategy == "auto" and is_large(cost)
        return self.mesh is None and size > 1 and (large or self.strategy == "lanes")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Rows:
    """The inputs of an exchange that differ between clients: a row for each, or the row of one.

    Attributes:
        position: in the cohort.
        place: of the client among all clients.
        id: the client's number.
        repeat: counts the earlier positions of the same client.
        weight: of its message.
        replies: whether it replies.
        measured: whether the bytes of its coded message are computed; None for always.
        plan: its local work; None where all clients have the same.
        data: its samples; None where they are found by place.
        memory: of a stateful client; else None.
    """

    position: Int[Any, "*cohort"]
    place: Int[Any, "*cohort"]
    id: Int[Any, "*cohort"]
    repeat: Int[Any, "*cohort"]
    weight: Float[Any, "*cohort"]
    replies: Bool[Any, "*cohort"]
    measured: Bool[Any, "*cohort"] | None
    plan: LocalPlan | None
    data: tuple[Split, Split] | None
    memory: PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Job:
    """The clients' part of an exchange.

    Attributes:
        step: the client step.
        payload: after decoding.
        key: of the exchange.
        limit: the gate's.
        plan: the local work that all clients share; None where it differs.
        data: all clients' lower and upper samples.
        rows: the inputs that differ between clients.
        codecs: how messages are coded; None for not at all.
        detect: whether numbers of the messages are kept for comparison.
        checks: see `Clients`.
    """

    step: ClientStep
    payload: PyTree
    key: Key[Array, ""]
    limit: Scalar | None
    plan: LocalPlan | None
    data: tuple[Split, Split]
    rows: Rows
    codecs: Codecs | None = eqx.field(static=True)
    detect: bool = eqx.field(static=True)
    checks: bool = eqx.field(static=True, default=True)


class Results(NamedTuple):
    """The outputs that differ between clients, by position in the cohort.

    Attributes:
        messages: as they arrive, zero where they do not count; () where only the sum is wanted.
        squares: squared norms of the messages, by leaf; None where they are not checked.
        admitted: which messages passed the gate; None likewise.
        up: bytes of the coded messages; None without codecs.
        memory: of stateful clients, if their messages count.
        probes: numbers of the messages that are compared; None where none are.
    """

    messages: PyTree
    squares: Float[Array, "cohort leaves"] | None
    admitted: Bool[Array, " cohort"] | None
    up: Float[Array, " cohort"] | None
    memory: PyTree
    probes: Float[Array, "compared numbers"] | None


Reply = tuple[PyTree, PyTree, Float[Array, ""] | None]  # message, memory, bytes


class TracedReply(NamedTuple):
    """The reply of one client, traced once.

    Attributes:
        compute: (row) -> message, memory and bytes.
        message: an abstract message.
        cost: of a client's step.
    """

    compute: Callable[[Rows], Reply]
    message: PyTree
    cost: "Cost"


def exchange(
    clients: Clients,
    step: ClientStep,
    payload: PyTree,
    cohort: Cohort,
    key: Key[Array, ""],
    memory: PyTree,
    stack: bool,
    number: Scalar,
) -> tuple[PyTree, PyTree, ExchangeReport]:
    """Run a client step on a cohort.

        (asked / admitted) sum_{i in C, admitted} w_i step(payload, client_i)

    Args:
        clients: the clients and the rules.
        step: as a pytree, whose leaves are its numbers.
        payload: the message to each client.
        cohort: the clients asked.
        key: of the exchange.
        memory: of all clients; None if they have none.
        stack: return the messages one by one, without weights, rather than their sum.
        number: of the exchange, which decides which messages are compared in large cohorts.

    Returns:
        The sum or stack; the memory of the cohort afterwards; the report.
    """
    job, report = prepare_exchange(clients, step, payload, cohort, key, memory)
    reply = trace_reply(job)
    if clients.uses_threads(reply.cost, len(cohort.ids)):
        raise NeedsHost
    keep = stack or aggregation.needs_stack(clients.aggregators, reply.message)
    chunk = chunk_of(clients, reply.cost, len(cohort.ids))
    total, results = run_clients(job, reply, keep, chunk, clients.mesh)
    return finish_exchange(job, report, clients.aggregators, total, results, stack, number)


def prepare_exchange(
    clients: Clients,
    step: ClientStep,
    payload: PyTree,
    cohort: Cohort,
    key: Key[Array, ""],
    memory: PyTree,
) -> tuple[Job, ExchangeReport]:
    """Draw local work and drop-outs, and code the payload; see `exchange` for the arguments.

    Returns:
        The clients' part, and the report as far as it is known before they compute.
    """
    payload, places, size = jax.tree.map(jnp.asarray, payload), cohort.ids, len(cohort.ids)
    sent, down = Shapes.of(payload), None
    codecs = None if is_uncoded(step) else clients.codecs
    if codecs is not None:
        coded = code_payload(
            codecs, payload, start_of(codecs, payload, clients.start), down_key(key)
        )
        payload, down = coded.tree, coded.count_bytes()
    plan = clients.work.plan(key, places)
    shared, here = jnp.ndim(plan.tau) == 0, jnp.asarray(places)
    replied = None if clients.absence is None else ~clients.absence(key, places)
    position, data = np.arange(size, dtype=np.int32), None
    if clients.lower.is_stacked and clients.upper.is_stacked:
        complete = cohort.is_everyone(clients.n)
        if clients.mesh is not None or complete:
            data = clients.lower, clients.upper
        if clients.mesh is not None and not complete:
            data = jax.tree.map(lambda a: a[here], data)
    rows = Rows(
        position=jnp.asarray(position),
        place=here,
        id=clients.ids[here],
        repeat=position - jnp.searchsorted(here, here).astype(jnp.int32),
        weight=jnp.asarray(cohort.weights, jnp.result_type(float)),
        replies=jnp.ones(size, bool) if replied is None else replied,
        measured=None,
        plan=None if shared else jax.tree.map(jnp.asarray, plan),
        data=data,
        memory=memories.rows_of(memory, here),
    )
    limit = np.inf if step.__name__ == EVALUATION else clients.limit
    job = Job(
        step,
        payload,
        key,
        limit,
        plan if shared else None,
        (clients.lower, clients.upper),
        rows,
        codecs,
        clients.detect,
        clients.checks,
    )
    work = jnp.broadcast_to(jnp.asarray(plan.norm, float), size) if clients.detect else None
    report = ExchangeReport(
        client_step=step.__name__,
        payload=sent,
        message=Shapes.of(()),
        asked=size,
        ids=here if clients.checks else None,
        weights=rows.weight if clients.detect else None,
        work=work,
        replied=replied,
        admitted=None,
        squares=None,
        finite=None,
        down=down,
        up=None,
        probes=None,
        took_place=None,
    )
    return job, report


def trace_reply(job: Job) -> TracedReply:
    """Trace the client step of one client, with the codec."""

    def reply(row: Rows) -> Reply:
        lower, upper = job.data if row.data is None else row.data
        if row.data is None and lower.is_stacked:
            lower, upper = jax.tree.map(lambda a: a[row.place], (lower, upper))
        plan = job.plan if row.plan is None else row.plan
        assert plan is not None
        own = client_key(job.key, row.id, row.repeat)
        client = Client(ClientData(lower, upper, row.place), plan, own, row.memory)
        message, after = run_client_step(job.step, slice_for(job.payload, row.position), client)
        if job.codecs is None:
            return message, after, None
        coded = code_message(job.codecs, message, client_key(up_key(job.key), row.id, row.repeat))
        encoded_bytes = (
            coded.count_bytes()
            if row.measured is None
            else jax.lax.cond(row.measured, coded.count_bytes, lambda: jnp.full((), jnp.nan))
        )
        return clipped_again(job.step, coded.tree), after, encoded_bytes

    first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), job.rows)
    jaxpr, like = jax.make_jaxpr(reply, return_shape=True)(first)
    run, structure = jaxpr_as_fun(jaxpr), jax.tree.structure(like)

    def compute(row: Rows) -> Reply:
        return jax.tree.unflatten(structure, run(*jax.tree.leaves(row)))

    return TracedReply(compute, like[0], cost_of(jaxpr.jaxpr))


def chunk_of(clients: Clients, cost: "Cost", size: int) -> int:
    """Choose how many clients are computed side by side, so that chunks are of about one size."""
    device = jax.local_devices()[0]
    room = _WORKING_SET  # numbers that a chunk may touch
    if device.platform != "cpu":
        memory = (device.memory_stats() or {}).get("bytes_limit", 2**33)
        room = int(_DEVICE_SHARE * memory / 4)
    share = size if clients.mesh is None else -(-size // clients.mesh.size)
    numbers = max(1, cost.numbers)
    most = clients.chunk or (1 if is_large(cost) else max(1, room // numbers))
    if not clients.chunk and most > 1 and share * numbers <= _WHOLE * room:
        return share
    return -(-share // -(-share // min(share, most)))


def is_large(cost: "Cost") -> bool:
    """Whether clients are better computed one after the other than side by side."""
    return jax.default_backend() == "cpu" and cost.operations > LARGE


def run_clients(
    job: Job, reply: TracedReply, keep: bool, chunk: int, mesh: Mesh | None
) -> tuple[PyTree, Results]:
    """Run the clients on one device, or divided between those of a mesh; see `run_in_chunks`."""
    if mesh is None:
        return run_in_chunks(job, reply, keep, chunk)
    size = len(job.rows.position)
    extra = -size % mesh.size  # the data of all clients are padded already

    def padded(a: Array) -> Array:
        missing = size + extra - len(a)
        return jnp.concatenate([a, jnp.repeat(a[-1:], missing, 0)]) if missing else a

    rows = jax.tree.map(padded, job.rows)
    present = np.arange(size + extra) < size
    weight = jnp.where(present, rows.weight, 0.0)
    rows = replace(rows, replies=rows.replies & present, weight=weight)
    each, every = PartitionSpec(AXIS), PartitionSpec()
    rest = replace(job, rows=None, data=None)
    arrays, static = eqx.partition(rest, eqx.is_array)

    def part(arrays: PyTree, rows: Rows) -> tuple[PyTree, Results]:
        own = replace(eqx.combine(arrays, static), rows=rows)
        total, results = run_in_chunks(own, trace_reply(own), keep, chunk)
        return jax.lax.psum(total, AXIS), results

    total, results = jax.shard_map(
        part, mesh=mesh, in_specs=(every, each), out_specs=(every, each), check_vma=False
    )(arrays, rows)
    return total, jax.tree.map(lambda a: a[:size], results)


def run_in_chunks(
    job: Job,
    reply: TracedReply,
    keep: bool,
    chunk: int,
    part: tuple[Int[Array, " cohort"], Int[Array, ""], Int[Array, ""]] | None = None,
) -> tuple[PyTree, Results]:
    """Run clients in chunks.

    Args:
        job: the clients' part of the exchange.
        reply: computes one of them.
        keep: keep messages one by one, rather than add them up.
        chunk: clients computed side by side.
        part: (order, first, last) to run only the clients order[first:last], one by one, and leave
            zeros for the others.

    Returns:
        The weighted sum of the messages that count, () if they are kept; the results of each.
    """
    size, message = len(job.rows.position), reply.message
    probe = anomalies.probe_of(message, size) if job.detect else None

    def side_by_side(rows: Rows, weights: Float[Array, " chunk"]) -> tuple[PyTree, Results]:
        if chunk == 1:
            found = reply.compute(jax.tree.map(lambda a: a[0], rows))
            messages, after, up = jax.tree.map(lambda a: a[None], found)
        else:
            messages, after, up = jax.vmap(reply.compute)(rows)
        squares = admitted = None
        if job.checks:
            squares = jnp.where(rows.replies[:, None], jax.vmap(squared_norms)(messages), 0.0)
            admitted = jax.vmap(within, (0, None))(squares, job.limit) & rows.replies
            messages = jax.tree.map(partial(_zero_unless, admitted), messages)
        total = () if keep else jax.tree.map(partial(_weighted, weights), messages)
        probes = None if probe is None else jax.vmap(partial(anomalies.take, probe))(messages)
        return total, Results(messages if keep else (), squares, admitted, up, after, probes)

    count = -(-size // chunk)
    if count == 1 and part is None:
        return side_by_side(job.rows, job.rows.weight)

    def add(c: Int[Array, ""], carry: tuple[PyTree, Results]) -> tuple[PyTree, Results]:
        # The last chunk begins early enough to be whole; clients that it repeats weigh nothing.
        start = jnp.minimum(c * chunk, size - chunk) if part is None else part[0][c]
        rows = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, chunk), job.rows)
        weights = rows.weight
        if size % chunk:
            new = start + np.arange(chunk, dtype=np.int32) >= c * chunk
            weights = jnp.where(new, weights, 0.0)
        more, own = side_by_side(rows, weights)

        def put(into: Array, found: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(into, found, start, 0)

        total, results = carry
        return trees.add(total, more), jax.tree.map(put, results, own)

    one = jax.tree.map(lambda a: a[:chunk], job.rows)
    like, each = jax.eval_shape(side_by_side, one, one.weight)
    blank = jax.tree.map(lambda a: jnp.zeros((size, *a.shape[1:]), a.dtype), each)
    first, last = (0, count) if part is None else part[1:]
    return jax.lax.fori_loop(first, last, add, (trees.zeros_like(like), blank))


def finish_exchange(
    job: Job,
    report: ExchangeReport,
    aggregators: Point[Aggregator | None],
    total: PyTree,
    results: Results,
    stack: bool,
    number: Scalar,
) -> tuple[PyTree, PyTree, ExchangeReport]:
    """Combine the messages, and complete the report; see `exchange`."""
    admitted, probes, size = results.admitted, results.probes, report.asked
    if probes is not None:
        probes = probes[anomalies.window(size, number)]
    factor, finite = 1.0, None
    if admitted is None:
        leaves = jax.tree.leaves((total, results.messages))
        finite = jnp.isfinite(sum(trees.squared_norm(leaf).astype(float) for leaf in leaves))
    else:
        factor = size / jnp.maximum(1, jnp.sum(admitted)).astype(float)
    kept = bool(jax.tree.leaves(results.messages))
    message = jax.tree.map(lambda a: a[0], results.messages) if kept else total
    if kept and not stack:
        weights = job.rows.weight
        if admitted is not None:
            weights = jnp.where(admitted, factor * weights, 0.0)
        total = aggregation.combine(aggregators, results.messages, weights)
    else:
        total = results.messages if kept else total
        total = total if admitted is None else trees.scale(factor, total)
    report = replace(
        report,
        message=Shapes.of(message),
        admitted=admitted,
        squares=results.squares,
        finite=finite,
        up=results.up,
        probes=probes,
    )
    return total, results.memory, report


def _zero_unless(mask: Bool[Any, " k"], rows: Float[Any, "k ..."]) -> Float[Array, "k ..."]:
    return jnp.where(mask.reshape(-1, *[1] * (rows.ndim - 1)), rows, jnp.zeros_like(rows))


def _weighted(weights: Float[Array, " k"], rows: Float[Array, "k ..."]) -> Float[Array, "..."]:
    if len(rows) == 1:
        return weights[0].astype(rows.dtype) * rows[0]
    return jnp.tensordot(weights.astype(rows.dtype), rows, 1, precision="highest")


# Messages


def run_client_step(
    client_step: ClientStep, payload: PyTree, client: Client
) -> tuple[PyTree, PyTree]:
    """Run a client step; return its message and the client's memory after it, as arrays."""
    reply, memory, name = client_step(payload, client), client.memory, client_step.__name__
    if isinstance(reply, WithMemory):
        reply, memory = reply.message, jax.tree.map(jnp.asarray, reply.memory)
        if form(memory) != form(jax.tree.map(jnp.asarray, client.memory)):
            if client.memory is not None:
                raise UserError(
                    f"'{name}' returns a memory of another shape than Method.client_memory."
                )
            raise UserError(
                f"'{name}' returns a memory, but its clients have none: declare it as "
                "Method.client_memory, and start with `run` or `federation.remember`."
            )
    message = jax.tree.map(jnp.asarray, reply)
    for leaf in jax.tree.leaves(message):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"'{name}' returns {leaf.dtype} numbers: return floats, which can be weighted and "
                "added."
            )
    return message, memory


def form(tree: PyTree) -> Hashable:
    """Structure, shapes and dtypes of a tree, as a hashable value."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(
        (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else (np.shape(leaf), type(leaf))
        for leaf in leaves
    )


def slice_for(payload: PyTree, position: Scalar) -> PyTree:
    """Take the part of a payload for the client at a position of the cohort.

    Example:
        >>> from simfbo.core.ledger import PerClient
        >>> slice_for({"all": 1.0, "own": PerClient(np.array([5, 6, 7]))}, 1)
        {'all': 1.0, 'own': np.int64(6)}
    """

    def part(given: PyTree) -> PyTree:
        if not is_per_client(given):
            return given
        return jax.tree.map(lambda a: a[position], given.slices)

    return jax.tree.map(part, payload, is_leaf=is_per_client)


def zeros_for(size: int, stacked: bool, message: PyTree) -> PyTree:
    """Zeros shaped like the sum, or the stack, of `size` messages such as this."""
    first = (size,) if stacked else ()
    return jax.tree.map(lambda a: jnp.zeros(first + a.shape, a.dtype), message)


def combined(
    messages: Sequence[PyTree], weights: Float[np.ndarray, " cohort"], stacked: bool, like: PyTree
) -> PyTree:
    """Add, or stack, messages by position; None counts as zeros."""
    total = zeros_for(len(messages), stacked, like)
    for j, message in enumerate(messages):
        if message is None:
            continue
        if stacked:
            total = jax.tree.map(lambda rows, own, j=j: rows.at[j].set(own), total, message)
        else:
            total = trees.add_scaled(total, weights[j], message)
    return total


# Costs


class Cost(NamedTuple):
    """The cost of one client's step, counted in its trace; of a loop of unknown length, one turn.

    Attributes:
        operations: multiplications and additions.
        numbers: that it writes.
    """

    operations: int
    numbers: int


def cost_of(jaxpr: Jaxpr) -> Cost:
    """Count the operations of a trace and the numbers that it writes."""
    operations = numbers = 0
    for eqn in jaxpr.eqns:
        shapes = [getattr(var.aval, "shape", (0,)) for var in (*eqn.invars, *eqn.outvars)]
        written = sum(map(math.prod, shapes[len(eqn.invars) :]))
        values = [
            one
            for given in eqn.params.values()
            for one in (given if isinstance(given, tuple | list) else (given,))
        ]
        parts = [getattr(value, "jaxpr", value) for value in values]
        inner = [cost_of(part) for part in parts if hasattr(part, "eqns")]
        if inner:
            operations += eqn.params.get("length", 1) * sum(one.operations for one in inner)
            numbers += sum(one.numbers for one in inner)  # a loop writes to the same place
            continue
        times = 1  # operations for each number written
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            times = 2 * math.prod(shapes[0][axis] for axis in contracted)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = shapes[1]
            features = eqn.params["dimension_numbers"].rhs_spec[0]
            times = 2 * math.prod(kernel) // max(1, kernel[features])
        operations, numbers = operations + times * written, numbers + written
    return Cost(operations, numbers)
