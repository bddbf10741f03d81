"""Everything that `import simfbo` offers, in one place; imports JAX."""

from simfbo.algorithms import Server, Steps, shrofbo, simfbo
from simfbo.data import FederatedData, federate, from_clients
from simfbo.engines import DebugFederation, SimulatedFederation
from simfbo.engines.counting import cost
from simfbo.errors import ClientError, UserError
from simfbo.federation import Algorithm, Client, Federation, Ledger
from simfbo.history import History
from simfbo.problem import BilevelProblem, Point
from simfbo.run import run

__all__ = [
    "Algorithm",
    "BilevelProblem",
    "Client",
    "ClientError",
    "DebugFederation",
    "FederatedData",
    "Federation",
    "History",
    "Ledger",
    "Point",
    "Server",
    "SimulatedFederation",
    "Steps",
    "UserError",
    "cost",
    "federate",
    "from_clients",
    "run",
    "shrofbo",
    "simfbo",
]
