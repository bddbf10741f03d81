from . import algorithms, checks, datasets, diagnostics, estimators, flower, tasks
from . import torch as torch
from .core import (
    Algorithm,
    BilevelProblem,
    Client,
    FederatedData,
    Federation,
    Gate,
    Ledger,
    PerClient,
    Point,
    aggregation,
    codecs,
    federate,
    from_clients,
    local_work,
    partition,
    privacy,
    sampling,
)
from .engines import DebugFederation, SimulatedFederation, cost
from .errors import ClientError, TooFewReplies, UserError
from .runs import ClientMetric, ClientScores, History, run, trackers
from .tasks import Task, solve

__version__: str

__all__ = [
    "Algorithm",
    "BilevelProblem",
    "Client",
    "ClientError",
    "ClientMetric",
    "ClientScores",
    "DebugFederation",
    "FederatedData",
    "Federation",
    "Gate",
    "History",
    "Ledger",
    "PerClient",
    "Point",
    "SimulatedFederation",
    "Task",
    "TooFewReplies",
    "UserError",
    "aggregation",
    "algorithms",
    "checks",
    "codecs",
    "cost",
    "datasets",
    "diagnostics",
    "estimators",
    "federate",
    "flower",
    "from_clients",
    "local_work",
    "partition",
    "privacy",
    "run",
    "sampling",
    "solve",
    "tasks",
    "trackers",
]
