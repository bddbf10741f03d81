"""From a configuration to the objects of a run."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from simfbo import checks, codecs
from simfbo.algorithms import Plan, auto_steps, tuning_free, with_momenta
from simfbo.codecs import Codec, Codecs
from simfbo.config import codecs as settings_of_codecs
from simfbo.config.catalogue import METHODS, MethodRecord, colour_of, factory_of, settings_model
from simfbo.config.codecs import ChannelCodecs, CodecsConfig
from simfbo.config.fields import (
    LocalAndServer,
    MethodSettings,
    StepSizes,
    TwoStepSizes,
    local_rule,
)
from simfbo.config.run import LocalWorkConfig, RunConfig
from simfbo.config.safety import AggregationConfig, PrivacyConfig
from simfbo.core import local_work, sampling
from simfbo.core.data import FederatedData
from simfbo.core.gate import Gate
from simfbo.core.method import Method
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.engines import DebugFederation, SimulatedFederation
from simfbo.engines.base import Engine
from simfbo.errors import UserError
from simfbo.privacy import Privacy, private, spent
from simfbo.robust import aggregation
from simfbo.robust.aggregation import Aggregator
from simfbo.runs.files import Json
from simfbo.runs.history import History
from simfbo.runs.runner import Evaluate, OnRound, run
from simfbo.runs.trackers import Tracking
from simfbo.tasks import Task

_OPTIMISERS = {
    "sgd": optax.sgd,
    "momentum": lambda step: optax.sgd(step, momentum=0.9),
    "adam": optax.adam,
}


def build_method(config: RunConfig, task: Task) -> Method:
    """Return the algorithm of a configuration, with the step sizes it asks for."""
    problem, settings = task.problem, config.algorithm
    if config.steps == "given":
        found = build_algorithm(settings, problem, config.rounds)
        return smoothed(found, config.aggregation.momenta)
    build = WithSteps(settings, problem, config.aggregation.momenta)
    if config.steps == "tuning-free":
        return tuning_free(build)
    return auto_steps(build, problem, task.x0, config.rounds, build.plain)


class WithSteps(NamedTuple):
    """Builds a method with step sizes; equal ones share compiled programs."""

    settings: MethodSettings
    problem: BilevelProblem
    momenta: float | None

    @property
    def plain(self) -> bool:
        """Return whether the method has one set of step sizes."""
        return hasattr(self.settings, "steps")

    def __call__(self, plan: Plan) -> Method:
        """Return the method with the steps of a plan."""
        steps: Json = {"local": plan.local, "server": plan.server}
        steps = {"steps": plan.plain} if self.plain else steps
        return smoothed(_made(self.settings, self.problem, **steps), self.momenta)


def smoothed(algorithm: Method, theta: float | None) -> Method:
    """Return the algorithm with client momenta, if a configuration asks for them."""
    return algorithm if theta is None else with_momenta(algorithm, theta)


_STEPS = {"name", "steps", "local", "server", "server_optimiser", "server_schedule"}


def _made(settings: MethodSettings, problem: BilevelProblem, **steps: PyTree) -> Method:
    """Return a method with its options and the given step sizes."""
    factory, options = factory_of(METHODS.find(settings.name)), settings.model_dump(exclude=_STEPS)
    found = factory(problem, **steps, **options)
    if not isinstance(found, Method):
        kind = type(found).__name__
        raise UserError(f"'{settings.name}' returned {kind}, which is not a Method.")
    return found


def build_algorithm(settings: MethodSettings, problem: BilevelProblem, rounds: int) -> Method:
    """Return a method with the step sizes in its settings: its fields are the factory's arguments.

    Args:
        settings: the method's.
        problem: the two losses.
        rounds: iterations over which a schedule runs.
    """
    if not isinstance(settings, LocalAndServer):
        return _made(settings, problem, steps=_steps(getattr(settings, "steps")))  # noqa: B009
    local, server = getattr(settings, "local"), getattr(settings, "server")  # noqa: B009
    steps = _steps(server or local)
    if (settings.server_optimiser, settings.server_schedule) != ("sgd", "constant"):
        rule, falls = _OPTIMISERS[settings.server_optimiser], settings.server_schedule == "cosine"
        steps = Point(*(rule(_falling(step, rounds) if falls else step) for step in steps))
    return _made(settings, problem, local=_steps(local), server=steps)


def law_factories() -> dict[str, checks.Factory]:
    """Return every method of the catalogue as a factory for `simfbo.checks`, by name."""
    return {
        f"{method.name}{suffix}": _law_factory(method, options)
        for method in METHODS.usable()
        for suffix, options in method.laws.items()
    }


def law_factory(name: str) -> checks.Factory:
    """Return a method of the catalogue, or at package.module:factory, for `simfbo.checks`."""
    known = {} if ":" in name else law_factories()
    if name.lower() in known:
        return known[name.lower()]
    record = METHODS.find(name)
    settings_model(record)  # parameters that cannot be used are refused now
    return _law_factory(record, record.laws.get("", {}))


def _law_factory(record: MethodRecord, options: Json) -> checks.Factory:
    """Return (problem, local, server) -> the method; one set of step sizes is the server's."""
    rest = {key: value for key, value in options.items() if key != "v"}

    def build(problem: BilevelProblem, local: Point[float], server: Point[float]) -> Method:
        factory = factory_of(record)
        if record.private:
            problem = problem._replace(lower_level="private")
        if "local" in settings_model(record).model_fields:
            return factory(problem, local=local, server=server, **rest)
        return factory(problem, steps=server._replace(v=options.get("v", server.v)), **rest)

    return build


