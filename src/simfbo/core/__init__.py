"""The building blocks of methods: problems and their derivatives, data, cohorts, the federation."""

from simfbo.core import local_work, partition, sampling, trees
from simfbo.core.data import FederatedData, federate, from_clients
from simfbo.core.federation import Client, Federation, View, WithMemory
from simfbo.core.gate import Gate
from simfbo.core.ledger import Ledger, PerClient
from simfbo.core.method import Method, Wrapper, client_step
from simfbo.core.problem import (
    BilevelProblem,
    Point,
    directions,
    grad_lower_y,
    grad_upper_x,
    grad_upper_y,
    hvp,
    mixed,
)

__all__ = [
    "BilevelProblem",
    "Client",
    "FederatedData",
    "Federation",
    "Gate",
    "Ledger",
    "Method",
    "PerClient",
    "Point",
    "View",
    "WithMemory",
    "Wrapper",
    "client_step",
    "directions",
    "federate",
    "from_clients",
    "grad_lower_y",
    "grad_upper_x",
    "grad_upper_y",
    "hvp",
    "local_work",
    "mixed",
    "partition",
    "sampling",
    "trees",
]
