"""simfbo: federated bilevel optimisation, simulated fast and written once."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simfbo.algorithms import (
        Server,
        Steps,
        aggitd,
        fedavg,
        fedbio,
        fedmbo,
        fednest,
        lfednest,
        memfbo,
        shrofbo,
        simfbo,
    )
    from simfbo.core.aggregation import Aggregators, clipped_mean, median, trimmed_mean
    from simfbo.core.data import FederatedData, federate, from_clients
    from simfbo.core.federation import Algorithm, Client, Federation, Ledger
    from simfbo.core.gate import Gate
    from simfbo.core.privacy import Channels, Privacy, epsilon, private
    from simfbo.core.problem import BilevelProblem, Point
    from simfbo.engines import DebugFederation, SimulatedFederation
    from simfbo.engines.counting import cost
    from simfbo.errors import ClientError, TooFewReplies, UserError
    from simfbo.estimators import (
        FairClassifier,
        FairRegressor,
        FederatedLogistic,
        FederatedRidge,
        LongTailClassifier,
        NoisyLabelClassifier,
    )
    from simfbo.flower.deployment import Deployment
    from simfbo.runs.history import History
    from simfbo.runs.runner import run
    from simfbo.tasks._solve import solve

__version__ = "0.1.0"

_HOMES = {
    "simfbo.core.aggregation": ("Aggregators", "clipped_mean", "median", "trimmed_mean"),
    "simfbo.algorithms": (
        "Server",
        "Steps",
        "aggitd",
        "fedavg",
        "fedbio",
        "fedmbo",
        "fednest",
        "lfednest",
        "memfbo",
        "shrofbo",
        "simfbo",
    ),
    "simfbo.core.data": ("FederatedData", "federate", "from_clients"),
    "simfbo.flower.deployment": ("Deployment",),
    "simfbo.engines": ("DebugFederation", "SimulatedFederation"),
    "simfbo.engines.counting": ("cost",),
    "simfbo.errors": ("ClientError", "TooFewReplies", "UserError"),
    "simfbo.estimators": (
        "FairClassifier",
        "FairRegressor",
        "FederatedLogistic",
        "FederatedRidge",
        "LongTailClassifier",
        "NoisyLabelClassifier",
    ),
    "simfbo.core.federation": ("Algorithm", "Client", "Federation", "Ledger"),
    "simfbo.core.gate": ("Gate",),
    "simfbo.runs.history": ("History",),
    "simfbo.core.privacy": ("Channels", "Privacy", "epsilon", "private"),
    "simfbo.core.problem": ("BilevelProblem", "Point"),
    "simfbo.runs.runner": ("run",),
    "simfbo.tasks._solve": ("solve",),
}

__all__ = [
    "Aggregators",
    "Algorithm",
    "BilevelProblem",
    "Channels",
    "Client",
    "ClientError",
    "DebugFederation",
    "Deployment",
    "FairClassifier",
    "FairRegressor",
    "FederatedData",
    "FederatedLogistic",
    "FederatedRidge",
    "Federation",
    "Gate",
    "History",
    "Ledger",
    "LongTailClassifier",
    "NoisyLabelClassifier",
    "Point",
    "Privacy",
    "Server",
    "SimulatedFederation",
    "Steps",
    "TooFewReplies",
    "UserError",
    "aggitd",
    "clipped_mean",
    "cost",
    "epsilon",
    "fedavg",
    "fedbio",
    "federate",
    "fedmbo",
    "fednest",
    "from_clients",
    "lfednest",
    "median",
    "memfbo",
    "private",
    "run",
    "shrofbo",
    "simfbo",
    "solve",
    "trimmed_mean",
]


def __getattr__(name: str) -> Any:
    """Return a public name on first use, so that the command line answers without JAX."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'simfbo' has no attribute '{name}'")
