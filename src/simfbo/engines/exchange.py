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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
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
        sampler: which of them take part.
        work: their local work.
        absence: which of them fail to reply; None for nobody.
        limit: the largest norm that passes the gate; None lets everything pass.
        start: x0 and y0, for codecs that are relative to them; else None.
        aggregators: how messages are combined, by channel.
        codecs: how messages are coded; None for not at all.
        detect: whether messages are compared.
        checks: whether every reply is checked; otherwise all are added up, and the report says
            whether all were finite.
        chunk: clients in a chunk; None for as many as the memory is good for.
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
    limit: Any
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
        """Return the number of clients."""
        return self.p.shape[0]

    def limit_of(self, step: ClientStep) -> Any:
        """Return the largest norm of the messages of a step; those of an evaluation are finite."""
        return np.inf if step.__name__ == EVALUATION else self.limit

    def uses_threads(self, cost: "Cost", size: int) -> bool:
        """Return whether a cohort is computed in two threads rather than in one program."""
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
        repeat: which of the client's draws this is.
        weight: of its message.
        replies: whether it replies.
        measured: whether the bytes of its coded message are computed; None for always.
        plan: its local work; None where all clients have the same.
        data: its samples; None where they are found by place.
        memory: what it remembers.
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
    """The clients' part of an exchange: what each of them receives and does.

    Attributes:
        step: the client step.
        payload: what it receives, after decoding.
        key: of the exchange.
        limit: the gate's.
        plan: the local work that all clients share; None where it differs.
        data: all clients' lower and upper samples.
        rows: what differs between clients.
        codecs: how messages are coded; None for not at all.
        detect: whether numbers of the messages are kept for comparison.
        checks: see `Clients`.
    """

    step: ClientStep
    payload: PyTree
    key: Key[Array, ""]
    limit: Any
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
        memory: what the clients remember if their messages count.
        probes: what is compared of the messages; None where nothing is.
    """

    messages: PyTree
    squares: Float[Array, "cohort leaves"] | None
    admitted: Bool[Array, " cohort"] | None
    up: Float[Array, " cohort"] | None
    memory: PyTree
    probes: Float[Any, "compared numbers"] | None


class TracedReply(NamedTuple):
    """How to compute the reply of one client, traced once.

    Attributes:
        one: (row) -> message, memory and bytes.
        message: abstract.
        cost: of a client's step.
    """

    one: Callable[[Rows], tuple[PyTree, PyTree, Any]]
    message: PyTree
    cost: "Cost"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class PreparedExchange:
    """An exchange before clients compute.

    Attributes:
        job: what clients do.
        down: bytes of the coded payload; None without codecs.
        work: ||a_i||_1, where messages are compared; else None.
        payload: shapes of what each client receives.
        aggregators: how messages are combined, by channel.
        all_reply: whether no client can drop out.
    """

    job: Job
    down: Any
    work: Any
    payload: Shapes = eqx.field(static=True)
    aggregators: Point[Aggregator | None] = eqx.field(static=True)
    all_reply: bool = eqx.field(static=True)


def exchange(
    clients: Clients,
    step: ClientStep,
    payload: PyTree,
    cohort: Cohort,
    key: Key[Array, ""],
    memory: PyTree,
    stack: bool,
    number: Any,
) -> tuple[PyTree, PyTree, ExchangeReport]:
    """Run a client step on a cohort.

        (asked / admitted) sum_{i in C, admitted} w_i step(payload, client_i)

    Args:
        clients: the clients and the rules.
        step: as a pytree, whose leaves are its numbers.
        payload: what each client receives.
        cohort: the clients asked.
        key: of the exchange.
        memory: of all clients; None if they have none.
        stack: return the messages one by one, without weights, rather than their sum.
        number: of the exchange, which decides which messages are compared in large cohorts.

    Returns:
        The sum or stack; the memory of the cohort afterwards; the report.
    """
    now = prepare_exchange(clients, step, payload, cohort, key, memory)
    replies = trace_reply(now.job)
    if clients.uses_threads(replies.cost, len(cohort.ids)):
        raise NeedsHost
    keep = stack or aggregation.needs_stack(clients.aggregators, replies.message)
    chunk = chunk_of(clients, replies.cost, len(cohort.ids))
    total, results = run_clients(now.job, replies, keep, chunk, clients.mesh)
    return finish_exchange(now, cohort.ids, total, results, stack, number)


def prepare_exchange(
    clients: Clients,
    step: ClientStep,
    payload: PyTree,
    cohort: Cohort,
    key: Key[Array, ""],
    memory: PyTree,
) -> PreparedExchange:
    """Draw local work and drop-outs, and code the payload; see `exchange` for the arguments."""
    payload, places, size = jax.tree.map(jnp.asarray, payload), cohort.ids, len(cohort.ids)
    sent, down = Shapes.of(payload), None
    codecs = None if is_uncoded(step) else clients.codecs
    if codecs is not None:
        coded = code_payload(codecs, payload, start_of(codecs, payload, clients.start),
                             down_key(key))  # fmt: skip
        payload, down = coded.tree, coded.count_bytes()
    plan = clients.work.plan(key, places)
    shared, here = jnp.ndim(plan.tau) == 0, jnp.asarray(places)
    replies = jnp.ones(size, bool)
    if clients.absence is not None:
        replies = ~clients.absence(key, places)
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
        replies=replies,
        measured=None,
        plan=None if shared else jax.tree.map(jnp.asarray, plan),
        data=data,
        memory=memories.rows_of(memory, here),
    )
    job = Job(
        step, payload, key, clients.limit_of(step), plan if shared else None,
        (clients.lower, clients.upper), rows, codecs, clients.detect, clients.checks,
    )  # fmt: skip
    work = jnp.broadcast_to(jnp.asarray(plan.norm, float), size) if clients.detect else None
    return PreparedExchange(job, down, work, sent, clients.aggregators, clients.absence is None)


def trace_reply(job: Job) -> TracedReply:
    """Trace the client step of one client, with the codec."""

    def reply(row: Rows) -> tuple[PyTree, PyTree, Any]:
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
        encoded_bytes = coded.count_bytes() if row.measured is None else jax.lax.cond(
            row.measured, coded.count_bytes, lambda: jnp.full((), jnp.nan)
        )  # fmt: skip
        return clipped_again(job.step, coded.tree), after, encoded_bytes

    first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), job.rows)
    jaxpr, like = jax.make_jaxpr(reply, return_shape=True)(first)
    run, structure = jaxpr_as_fun(jaxpr), jax.tree.structure(like)

    def one(row: Rows) -> tuple[PyTree, PyTree, Any]:
        return jax.tree.unflatten(structure, run(*jax.tree.leaves(row)))

    return TracedReply(one, like[0], cost_of(jaxpr.jaxpr))


def chunk_of(clients: Clients, cost: "Cost", size: int) -> int:
    """Return how many clients are computed side by side, so that chunks are of about one size."""
    share = size if clients.mesh is None else -(-size // clients.mesh.size)
    room, numbers = _room(), max(1, cost.numbers)
    most = clients.chunk or (1 if is_large(cost) else max(1, room // numbers))
    if not clients.chunk and most > 1 and share * numbers <= _WHOLE * room:
        return share
    return -(-share // -(-share // min(share, most)))


def is_large(cost: "Cost") -> bool:
    """Return whether clients are better computed one after the other than side by side."""
    return jax.default_backend() == "cpu" and cost.operations > LARGE


def _room() -> int:
    """Return how many numbers a chunk may touch: the cache of a CPU, or a device's memory."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _WORKING_SET
    limit = (device.memory_stats() or {}).get("bytes_limit", 2**33)
    return int(_DEVICE_SHARE * limit / 4)


