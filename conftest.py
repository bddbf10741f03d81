"""Examples in docstrings of simfbo.torch run where PyTorch is installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["src/simfbo/torch/*"]
