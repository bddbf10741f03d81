"""Algorithms, one paper per file."""

from simfbo.algorithms.aggitd import aggitd
from simfbo.algorithms.fedavg import fedavg
from simfbo.algorithms.fedbio import fedbio
from simfbo.algorithms.fedmbo import fedmbo
from simfbo.algorithms.fednest import fednest
from simfbo.algorithms.lfednest import lfednest
from simfbo.algorithms.memfbo import memfbo
from simfbo.algorithms.shrofbo import shrofbo
from simfbo.algorithms.simfbo import Server, Steps, simfbo

__all__ = [
    "Server",
    "Steps",
    "aggitd",
    "fedavg",
    "fedbio",
    "fedmbo",
    "fednest",
    "lfednest",
    "memfbo",
    "shrofbo",
    "simfbo",
]
