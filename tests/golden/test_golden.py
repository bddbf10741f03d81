"""Every method on every kind of federation gives the recorded result, on every engine path.

A case is a method of METHODS on a federation of WORLDS. All PATHS must give one result: the debug
engine (slow, so it stops after three rounds), clients in two threads ("lanes"), rounds on the host,
and compiled rounds. values.npz holds x, y and v after the last round; exact.json.gz holds what must
be equal exactly: ledger, rejected clients, columns of the records, how the run ended. replay.npz
holds both, with the random draws of the server by key, from before these were drawn in JAX, for all
methods but those with automatic steps, which are computed differently since. To record the first
two again, on purpose only, for all methods or for some:

    .venv/bin/python tests/golden/test_golden.py [METHOD ...]
"""

import gc
import gzip
import itertools
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from simfbo import (
    BilevelProblem,
    DebugFederation,
    Point,
    SimulatedFederation,
    UserError,
    aggregation,
    codecs,
    from_clients,
    local_work,
    run,
    sampling,
)
from simfbo.algorithms import (
    aggitd,
    auto_steps,
    fedavg,
    fedbio,
    fedbioacc,
    fedbioacc_local,
    fedmbo,
    fedmsa,
    fednest,
    lfednest,
    memfbo,
    mimefbo,
    shrofbo,
    simfbo,
    tuning_free,
    with_momenta,
)
from simfbo.core.gate import Gate
from simfbo.core.keys import keyed
from simfbo.core.sampling import Cohort
from simfbo.engines.base import PROGRAMS, TRACES
from simfbo.privacy import Privacy, private

ROUNDS, FEW_ROUNDS, CLIENTS, SEED = 12, 3, 6, 3
STEPS, RADIUS = Point(x=0.05, y=0.1, v=0.08), 0.5
SERVER = Point(x=optax.adam(0.02), y=optax.sgd(0.1, momentum=0.5), v=0.1)


def fit(x, y, batch):
    """Return the mean squared error of a linear model with three outputs."""
    return jnp.mean((batch[0] @ y["w"] + y["b"] - batch[1]) ** 2)


def penalised(x, y, batch):
    """Return the error plus an L2 penalty for every feature."""
    penalty = jnp.sum(jnp.exp(x)[:, None] * y["w"] ** 2) + jnp.sum(y["b"] ** 2)
    return fit(x, y, batch) + 0.05 * penalty


SHARED = BilevelProblem(upper=fit, lower=penalised)
PERSONAL = SHARED._replace(lower_level="private")
X0, Y0 = np.zeros(5), {"w": np.full((5, 3), 0.1), "b": np.zeros(3)}


def automatic(method, argument):
    """Return a method with automatic steps, passed as one of the fields of a plan."""
    if argument == "plain":
        return auto_steps(lambda plan: method(SHARED, plan.plain), SHARED, X0, ROUNDS, plain=True)
    return auto_steps(lambda plan: method(SHARED, plan.local, plan.server), SHARED, X0, ROUNDS)


def tuning_free_steps(method):
    return tuning_free(lambda plan: method(SHARED, plan.local, plan.server))


