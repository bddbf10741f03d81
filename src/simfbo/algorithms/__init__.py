"""Algorithms, one paper per file; automatic step sizes for all, tuning-free ones for some."""

from simfbo.algorithms._aggitd import aggitd
from simfbo.algorithms._fedavg import fedavg
from simfbo.algorithms._fedbio import fedbio
from simfbo.algorithms._fedbioacc import fedbioacc
from simfbo.algorithms._fedbioacc_local import fedbioacc_local
from simfbo.algorithms._fedmbo import fedmbo
from simfbo.algorithms._fedmsa import fedmsa
from simfbo.algorithms._fednest import fednest
from simfbo.algorithms._lfednest import lfednest
from simfbo.algorithms._memfbo import memfbo
from simfbo.algorithms._mimefbo import mimefbo
from simfbo.algorithms._momenta import with_momenta
from simfbo.algorithms._shrofbo import shrofbo
from simfbo.algorithms._simfbo import simfbo
from simfbo.algorithms.steps.auto import Plan, auto_steps
from simfbo.algorithms.steps.tuning_free import tuning_free

__all__ = [
    "Plan",
    "aggitd",
    "auto_steps",
    "fedavg",
    "fedbio",
    "fedbioacc",
    "fedbioacc_local",
    "fedmbo",
    "fedmsa",
    "fednest",
    "lfednest",
    "memfbo",
    "mimefbo",
    "shrofbo",
    "simfbo",
    "tuning_free",
    "with_momenta",
]
