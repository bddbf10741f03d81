"""Engines: implementations of the federation's one verb."""

from simfbo.engines.counting import CountingFederation
from simfbo.engines.debug import DebugFederation
from simfbo.engines.simulated import SimulatedFederation

__all__ = ["CountingFederation", "DebugFederation", "SimulatedFederation"]
