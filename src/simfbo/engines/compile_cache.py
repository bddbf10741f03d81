"""Compiled programs that outlive the process."""

import os
from pathlib import Path

import jax


def keep_compilations() -> None:
    """Keep compiled programs between runs, so that the second starts at once."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(root / "simfbo" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
