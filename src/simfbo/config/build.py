"""From a configuration to the objects of a run."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from simfbo import algorithms
from simfbo.algorithms import Server, Steps
from simfbo.algorithms._auto_steps import Plan, automatic
from simfbo.config.algorithms import (
    AlgorithmConfig,
    MemFBOConfig,
    PairConfig,
    SimFBOConfig,
    StepsConfig,
)
from simfbo.config.run import LocalWorkConfig, RunConfig
from simfbo.config.safety import AggregationConfig, PrivacyConfig
from simfbo.core import aggregation, local_work, sampling
from simfbo.core.aggregation import Aggregators
from simfbo.core.data import FederatedData
from simfbo.core.federation import Algorithm, Engine
from simfbo.core.gate import Gate
from simfbo.core.privacy import Channels, Privacy, epsilon, private
from simfbo.core.problem import BilevelProblem
from simfbo.engines import DebugFederation, SimulatedFederation
from simfbo.errors import UserError
from simfbo.runs.history import History
from simfbo.runs.runner import Evaluate, OnRound, run
from simfbo.tasks import Task

_OPTIMISERS = {
    "sgd": optax.sgd,
    "momentum": lambda step: optax.sgd(step, momentum=0.9),
    "adam": optax.adam,
}


def build_method(config: RunConfig, task: Task) -> Algorithm:
    """Return the algorithm of a configuration, with the steps it asks for."""
    problem, settings = task.problem, config.algorithm
    if config.steps == "given":
        return build_algorithm(settings, problem, config.rounds)
    plain = not isinstance(settings, SimFBOConfig | MemFBOConfig)
    factory, options = getattr(algorithms, settings.name), settings.model_dump(exclude=_STEPS)

    def build(plan: Plan) -> Algorithm:
        steps = (plan.plain,) if plain else (plan.local, plan.server)
        return factory(problem, *steps, **options)

    return automatic(build, problem, task.x0, config.rounds, plain)


_STEPS = {"name", "steps", "local", "server", "server_optimiser", "server_schedule"}


def build_algorithm(config: AlgorithmConfig, problem: BilevelProblem, rounds: int) -> Algorithm:
    """Return a method with the step sizes in its settings: its fields are the factory's arguments.

    Args:
        config: the method's settings.
        problem: the two losses.
        rounds: iterations over which a schedule runs.
    """
    factory, options = getattr(algorithms, config.name), config.model_dump(exclude=_STEPS)
    if not isinstance(config, SimFBOConfig | MemFBOConfig):
        return factory(problem, _steps(config.steps), **options)
    rule = _OPTIMISERS[config.server_optimiser]
    falls = config.server_schedule == "cosine"
    steps = _steps(config.server or config.local)
    server = Server(*(rule(_falling(step, rounds) if falls else step) for step in steps))
    return factory(problem, _steps(config.local), server, **options)


def _falling(step: float, rounds: int) -> optax.Schedule:
    """Return the step that falls to zero along a half cosine."""
    cosine = optax.cosine_decay_schedule(step, rounds)
    return lambda count: cosine(jnp.asarray(count, float))  # strict promotion wants a float


def build_federation(config: RunConfig, data: FederatedData) -> Engine:
    """Return the federation of a configuration."""
    engine = SimulatedFederation if config.engine == "simulated" else DebugFederation
    work = _local_work(config.local_work, config.seed)
    work(jax.random.key(config.seed), data.n)  # a list that does not fit is refused now
    rules, size = config.gate, config.cohort_size(data.n)
    if rules.min_replies > size:
        raise UserError(f"'gate.min_replies' is {rules.min_replies}, but only {size} are asked.")
    return engine(
        data,
        _sampler(config.sampling.kind, size, data.n),
        work,
        gate=Gate(rules.max_norm, rules.min_replies),
        aggregators=_aggregators(config.aggregation),
        absence=sampling.drop_out(rules.drop_out) if rules.drop_out else None,
    )


def run_config(
    config: RunConfig,
    task: Task,
    directory: Path | None,
    on_round: OnRound | None = None,
    resume: bool = False,
    checkpoint_seconds: float = 5.0,
) -> History:
    """Return the history of the run that a configuration describes."""
    algorithm = build_method(config, task)
    federation = build_federation(config, task.data)
    evaluate = task.evaluate
    if config.privacy is not None:
        algorithm = private(algorithm, _privacy(config.privacy))
        evaluate = _with_epsilon(config, task, federation)
    return run(
        algorithm,
        federation,
        task.x0,
        task.y0,
        rounds=config.rounds,
        seed=config.seed,
        evaluate=evaluate,
        every=config.every or max(1, config.rounds // 20),
        directory=directory,
        config=config.model_dump(mode="json"),
        on_round=on_round,
        resume=resume,
        checkpoint_seconds=checkpoint_seconds,
        explosion=config.gate.explosion,
    )


def _with_epsilon(config: RunConfig, task: Task, federation: Engine) -> Evaluate:
    """Return the task's metrics, with the epsilon of all exchanges until then beside them."""
    assert config.privacy is not None
    noise, delta = _privacy(config.privacy).noise, config.privacy.delta
    n, size = federation.n, config.cohort_size(federation.n)

    def evaluate(state: Any) -> dict[str, float]:
        spent = epsilon(federation.ledger.total.rounds, n, size, noise, delta)
        return {**task.evaluate(state), "epsilon": spent}

    return evaluate


def _privacy(config: PrivacyConfig) -> Privacy:
    clip, noise = config.clip.model_dump(), config.noise.model_dump()
    return Privacy(Channels(**clip), Channels(**noise), config.where)


def _aggregators(config: AggregationConfig) -> Aggregators:
    """Return the aggregator of each channel."""
    rules = {
        "mean": aggregation.mean,
        "median": aggregation.median,
        "trimmed-mean": lambda: aggregation.trimmed_mean(config.trim),
        "clipped-mean": lambda: aggregation.clipped_mean(config.clip),
    }
    return Aggregators(rules[config.x](), rules[config.y](), rules[config.v]())


def _steps(config: StepsConfig | PairConfig) -> Steps:
    return Steps(y=config.y, v=getattr(config, "v", config.y), x=config.x)


def _sampler(kind: str, size: int, n: int) -> sampling.Sampler:
    """Return the sampler; a cohort larger than the federation is refused now, not mid-run."""
    if kind == "everyone":
        return sampling.everyone()
    if kind == "with-replacement":
        return sampling.with_replacement(size)
    if size > n:
        raise UserError(f"A cohort of {size} cannot be drawn from {n} clients: lower it.")
    return sampling.without_replacement(size)


def _local_work(config: LocalWorkConfig, seed: int) -> local_work.LocalWork:
    """Return the plan of local steps."""
    rules = {
        "sgd": lambda strength: local_work.sgd(),
        "proximal": local_work.proximal,
        "momentum": local_work.momentum,
    }
    rule = rules[config.optimiser](config.strength)
    if config.low is not None and config.high is not None:
        every = config.every_round
        return local_work.uniform(config.low, config.high, rule, every_round=every, seed=seed)
    if isinstance(config.tau, list):
        return local_work.fixed(config.tau, rule)
    return local_work.constant(config.tau, rule)
