"""What an algorithm is written with: problems, data, cohorts, and the federation."""

from simfbo.core import aggregation, codecs, local_work, partition, privacy, sampling
from simfbo.core.data import FederatedData, federate, from_clients
from simfbo.core.federation import Algorithm, Client, Federation
from simfbo.core.gate import Gate
from simfbo.core.ledger import Ledger, PerClient
from simfbo.core.problem import BilevelProblem, Point

__all__ = [
    "Algorithm",
    "BilevelProblem",
    "Client",
    "FederatedData",
    "Federation",
    "Gate",
    "Ledger",
    "PerClient",
    "Point",
    "aggregation",
    "codecs",
    "federate",
    "from_clients",
    "local_work",
    "partition",
    "privacy",
    "sampling",
]