def run_clients(
    job: Job, replies: TracedReply, keep: bool, chunk: int, mesh: Mesh | None = None
) -> tuple[PyTree, Results]:
    """Run the clients.

    Args:
        job: what they do.
        replies: how to compute one reply.
        keep: keep messages one by one, rather than add them up.
        chunk: clients computed side by side.
        mesh: the devices that share the clients; None for one device.

    Returns:
        The weighted sum of the messages that count, () if they are kept; the results of each.
    """
    if mesh is None:
        return run_in_chunks(job, replies, keep, chunk)
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

    def part(arrays: Any, rows: Rows) -> tuple[PyTree, Results]:
        own = replace(eqx.combine(arrays, static), rows=rows)
        total, results = run_in_chunks(own, trace_reply(own), keep, chunk)
        return jax.lax.psum(total, AXIS), results

    total, results = jax.shard_map(
        part, mesh=mesh, in_specs=(every, each), out_specs=(every, each), check_vma=False
    )(arrays, rows)
    return total, jax.tree.map(lambda a: a[:size], results)


def run_in_chunks(
    job: Job,
    replies: TracedReply,
    keep: bool,
    chunk: int,
    part: tuple[Any, Any, Any] | None = None,
) -> tuple[PyTree, Results]:
    """Run clients in chunks.

    Args:
        job: what they do.
        replies: how to compute one reply.
        keep: keep messages one by one, rather than add them up.
        chunk: clients computed side by side.
        part: (order, first, last) to run only the clients order[first:last], one by one, and leave
            zeros for the others.

    Returns:
        The weighted sum of the messages that count, () if they are kept; the results of each.
    """
    size, message = len(job.rows.position), replies.message
    probe = anomalies.probe_of(message, size) if job.detect else None

    def side_by_side(rows: Rows, weights: Float[Array, " chunk"]) -> tuple[PyTree, Results]:
        if chunk == 1:
            found = replies.one(jax.tree.map(lambda a: a[0], rows))
            messages, after, up = jax.tree.map(lambda a: a[None], found)
        else:
            messages, after, up = jax.vmap(replies.one)(rows)
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

    def add(c: Any, carry: tuple[PyTree, Results]) -> tuple[PyTree, Results]:
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
    now: PreparedExchange,
    ids: Int[Any, " cohort"],
    total: PyTree,
    results: Results,
    stack: bool,
    number: Any,
) -> tuple[PyTree, PyTree, ExchangeReport]:
    """Combine the messages, and report; see `exchange`."""
    job, admitted, probes = now.job, results.admitted, results.probes
    if probes is not None:
        probes = probes[anomalies.window(len(ids), number)]
    factor, finite = 1.0, None
    if admitted is None:
        finite = jnp.isfinite(trees.squared_norm((total, results.messages)))
    else:
        factor = len(ids) / jnp.maximum(1, jnp.sum(admitted)).astype(float)
    kept = bool(jax.tree.leaves(results.messages))
    message = jax.tree.map(lambda a: a[0], results.messages) if kept else total
    if kept and not stack:
        weights = job.rows.weight
        if admitted is not None:
            weights = jnp.where(admitted, factor * weights, 0.0)
        total = aggregation.combine(now.aggregators, results.messages, weights)
    else:
        total = results.messages if kept else total
        total = total if admitted is None else trees.scale(factor, total)
    report = ExchangeReport(
        client_step=job.step.__name__,
        payload=now.payload,
        message=Shapes.of(message),
        asked=len(ids),
        ids=ids if job.checks else None,
        weights=job.rows.weight if job.detect else None,
        work=now.work,
        replied=None if now.all_reply else job.rows.replies,
        admitted=admitted,
        squares=results.squares,
        finite=finite,
        down=now.down,
        up=results.up,
        probes=probes,
        took_place=None,
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
    """Run a client step; return its message and the client's memory after it."""
    reply = client_step(payload, client)
    if not isinstance(reply, WithMemory):
        return as_message(client_step, reply), client.memory
    return as_message(client_step, reply.message), _as_memory(client_step, reply.memory, client)


def _as_memory(client_step: ClientStep, found: PyTree, client: Client) -> PyTree:
    """Return a new memory as arrays, after a check that it is shaped as the old one."""
    new, old = jax.tree.map(jnp.asarray, found), jax.tree.map(jnp.asarray, client.memory)
    if form(new) == form(old):
        return new
    step = client_step.__name__
    if client.memory is None:
        raise UserError(
            f"'{step}' returns a memory, but its clients have none: declare it as "
            "Method.client_memory, and start with `run` or `federation.remember`."
        )
    raise UserError(f"'{step}' returns a memory of another shape than Method.client_memory.")


def as_message(client_step: ClientStep, reply: PyTree) -> PyTree:
    """Return a client's message as arrays, after a check that it can be weighted and added."""
    message = jax.tree.map(jnp.asarray, reply)
    for leaf in jax.tree.leaves(message):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"'{client_step.__name__}' returns {leaf.dtype} numbers: return floats, which can "
                "be weighted and added."
            )
    return message