def _falling(step: float, rounds: int) -> optax.Schedule:
    """Return the step that falls to zero along a half cosine."""
    cosine = optax.cosine_decay_schedule(step, rounds)
    return lambda count: cosine(jnp.asarray(count, float))  # strict promotion wants a float


def build_federation(config: RunConfig, data: FederatedData) -> Engine:
    """Return the federation of a configuration."""
    work = build_local_work(config.local_work, config.seed)
    work(jax.random.key(config.seed), data.n)  # a list that does not fit is refused now
    rules, size = config.gate, config.cohort_size(data.n)
    if rules.min_replies > size:
        raise UserError(
            f"'gate.min_replies' is {rules.min_replies}, but only {size} clients are sampled: "
            "lower it."
        )
    given = data, _sampler(config.sampling.kind, size, data.n), work
    safety: Json = {
        "gate": Gate(rules.max_norm, rules.min_replies),
        "aggregators": _aggregators(config.aggregation),
        "absence": sampling.drop_out(rules.drop_out) if rules.drop_out else None,
        "codecs": build_codecs(config.codecs),
        "detect_anomalies": config.detect_anomalies,
    }
    if config.engine == "debug":
        return DebugFederation(*given, **safety)
    return SimulatedFederation(*given, **safety, strategy=config.strategy, chunk=config.chunk)


def build_codecs(config: CodecsConfig | None) -> Codecs | None:
    """Return the codecs of a configuration; None where messages travel as they are."""
    return None if config is None else Codecs(_by_channel(config.up), _by_channel(config.down))


def _by_channel(config: ChannelCodecs) -> Point[Codec | None]:
    return Point(_codec(config.x), _codec(config.y), _codec(config.v))


def _codec(text: str) -> Codec | None:
    """Return the codec that a text names."""
    spec = settings_of_codecs.parse(text)
    if spec is None:
        return None
    found = getattr(codecs, spec.name)(*spec.numbers)
    return codecs.relative_to_start(found) if spec.relative else found


class Built(NamedTuple):
    """The objects of a run."""

    config: RunConfig
    task: Task
    algorithm: Method
    federation: Engine
    evaluate: Evaluate


def build(config: RunConfig, task: Task) -> Built:
    """Return the objects of the run that a configuration describes."""
    algorithm, evaluate = build_method(config, task), task.evaluate
    federation = build_federation(config, task.data)
    if config.privacy is not None:
        algorithm = private(algorithm, _privacy(config.privacy))
        evaluate = _with_epsilon(config.privacy.delta, task, algorithm, federation)
    return Built(config, task, algorithm, federation, evaluate)


