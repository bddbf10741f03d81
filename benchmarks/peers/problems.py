"""The problems of this benchmark, and simfbo's runs of them through its public API."""

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent.parent
STEPS = {  # (x, y, v)
    "quadratic": (0.02, 0.1, 0.1),
    "ridge": (0.05, 0.1, 0.1),
    "mlp": (0.05, 0.2, 0.1),
    "cnn": (0.03, 0.1, 0.05),
}
FEATURES, ROWS = 12, 45

Case = dict[str, Any]
Rounds = Callable[[int], Any]  # how many rounds -> (x, y, v) after them, from the same start


class Setting(NamedTuple):
    """A problem as simfbo takes it; everyone takes part unless there is a sampler."""

    problem: Any
    data: Any
    x0: Any
    y0: Any
    sampler: Any = None


@cache
def sibling(folder: str, name: str) -> ModuleType:
    """Import a module of another benchmark; some share their names, so by its path."""
    spec = spec_from_file_location(f"{folder}_{name}", FOLDER / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # torch.compile looks there for what a function refers to
    spec.loader.exec_module(module)
    return module


def quadratic_task(case: Case) -> Any:
    """Return the quadratic with the dimensions and clients of the case."""
    from simfbo.tasks import quadratic

    dim_x, dim_y = case["dims"]
    return quadratic(clients=case["clients"], dim_x=dim_x, dim_y=dim_y)


def ridge_samples(
    clients: int, rows: int = ROWS
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return the clients' lower and upper samples: half of the features matter."""
    rng = np.random.default_rng(0)
    truth = np.where(np.arange(FEATURES) < FEATURES // 2, 1.0, 0.0)

    def part() -> tuple[np.ndarray, ...]:
        features = rng.normal(size=(clients, rows, FEATURES)).astype(np.float32)
        noise = 0.5 * rng.normal(size=(clients, rows))
        return features, (features @ truth + noise).astype(np.float32)

    return part(), part()


def images(case: Case) -> tuple[np.ndarray, np.ndarray, list]:
    """Return the random images, labels and clients' rows of benchmarks/round_speed."""
    wanted = {"model": case["problem"], "clients": case["clients"], "images": 600, "pool": 60_000}
    return sibling("round_speed", "worker").data(wanted)


def setting(case: Case) -> Setting:
    """Return the problem of the case."""
    kinds = {"quadratic": _quadratic, "ridge": _ridge, "mlp": _network, "cnn": _network}
    return kinds[case["problem"]](case)


def library(case: Case, given: Setting | None = None, records: bool = True) -> Rounds:
    """Return simfbo's rounds: one call of `run`.

    Args:
        case: its `tau` are the local steps (1 by default), its `radius` is that of v (no ball).
        given: the problem; by default that of the case.
        records: whether to leave it to `run` when records are taken; else only at the end.
    """
    import jax

    from simfbo import Point, SimulatedFederation, run
    from simfbo.algorithms import simfbo

    problem, data, x0, y0, sampler = given or setting(case)
    steps = Point(*STEPS[case["problem"]])
    algorithm = simfbo(problem, steps, radius=case.get("radius"))
    federation = SimulatedFederation(data, sampler, _local_work(case))

    def rounds(count: int) -> Any:
        options = {} if records else {"every": count}
        history = run(algorithm, federation, x0, y0, rounds=count, **options)
        assert history.end is not None
        assert history.end["status"] == "finished", history.end
        state = history.state
        return jax.block_until_ready((state.x, state.y, state.v))

    return rounds


def reference_rounds(case: Case, name: str, **options: bool) -> Rounds:
    """Return the rounds of a network in a reference of benchmarks/round_speed."""
    worker, module = sibling("round_speed", "worker"), sibling("round_speed", name)
    model, clients = case["problem"], case["clients"]
    pixels, labels, rows = images(case)
    shaped = pixels.reshape(len(pixels), -1) if model == "mlp" else pixels
    x, y, v = STEPS[model]
    step = module.make_round(
        model, shaped, labels, rows, tau=np.ones(clients, int), batch_size=worker.BATCH,
        steps=(y, v, x), **options,
    )  # fmt: skip
    weights = worker.initial(model)
    draw, rng = worker.cohorts(clients, case["cohort"]), np.random.default_rng(0)

    def rounds(count: int) -> Any:
        state = (*weights, [0 * leaf for leaf in weights[1]])
        for t in range(count):
            state = step(state, draw(t), rng)
        return state

    return rounds


def released() -> Case:
    """Return the settings of FedNest as released, from benchmarks/fednest_speed."""
    sys.path.insert(0, str(FOLDER / "fednest_speed"))  # its modules import each other
    module = sibling("fednest_speed", "run")
    return module.COMMON | module.CASES["torch-released"]


def fednest_torch() -> Rounds:
    """Return the iterations of FedNest's released algorithm in PyTorch."""
    settings = released()
    one = sibling("fednest_speed", "worker").build(settings)
    done = [0]

    def rounds(count: int) -> Any:
        state = None
        for _ in range(count):
            state = one(done[0])
            done[0] += 1
        return state

    return rounds


def fednest_library() -> Rounds:
    """Return the iterations of simfbo's `fednest` as released: one call of `run`."""
    import jax

    from simfbo import Point, SimulatedFederation, federate, run
    from simfbo.algorithms import fednest
    from simfbo.core.local_work import constant
    from simfbo.core.sampling import without_replacement
    from simfbo.tasks.models import Linear

    worker = sibling("fednest_speed", "worker")
    wanted = released()
    task, rows = _representation({"problem": "mlp", "clients": wanted["clients"]})
    data = federate(task.data.lower.samples, *zip(*rows, strict=True), batch_size=wanted["batch"])
    y, v, x = wanted["steps"]
    algorithm = fednest(
        task.problem, Point(x, y, v), 1, worker.TERMS, mode="as_released", one_upper_step=True
    )
    work = constant(wanted["local_steps"])
    federation = SimulatedFederation(data, without_replacement(wanted["cohort"]), work)
    start = [Linear(*leaves) for leaves in worker.initial()]

    def rounds(count: int) -> Any:
        state = run(algorithm, federation, *start, rounds=count).state
        return jax.block_until_ready((state.x, state.y, state.v))

    return rounds


def _local_work(case: Case) -> Any:
    """Return the local work of the case; None for the library's default, one step."""
    from simfbo.core.local_work import constant, fixed

    tau = case.get("tau")
    if tau is None:
        return None
    if tau != "random":
        return constant(tau)
    return fixed(sibling("round_speed", "worker").taus(tau, case["clients"]))


def _quadratic(case: Case) -> Setting:
    task = quadratic_task(case)
    return Setting(task.problem, task.data, task.x0, task.y0)


def _ridge(case: Case) -> Setting:
    import jax.numpy as jnp

    from simfbo import BilevelProblem, from_clients

    def validation(x: Any, y: Any, batch: Any) -> Any:
        return jnp.mean(0.5 * (batch[0] @ y - batch[1]) ** 2)

    def training(x: Any, y: Any, batch: Any) -> Any:
        return validation(x, y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y**2)

    parts = ridge_samples(case["clients"], case.get("rows", ROWS))
    lower, upper = (list(zip(*part, strict=True)) for part in parts)
    zeros = np.zeros(FEATURES)
    return Setting(BilevelProblem(validation, training), from_clients(lower, upper), zeros, zeros)


def _network(case: Case) -> Setting:
    from simfbo.core.sampling import without_replacement

    task, _ = _representation(case)
    sampler = without_replacement(case["cohort"]) if case["cohort"] < case["clients"] else None
    return Setting(task.problem, task.data, task.x0, task.y0, sampler)


def _representation(case: Case) -> tuple[Any, list]:
    """Return the task of the perceptron or the CNN, and each client's lower and upper rows."""
    from simfbo.datasets import ImageData
    from simfbo.tasks import hyper_representation
    from simfbo.tasks.models import cnn, mlp

    pixels, labels, rows = images(case)
    model = mlp(784, 200, 10) if case["problem"] == "mlp" else cnn(32, 3, 10)
    bundle = ImageData(pixels, labels, pixels[:1], labels[:1], "random")
    parts = [np.concatenate(pair) for pair in rows]
    batch = sibling("round_speed", "worker").BATCH
    return hyper_representation(bundle, parts, model=model, batch_size=batch), rows
