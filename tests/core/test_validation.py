"""Starting points: every kind of number becomes an array of floating-point numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from simfbo.core.validation import variable
from simfbo.errors import UserError


@pytest.mark.parametrize("given", [3, 3.0, np.float64(3), np.int32(3), jnp.asarray(3), True + 2])
def test_numbers_become_arrays_of_floats(given):
    """Also in a pytree; NumPy compares float64 equal to None, the dtype of a number of Python's."""
    for found in (variable(given, "x0"), variable({"a": given}, "x0")["a"]):
        assert isinstance(found, np.ndarray | jnp.ndarray)
        assert (found.dtype, found.tolist()) == (np.float64, 3.0)


def test_numbers_have_the_precision_of_the_user(single_precision):
    assert {variable(given, "x0").dtype for given in (3, 3.0, [1, 2])} == {np.dtype("float32")}


def test_arrays_of_floats_stay_as_they_are():
    for given in (np.ones(2, np.float32), jnp.ones(2)):
        assert variable(given, "x0") is given


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([[1, 2], [3]], "y0 has rows of different lengths: give an array."),
        ({}, "y0 is {}: give an array, or a pytree of arrays."),
        ("a", "y0 holds 'a': give arrays of numbers."),
        (np.nan, "y0 holds NaN or infinite numbers: start from finite ones."),
    ],
)
def test_other_starting_points_are_refused(given, sentence):
    with pytest.raises(UserError) as caught:
        variable(given, "y0")
    assert str(caught.value) == sentence
