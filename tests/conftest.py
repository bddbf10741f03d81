"""Tests run in double precision, with strict dtype promotion and warnings as errors."""

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def single_precision():
    """Run a test in float32, as users do."""
    with jax.enable_x64(False):
        yield