METHODS = {
    "simfbo": lambda: simfbo(SHARED, STEPS, radius=RADIUS),
    "simfbo-optax": lambda: simfbo(SHARED, STEPS, SERVER),
    "simfbo-independent": lambda: simfbo(SHARED, STEPS, independent_batches=True),
    "simfbo-personal": lambda: simfbo(PERSONAL, STEPS, radius=RADIUS),
    "simfbo-momenta": lambda: with_momenta(simfbo(SHARED, STEPS), 0.3),
    "simfbo-auto": lambda: automatic(simfbo, "server"),
    "simfbo-tuning-free": lambda: tuning_free_steps(simfbo),
    "shrofbo": lambda: shrofbo(SHARED, STEPS, radius=RADIUS),
    "shrofbo-optax": lambda: shrofbo(SHARED, STEPS, SERVER),
    "shrofbo-personal": lambda: shrofbo(PERSONAL, STEPS),
    "shrofbo-momenta": lambda: with_momenta(shrofbo(SHARED, STEPS), 0.3),
    "shrofbo-auto": lambda: automatic(shrofbo, "server"),
    "mimefbo": lambda: mimefbo(SHARED, STEPS, radius=RADIUS, theta=0.7),
    "mimefbo-storm": lambda: mimefbo(SHARED, STEPS, control="storm", theta=0.5),
    "mimefbo-memory": lambda: mimefbo(SHARED, STEPS, SERVER, control="memory"),
    "mimefbo-auto": lambda: automatic(mimefbo, "server"),
    "mimefbo-tuning-free": lambda: tuning_free_steps(mimefbo),
    "memfbo": lambda: memfbo(SHARED, STEPS, penalty=20.0),
    "memfbo-order-2": lambda: memfbo(SHARED, STEPS, SERVER, penalty=20.0, order=2),
    "fednest": lambda: fednest(SHARED, STEPS, lower_rounds=2, neumann_terms=3),
    "fednest-released": lambda: fednest(SHARED, STEPS, neumann_terms=3, mode="as_released"),
    "fednest-drawn": lambda: fednest(SHARED, STEPS, drawn=True, one_upper_step=True),
    "fednest-auto": lambda: automatic(fednest, "plain"),
    "lfednest": lambda: lfednest(SHARED, STEPS, lower_rounds=2, neumann_terms=3),
    "aggitd": lambda: aggitd(SHARED, STEPS, lower_rounds=3),
    "fedbio": lambda: fedbio(SHARED, STEPS, radius=RADIUS),
    "fedmbo": lambda: fedmbo(SHARED, STEPS, lower_rounds=2, neumann_terms=3),
    "fedmbo-released": lambda: fedmbo(SHARED, STEPS, mode="as_released"),
    "fedmsa": lambda: fedmsa(SHARED, STEPS, momentum=0.3, radius=RADIUS),
    "fedbioacc": lambda: fedbioacc(SHARED, STEPS, radius=RADIUS),
    "fedbioacc_local": lambda: fedbioacc_local(PERSONAL, STEPS),
    "fedavg": lambda: fedavg(SHARED, 0.1, optax.adam(0.05)),
    "fedavg-auto": lambda: auto_steps(
        lambda plan: fedavg(SHARED, plan.local, plan.server), SHARED, X0, ROUNDS
    ),
}

_RULES = [local_work.sgd(), local_work.momentum(0.6), local_work.proximal(0.2)]
_CODED = codecs.Codecs(
    up=Point(x=codecs.dithered(0.5), y=codecs.eden(2), v=codecs.top_k(0.5)),
    down=Point(x=codecs.relative_to_start(codecs.dithered(4)), y=codecs.bfloat16()),
)
# name: keyword arguments of the federation. "batch_size" and "scale" are the data's; "privacy" and
# "explosion" belong to the method and to the run.
WORLDS = {
    "everyone": {},
    "minibatches": {"batch_size": 3, "local_work": local_work.fixed([1, 2, 3, 1, 2, 3])},
    "sampled": {
        "batch_size": 3,
        "sampler": sampling.without_replacement(4),
        "local_work": local_work.uniform(1, 3, every_round=True, assigned=False),
    },
    "replaced": {
        "sampler": sampling.with_replacement(4),
        "absence": sampling.drop_out(0.2),
        "gate": Gate(max_norm=4.0),
        "local_work": local_work.uniform(1, 3, seed=5),
    },
    "rules": {
        "sampler": sampling.without_replacement(4),
        "local_work": local_work.uniform(1, 3, _RULES, every_round=True, rules_every_round=True),
    },
    "robust": {
        "aggregators": Point(
            x=aggregation.trimmed_mean(0.2), y=aggregation.median(), v=aggregation.clipped_mean()
        ),
        "local_work": local_work.constant(2),
    },
    "automatic gate": {
        "sampler": sampling.without_replacement(4),
        "gate": Gate(max_norm="auto", min_replies=2),
    },
    "coded": {"sampler": sampling.without_replacement(4), "codecs": _CODED},
    "private": {
        "sampler": sampling.without_replacement(4),
        "secret": True,
        "privacy": Privacy(noise=Point(0.1, 0.1, 0.1)),
    },
    "exploding": {"sampler": sampling.without_replacement(4), "scale": 5.0, "explosion": 1.0},
}
PATHS = ("debug", "lanes", "rounds", "blocks")
KINDS = ("cohorts", "local steps", "local rules")
_ELSEWHERE = ("batch_size", "scale", "secret", "privacy", "explosion")


