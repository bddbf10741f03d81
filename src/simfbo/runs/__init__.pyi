from . import trackers
from .checkpoint import load_variables, save_variables
from .client_metrics import ClientMetric
from .client_scores import ClientScores
from .history import History
from .runner import run

__all__ = [
    "ClientMetric",
    "ClientScores",
    "History",
    "load_variables",
    "run",
    "save_variables",
    "trackers",
]
