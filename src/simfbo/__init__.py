"""simfbo: federated bilevel optimisation, simulated fast and written once."""
# ruff: noqa: F403, F405

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simfbo.api import *

__version__ = "0.1.0"

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


def __getattr__(name: str) -> Any:
    """Return a public name on first use, so that the command line answers without JAX."""
    if name not in __all__:
        raise AttributeError(f"module 'simfbo' has no attribute '{name}'")
    return getattr(importlib.import_module("simfbo.api"), name)


class _Package(ModuleType):
    """A package in which `simfbo.run` stays the function when its module is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_module = name == "run" and isinstance(value, ModuleType)
        super().__setattr__(name, value.run if is_module else value)


sys.modules[__name__].__class__ = _Package