def run_built(
    built: Built,
    directory: Path | None,
    on_progress: OnRound | None = None,
    resume: bool = False,
    checkpoint_seconds: float = 5.0,
    track: Tracking | None = None,
    client_metrics: bool = False,
) -> History:
    """Run what was built; the arguments are those of `run`.

    With `client_metrics`, clients measure what the task names; not where messages are private.
    """
    config = built.config
    asked = client_metrics and config.privacy is None
    return run(
        built.algorithm,
        built.federation,
        built.task.x0,
        built.task.y0,
        rounds=config.rounds,
        seed=config.seed,
        evaluate=built.evaluate,
        client_metrics=built.task.client_metrics if asked else None,
        every=config.evaluation_interval,
        directory=directory,
        config=config.model_dump(mode="json"),
        about=about(built),
        on_progress=on_progress,
        track=track,
        resume=resume,
        checkpoint_seconds=checkpoint_seconds,
        explosion=config.gate.explosion,
    )


def about(built: Built) -> Json:
    """Return what a history's header says for whoever shows it."""
    return {**built.task.about, "colour": colour_of(built.config.algorithm.name)}


def _with_epsilon(delta: float, task: Task, algorithm: Method, federation: Engine) -> Evaluate:
    """Return the task's metrics and the epsilon of all exchanges so far."""

    def evaluate(state: PyTree) -> dict[str, float]:
        exchanges = federation.ledger.total.rounds
        return {**task.evaluate(state), "epsilon": spent(algorithm, federation, exchanges, delta)}

    return evaluate


def _privacy(config: PrivacyConfig) -> Privacy:
    clip, noise = config.clip.model_dump(), config.noise.model_dump()
    return Privacy(Point(**clip), Point(**noise), config.where)


def _aggregators(config: AggregationConfig) -> Point[Aggregator | None]:
    """Return the aggregator of each channel."""
    rules = {
        "mean": aggregation.mean,
        "median": aggregation.median,
        "trimmed-mean": lambda: aggregation.trimmed_mean(config.trim),
        "clipped-mean": lambda: aggregation.clipped_mean(config.clip),
        "geometric-median": lambda: aggregation.geometric_median(config.iterations),
        "centred-clipping": lambda: aggregation.centred_clipping(config.radius, config.iterations),
    }
    return Point(rules[config.x](), rules[config.y](), rules[config.v]())


def _steps(config: StepSizes | TwoStepSizes) -> Point[float]:
    return Point(config.x, config.y, getattr(config, "v", config.y))


def _sampler(kind: str, size: int, n: int) -> sampling.Sampler:
    """Return the sampler; a cohort larger than the federation is refused before the run."""
    if kind == "everyone":
        return sampling.everyone()
    if kind == "with-replacement":
        return sampling.with_replacement(size)
    if size > n:
        raise UserError(f"A cohort of {size} cannot be drawn from {n} clients: lower it.")
    return sampling.without_replacement(size)


def build_local_work(config: LocalWorkConfig, seed: int = 0) -> local_work.LocalWork:
    """Return the local work of a configuration."""
    given = [_local_rule(*local_rule(text)) for text in config.rules]
    numbers = [] if config.optimiser == "sgd" else [config.strength]
    given = given or [_local_rule(config.optimiser, numbers)]
    rules, again = given[0] if len(given) == 1 else given, config.rules_every_round
    if config.low is not None and config.high is not None:
        every = config.every_round
        return local_work.uniform(config.low, config.high, rules, every_round=every, seed=seed,
                                  rules_every_round=again)  # fmt: skip
    if isinstance(config.tau, list):
        return local_work.fixed(config.tau, rules, rules_every_round=again)
    return local_work.constant(config.tau, rules, rules_every_round=again)


def _local_rule(name: str, numbers: list[float]) -> local_work.LocalRule:
    """Return the local rule of a name."""
    if name == "coefficients":
        return local_work.coefficients(numbers)
    rules = {"sgd": local_work.sgd, "momentum": local_work.momentum,
             "proximal": local_work.proximal}  # fmt: skip
    return rules[name](*numbers)
