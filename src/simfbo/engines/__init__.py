"""Engines: federations on this machine."""

from simfbo.engines.counting import CountingFederation, cost
from simfbo.engines.debug import DebugFederation
from simfbo.engines.simulated import SimulatedFederation

__all__ = ["CountingFederation", "DebugFederation", "SimulatedFederation", "cost"]
