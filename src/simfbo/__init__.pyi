from . import algorithms, checks, codecs, datasets, diagnostics, estimators, flower, privacy, tasks
from . import torch as torch
from .core import (
    BilevelProblem,
    Client,
    FederatedData,
    Federation,
    Gate,
    Ledger,
    Method,
    PerClient,
    Point,
    WithMemory,
    client_step,
    federate,
    from_clients,
    local_work,
    partition,
    sampling,
)
from .engines import DebugFederation, SimulatedFederation, cost
from .errors import ClientError, TooFewReplies, UserError
from .robust import aggregation
from .runs import ClientMetric, ClientScores, History, run, trackers
from .tasks import Task, solve

__version__: str

__all__ = [
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
    "Method",
    "PerClient",
    "Point",
    "SimulatedFederation",
    "Task",
    "TooFewReplies",
    "UserError",
    "WithMemory",
    "aggregation",
    "algorithms",
    "checks",
    "client_step",
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
