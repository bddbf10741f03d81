"""Algorithms, one paper per file, and automatic step sizes for all of them."""

from simfbo.algorithms._aggitd import aggitd
from simfbo.algorithms._auto_steps import Plan, auto_steps
from simfbo.algorithms._common import once_per_problem, with_settings
from simfbo.algorithms._fedavg import fedavg
from simfbo.algorithms._fedbio import fedbio
from simfbo.algorithms._fedmbo import fedmbo
from simfbo.algorithms._fednest import fednest
from simfbo.algorithms._lfednest import lfednest
from simfbo.algorithms._memfbo import memfbo
from simfbo.algorithms._mimefbo import mimefbo
from simfbo.algorithms._momenta import with_momenta
from simfbo.algorithms._shrofbo import shrofbo
from simfbo.algorithms._simfbo import simfbo

__all__ = [
    "Plan",
    "aggitd",
    "auto_steps",
    "fedavg",
    "fedbio",
    "fedmbo",
    "fednest",
    "lfednest",
    "memfbo",
    "mimefbo",
    "once_per_problem",
    "shrofbo",
    "simfbo",
    "with_momenta",
    "with_settings",
]
