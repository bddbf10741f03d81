"""PyTorch models and losses as JAX functions.

`torch.export` traces a loss once per shape; a table of operators replays it in JAX without PyTorch,
which is needed for tracing, but not to run saved losses.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
