"""Engines: federations on this machine."""

from simfbo.engines.debug import CountingFederation, DebugFederation, cost
from simfbo.engines.simulated import SimulatedFederation

__all__ = ["CountingFederation", "DebugFederation", "SimulatedFederation", "cost"]
