"""Tests run in double precision, with strict dtype promotion and warnings as errors."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Many tests build the same federation anew: what one of them compiled serves the others.
_CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def single_precision():
    """Run a test in float32, as users do."""
    with jax.enable_x64(False):
        yield
