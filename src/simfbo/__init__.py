"""simfbo: federated bilevel optimisation, simulated fast and written once."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simfbo.algorithms import (
        Server,
        Steps,
        aggitd,
        fedbio,
        fedmbo,
        fednest,
        lfednest,
        memfbo,
        shrofbo,
        simfbo,
    )
    from simfbo.data import FederatedData, federate, from_clients
    from simfbo.engines import DebugFederation, SimulatedFederation
    from simfbo.engines.counting import cost
    from simfbo.errors import ClientError, UserError
    from simfbo.federation import Algorithm, Client, Federation, Ledger
    from simfbo.history import History
    from simfbo.problem import BilevelProblem, Point
    from simfbo.runner import run

__version__ = "0.1.0"

_HOMES = {
    "simfbo.algorithms": (
        "Server",
        "Steps",
        "aggitd",
        "fedbio",
        "fedmbo",
        "fednest",
        "lfednest",
        "memfbo",
        "shrofbo",
        "simfbo",
    ),
    "simfbo.data": ("FederatedData", "federate", "from_clients"),
    "simfbo.engines": ("DebugFederation", "SimulatedFederation"),
    "simfbo.engines.counting": ("cost",),
    "simfbo.errors": ("ClientError", "UserError"),
    "simfbo.federation": ("Algorithm", "Client", "Federation", "Ledger"),
    "simfbo.history": ("History",),
    "simfbo.problem": ("BilevelProblem", "Point"),
    "simfbo.runner": ("run",),
}

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
    "aggitd",
    "cost",
    "fedbio",
    "federate",
    "fedmbo",
    "fednest",
    "from_clients",
    "lfednest",
    "memfbo",
    "run",
    "shrofbo",
    "simfbo",
]


def __getattr__(name: str) -> Any:
    """Return a public name on first use, so that the command line answers without JAX."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'simfbo' has no attribute '{name}'")
