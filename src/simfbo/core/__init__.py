"""What an algorithm is written with: problems, data, cohorts, and the federation."""

from simfbo.core import local_work, partition, sampling
from simfbo.core.data import FederatedData, federate, from_clients
from simfbo.core.federation import Client, Federation, WithMemory
from simfbo.core.gate import Gate
from simfbo.core.ledger import Ledger, PerClient
from simfbo.core.method import Method, Wrapper, client_step
from simfbo.core.problem import BilevelProblem, Point

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
    "WithMemory",
    "Wrapper",
    "client_step",
    "federate",
    "from_clients",
    "local_work",
    "partition",
    "sampling",
]
