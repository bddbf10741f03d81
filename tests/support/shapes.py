"""Checks the shapes in jaxtyping's annotations while tests run; see conftest.py."""

import re
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_SHAPED = re.compile(r"\b(Bool|Float|Int|Key|Shaped)\[")
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments and results of a function for which annotations name shapes."""
    hints = dict(function.__annotations__)
    shaped = {name: hint for name, hint in hints.items() if _SHAPED.search(str(hint))}
    if not shaped:
        return function
    function.__annotations__ = shaped
    try:
        return _check(function)
    finally:
        function.__annotations__ = hints
