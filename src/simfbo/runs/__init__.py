"""One run: the runner, its history and checkpoints on disk, and its report."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
