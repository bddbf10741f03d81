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
    """Build the algorithm of a configuration, with its step sizes."""
    problem, settings = task.problem, config.algorithm
    if config.steps == "given":
        algorithm = build_algorithm(settings, problem, config.rounds)
        return smoothed(algorithm, config.aggregation.momenta)
    build = WithSteps(settings, problem, config.aggregation.momenta)
    if config.steps == "tuning-free":
        return tuning_free(build)
    return auto_steps(build, problem, task.x0, config.rounds, build.plain)


class WithSteps(NamedTuple):
    """Builds a method from step sizes; equal instances share compiled programs."""

    settings: MethodSettings
    problem: BilevelProblem
    momenta: float | None

    @property
    def plain(self) -> bool:
        """Whether the method has a single set of step sizes."""
        return hasattr(self.settings, "steps")

    def __call__(self, plan: Plan) -> Method:
        """Build the method with the steps of a plan."""
        steps: Json = {"local": plan.local, "server": plan.server}
        steps = {"steps": plan.plain} if self.plain else steps
        return smoothed(_made(self.settings, self.problem, **steps), self.momenta)


def smoothed(algorithm: Method, theta: float | None) -> Method:
    """Add client momenta to an algorithm if configured."""
    return algorithm if theta is None else with_momenta(algorithm, theta)


_STEPS = {"name", "steps", "local", "server", "server_optimiser", "server_schedule"}


def _made(settings: MethodSettings, problem: BilevelProblem, **steps: PyTree) -> Method:
    """Build a method from its settings and the given step sizes."""
    factory, options = factory_of(METHODS.find(settings.name)), settings.model_dump(exclude=_STEPS)
    method = factory(problem, **steps, **options)
    if not isinstance(method, Method):
        kind = type(method).__name__
        raise UserError(f"'{settings.name}' returned {kind}, which is not a Method.")
    return method


def build_algorithm(settings: MethodSettings, problem: BilevelProblem, rounds: int) -> Method:
    """Build a method with the step sizes in its settings.

    The fields of the settings are the factory's arguments.

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
        rule, decays = _OPTIMISERS[settings.server_optimiser], settings.server_schedule == "cosine"
        steps = Point(*(rule(_cosine(step, rounds) if decays else step) for step in steps))
    return _made(settings, problem, local=_steps(local), server=steps)


def law_factories() -> dict[str, checks.Factory]:
    """Return all methods of the catalogue as factories for `simfbo.checks`, by name."""
    return {
        f"{method.name}{suffix}": _law_factory(method, options)
        for method in METHODS.usable()
        for suffix, options in method.laws.items()
    }


def law_factory(name: str) -> checks.Factory:
    """Return a method of the catalogue, or at package.module:factory, for `simfbo.checks`."""
    factories = {} if ":" in name else law_factories()
    if name.lower() in factories:
        return factories[name.lower()]
    record = METHODS.find(name)
    settings_model(record)  # rejects unusable parameters early
    return _law_factory(record, record.laws.get("", {}))


def _law_factory(record: MethodRecord, options: Json) -> checks.Factory:
    """Return (problem, local, server) -> the method; a single set of step sizes is the server's."""
    keywords = {key: value for key, value in options.items() if key != "v"}

    def build(problem: BilevelProblem, local: Point[float], server: Point[float]) -> Method:
        factory = factory_of(record)
        if record.private:
            problem = problem._replace(lower_level="private")
        if "local" in settings_model(record).model_fields:
            return factory(problem, local=local, server=server, **keywords)
        return factory(problem, steps=server._replace(v=options.get("v", server.v)), **keywords)

    return build


def _cosine(step: float, rounds: int) -> optax.Schedule:
    """Return a cosine schedule that decays to zero."""
    cosine = optax.cosine_decay_schedule(step, rounds)
    return lambda count: cosine(jnp.asarray(count, float))  # strict promotion wants a float


