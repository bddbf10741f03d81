"""Algorithms, one paper per file."""

from simfbo.algorithms.shrofbo import shrofbo
from simfbo.algorithms.simfbo import Server, Steps, simfbo

__all__ = ["Server", "Steps", "shrofbo", "simfbo"]