def form(tree: PyTree) -> PyTree:
    """Return structure, shapes and dtypes of a tree, as a hashable value."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(
        (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else (np.shape(leaf), type(leaf))
        for leaf in leaves
    )


def slice_for(payload: PyTree, position: Scalar) -> PyTree:
    """Return what the client at a position of the cohort receives.

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
    """Return zeros shaped like the sum, or the stack, of `size` messages such as this."""
    first = (size,) if stacked else ()
    return jax.tree.map(lambda a: jnp.zeros(first + a.shape, a.dtype), message)


def combined(messages: Sequence[Any], weights: np.ndarray, stacked: bool, like: PyTree) -> PyTree:
    """Return the weighted sum, or the stack, of the messages there are; None is left out."""
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

    operations: int = 0
    numbers: int = 0

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        """Add another cost, some number of times; space is used again."""
        return Cost(self.operations + times * other.operations, self.numbers + other.numbers)


def cost_of(jaxpr: Any) -> Cost:
    """Count the operations of a trace and the numbers that it writes."""
    total = Cost()
    for eqn in jaxpr.eqns:
        written = sum(
            math.prod(var.aval.shape) for var in eqn.outvars if hasattr(var.aval, "shape")
        )
        inner = [cost_of(part) for part in _inside(eqn.params)]
        if not inner:
            total = total.plus(Cost(_operations(eqn, written), written))
        for part in inner:
            total = total.plus(part, eqn.params.get("length", 1))
    return total


def _operations(eqn: Any, written: int) -> int:
    """Return the operations of one primitive."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * written * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * written * math.prod(kernel) // max(1, kernel[features])
    return written


def _inside(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the traces that a primitive holds."""
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            closed = getattr(part, "jaxpr", part)
            if hasattr(closed, "eqns"):
                yield closed