def build_federation(config: RunConfig, data: FederatedData) -> Engine:
    """Build the federation of a configuration."""
    work = build_local_work(config.local_work, config.seed)
    work(jax.random.key(config.seed), data.n)  # rejects a list of the wrong length early
    rules, size = config.gate, config.cohort_size(data.n)
    if rules.min_replies > size:
        raise UserError(
            f"'gate.min_replies' is {rules.min_replies}, but only {size} clients are sampled: "
            "lower it."
        )
    arguments = data, _sampler(config.sampling.kind, size, data.n), work
    safety: Json = {
        "gate": Gate(rules.max_norm, rules.min_replies),
        "aggregators": _aggregators(config.aggregation),
        "absence": sampling.drop_out(rules.drop_out) if rules.drop_out else None,
        "codecs": build_codecs(config.codecs),
        "detect_anomalies": config.detect_anomalies,
    }
    if config.engine == "debug":
        return DebugFederation(*arguments, **safety)
    return SimulatedFederation(*arguments, **safety, strategy=config.strategy, chunk=config.chunk)


def build_codecs(config: CodecsConfig | None) -> Codecs | None:
    """Build the codecs of a configuration; None if messages are not compressed."""
    return None if config is None else Codecs(_by_channel(config.up), _by_channel(config.down))


def _by_channel(config: ChannelCodecs) -> Point[Codec | None]:
    return Point(_codec(config.x), _codec(config.y), _codec(config.v))


def _codec(text: str) -> Codec | None:
    """Parse the text of a codec and build it."""
    spec = settings_of_codecs.parse(text)
    if spec is None:
        return None
    codec = getattr(codecs, spec.name)(*spec.numbers)
    return codecs.relative_to_start(codec) if spec.relative else codec


class Built(NamedTuple):
    """The objects of a run."""

    config: RunConfig
    task: Task
    algorithm: Method
    federation: Engine
    evaluate: Evaluate


def build(config: RunConfig, task: Task) -> Built:
    """Build the objects of a run from its configuration."""
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
    """Run the objects from `build`; the arguments are those of `run`.

    With `client_metrics`, clients measure the task's client metrics, unless messages are private.
    """
    config = built.config
    measure_clients = client_metrics and config.privacy is None
    return run(
        built.algorithm,
        built.federation,
        built.task.x0,
        built.task.y0,
        rounds=config.rounds,
        seed=config.seed,
        evaluate=built.evaluate,
        client_metrics=built.task.client_metrics if measure_clients else None,
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
    """Return the presentation entries of a history's header."""
    return {**built.task.about, "colour": colour_of(built.config.algorithm.name)}


def _with_epsilon(delta: float, task: Task, algorithm: Method, federation: Engine) -> Evaluate:
    """Add the epsilon of all exchanges so far to the task's metrics."""

    def evaluate(state: PyTree) -> dict[str, float]:
        exchanges = federation.ledger.total.rounds
        return {**task.evaluate(state), "epsilon": spent(algorithm, federation, exchanges, delta)}

    return evaluate


def _privacy(config: PrivacyConfig) -> Privacy:
    clip, noise = config.clip.model_dump(), config.noise.model_dump()
    return Privacy(Point(**clip), Point(**noise), config.where)


def _aggregators(config: AggregationConfig) -> Point[Aggregator | None]:
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
    """Build the sampler; reject a cohort larger than the federation."""
    if kind == "everyone":
        return sampling.everyone()
    if kind == "with-replacement":
        return sampling.with_replacement(size)
    if size > n:
        raise UserError(f"A cohort of {size} cannot be drawn from {n} clients: lower it.")
    return sampling.without_replacement(size)


def build_local_work(config: LocalWorkConfig, seed: int = 0) -> local_work.LocalWork:
    """Build the local work of a configuration."""
    numbers = [] if config.optimiser == "sgd" else [config.strength]
    rules = [_local_rule(*local_rule(text)) for text in config.rules]
    rules = rules or [_local_rule(config.optimiser, numbers)]
    clients_rules = rules[0] if len(rules) == 1 else rules
    redraw = config.rules_every_round
    if config.low is not None and config.high is not None:
        every = config.every_round
        return local_work.uniform(
            config.low,
            config.high,
            clients_rules,
            every_round=every,
            seed=seed,
            rules_every_round=redraw,
        )
    if isinstance(config.tau, list):
        return local_work.fixed(config.tau, clients_rules, rules_every_round=redraw)
    return local_work.constant(config.tau, clients_rules, rules_every_round=redraw)


def _local_rule(name: str, numbers: list[float]) -> local_work.LocalRule:
    if name == "coefficients":
        return local_work.coefficients(numbers)
    rules = {
        "sgd": local_work.sgd,
        "momentum": local_work.momentum,
        "proximal": local_work.proximal,
    }
    return rules[name](*numbers)