def samples(level, client, scale):
    """Return the rows of a client, between five and nine."""
    rng = np.random.default_rng([level, client])
    rows = scale * rng.normal(size=(5 + (3 * client + level) % 5, 5))
    targets = rows @ rng.normal(size=(5, 3)) * 0.3 + 0.1 * rng.normal(size=(len(rows), 3))
    return tuple(jnp.asarray(part, float) for part in (rows, targets))


def replayed(draw, table):
    """Return the draws that a table holds by the data of their keys; without a table, the draw."""
    if table is None:
        return draw

    @keyed(size=4)
    def drawn(key, of):
        found = table[tuple(np.asarray(jax.random.key_data(key)).tolist())]
        return Cohort(found[0].astype(int), found[1]) if found.ndim == 2 else found

    return drawn


@keyed
def numpy_drop_outs(key, ids):
    """Draw who does not reply as it was drawn by NumPy; it depends on the cohort, too."""
    rng = np.random.default_rng([20, *np.asarray(jax.random.key_data(key)).tolist()])
    return rng.random(int(ids.max()) + 1)[ids] < 0.2


def federation(world, path, draws=None):
    """Create a world's federation on an engine path; its draws are those of a table, if given."""
    settings = {name: value for name, value in WORLDS[world].items() if name not in _ELSEWHERE}
    if draws is not None:
        tables = [draws.get((world, kind)) for kind in KINDS]
        work = settings.get("local_work", local_work.constant(1))
        choose = work.choose and replayed(work.choose, tables[2])
        work = replace(work, draw=replayed(work.draw, tables[1]), choose=choose)
        sampler = replayed(settings.get("sampler", sampling.everyone()), tables[0])
        settings |= {"sampler": sampler, "local_work": work}
        if "absence" in settings:
            settings["absence"] = numpy_drop_outs
    scale = WORLDS[world].get("scale", 1.0)
    data = from_clients(
        *([samples(level, client, scale) for client in range(CLIENTS)] for level in (0, 1)),
        batch_size=WORLDS[world].get("batch_size"),
        p=np.arange(1, CLIENTS + 1) / np.arange(1, CLIENTS + 1).sum(),
    )
    if path == "debug":
        clients = DebugFederation(data, **settings)
    else:
        clients = SimulatedFederation(
            data, **settings, strategy="lanes" if path == "lanes" else "batches"
        )
    if path == "rounds":  # a sampler that declares nothing is asked once per round
        sampler = clients.sampler
        clients.sampler = lambda key, p: sampler(key, p)
    clients.secret = WORLDS[world].get("secret", False)
    return clients


def outcome(method, world, path, rounds, draws=None):
    """Run a case; return its variables as one vector, and what must be equal exactly."""
    counter = itertools.count()
    urandom = os.urandom
    os.urandom = lambda size: np.random.default_rng(next(counter)).bytes(size)
    try:
        algorithm = METHODS[method]()
        if privacy := WORLDS[world].get("privacy"):
            algorithm = private(algorithm, privacy)
        clients = federation(world, path, draws)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            history = run(
                algorithm, clients, *jax.tree.map(lambda a: jnp.asarray(a, float), (X0, Y0)),
                rounds=rounds, seed=SEED, explosion=WORLDS[world].get("explosion", 1e6),
            )  # fmt: skip
    except UserError as error:
        return None, {"rejected": type(error).__name__}
    finally:
        os.urandom = urandom
    variables = [getattr(history.state, name, None) for name in ("x", "y", "v")]
    vector = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(variables)])
    ledger = clients.ledger
    exact = {
        "status": history.end["status"],
        "records": list(history.records[-1]),
        "rounds": history.records[-1]["round"],
        "ledger": {name: list(one) for name, one in ledger.by_step.items()},
        "channels": dict(ledger.by_channel),
        "rejected": [list(one.values()) for one in history.refusals],
    }
    return vector, exact


HERE = Path(__file__).parent
VALUES, EXACT, REPLAY = (HERE / name for name in ("values.npz", "exact.json.gz", "replay.npz"))


@pytest.fixture(autouse=True)
def few_programs():
    """Drop compiled programs, of which a process can hold only so many."""
    yield
    forget()


