"""Algorithms, one paper per file."""

from simfbo.algorithms._aggitd import aggitd
from simfbo.algorithms._fedavg import fedavg
from simfbo.algorithms._fedbio import fedbio
from simfbo.algorithms._fedmbo import fedmbo
from simfbo.algorithms._fednest import fednest
from simfbo.algorithms._lfednest import lfednest
from simfbo.algorithms._memfbo import memfbo
from simfbo.algorithms._shrofbo import shrofbo
from simfbo.algorithms._simfbo import Server, Steps, simfbo

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
