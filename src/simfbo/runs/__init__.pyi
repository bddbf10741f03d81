from . import trackers
from .checkpoint import load_variables, save_variables
from .history import History
from .runner import run

__all__ = ["History", "load_variables", "run", "save_variables", "trackers"]