def forget():
    maps = Path("/proc/self/maps")
    if maps.is_file() and maps.read_bytes().count(b"\n") > 20_000:
        PROGRAMS.clear()
        TRACES.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def recorded():
    with np.load(VALUES) as values:
        return dict(values), json.loads(gzip.decompress(EXACT.read_bytes()))


def without_bytes(exact):
    """Leave out the bytes of coded messages, which the debug engine counts and others estimate.

    It also lists the clients that did not reply after the others.
    """
    numbers = {name: one[:3] for name, one in exact.get("ledger", {}).items()}
    records = [key for key in exact.get("records", ()) if key != "bytes_uncertainty"]
    rejected = sorted(exact.get("rejected", ()))
    return {**exact, "ledger": numbers, "channels": None, "records": records, "rejected": rejected}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_computes_what_it_computed(recorded, method, world):
    values, exact = recorded
    for path, bits in [*((path, 64) for path in PATHS), ("blocks", 32)]:
        rounds = FEW_ROUNDS if path == "debug" else ROUNDS
        sensitive = world == "exploding" and method.endswith("-auto")
        if sensitive and (path, bits) in (("lanes", 64), ("blocks", 32)):
            continue  # rounding makes a run go back one iteration earlier or later
        # Optax's Adam needs the usual promotion of dtypes.
        with jax.enable_x64(bits == 64), jax.numpy_dtype_promotion("standard"):
            vector, found = outcome(method, world, path, rounds)
        name, found = f"{method}/{world}/{bits}/{rounds}", json.loads(json.dumps(found))
        # On the host the lengths of entropy codes are measured of two clients in an exchange.
        same = dict if path == "blocks" else without_bytes
        assert same(found) == same(exact[name]), path
        if vector is not None:
            limit = {64: 1e-12, 32: 1e-5}[bits] * np.linalg.norm(values[name])
            assert np.linalg.norm(vector - values[name]) <= limit, path


@pytest.mark.slow
@pytest.mark.parametrize("world", [world for world in WORLDS if "sampler" in WORLDS[world]])
@pytest.mark.parametrize("method", [name for name in METHODS if not name.endswith("-auto")])
def test_recorded_draws_give_the_recorded_values(replay, method, world):
    """Cohorts, local work and drop-outs by NumPy, as drawn before 2026-11-20."""
    values, exact, draws = replay
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        vector, found = outcome(method, world, "blocks", ROUNDS, draws)
    name = f"{method}/{world}"
    assert without_bytes(json.loads(json.dumps(found))) == without_bytes(exact[name])
    if vector is not None:
        assert np.linalg.norm(vector - values[name]) <= 1e-12 * np.linalg.norm(values[name])


@pytest.fixture(scope="module")
def replay():
    """Return values, exact results and draws of the server, recorded while NumPy drew them."""
    with np.load(REPLAY) as stored:
        arrays = dict(stored)
    exact, draws = json.loads(arrays.pop("exact").tobytes()), {}
    for name in [name for name in arrays if name.endswith("/keys")]:
        world, kind, _ = name.split("/")
        drawn = zip(arrays.pop(name).tolist(), arrays.pop(f"{world}/{kind}/draws"), strict=True)
        draws[world, kind] = {tuple(words): values for words, values in drawn}
    return arrays, exact, draws


def record(methods):
    """Write the results of compiled rounds of some methods."""
    with np.load(VALUES) as stored:
        values = dict(stored)
    exact = json.loads(gzip.decompress(EXACT.read_bytes()))
    for method, world in itertools.product(methods, WORLDS):
        for bits, rounds in ((64, ROUNDS), (64, FEW_ROUNDS), (32, ROUNDS)):
            name = f"{method}/{world}/{bits}/{rounds}"
            with jax.enable_x64(bits == 64):
                vector, exact[name] = outcome(method, world, "blocks", rounds)
            if vector is not None:
                values[name] = vector
        forget()
        print(method, world, flush=True)
    np.savez_compressed(VALUES, **values)
    EXACT.write_bytes(gzip.compress(json.dumps(exact).encode(), mtime=0))


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
    jax.config.update("jax_disable_most_optimizations", True)
    record(sys.argv[1:] or METHODS)
