"""Federated bilevel optimisation.

The public names are listed once, in `__init__.pyi`, and imported on first use, so that the command
line answers without JAX.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
# `from simfbo import *` must not replace PyTorch by our namespace for it.
__all__.remove("torch")  # pyright: ignore[reportUnsupportedDunderAll]
