"""Models and losses written in PyTorch, as JAX sees them.

`torch.export` traces a loss once per shape; a table of operators replays it in JAX, after which
nothing of PyTorch is left. PyTorch is needed to trace, not to run what was saved.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
