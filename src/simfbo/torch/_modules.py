"""Modules: reading and writing their parameters, and splitting them into upper and lower ones.

Parameters are ordered dictionaries, whose order JAX keeps; it sorts the keys of plain ones.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from simfbo.core.problem import PyTree
from simfbo.errors import UserError, require
from simfbo.torch._trace import constant

Globs = str | Sequence[str]
Arrays = OrderedDict[str, np.ndarray]


def parameters(module: Any) -> Arrays:
    """Return a module's parameters by name, in PyTorch's order, as initial arrays.

    Example:
        >>> import torch
        >>> {name: a.shape for name, a in parameters(torch.nn.Linear(3, 2)).items()}
        {'weight': (2, 3), 'bias': (2,)}
    """
    return OrderedDict((name, constant(tensor)) for name, tensor in module.named_parameters())


def load(module: Any, *trees: Mapping[str, PyTree]) -> Any:
    """Put trained arrays into a module's parameters, and return the module.

    Args:
        module: the module.
        trees: arrays by parameter name, such as a final state's x and y.

    Example:
        >>> import torch
        >>> load(torch.nn.Linear(1, 1), {"bias": [2.0]}).bias.tolist()
        [2.0]
    """
    torch = require("torch", "torch")
    tensors = dict(module.named_parameters())
    arrays = {name: np.asarray(a) for tree in trees for name, a in tree.items()}
    for name, array in arrays.items():
        if name not in tensors:
            raise UserError(f"The module has no parameter '{name}'. {_some(tensors)}")
        if array.shape != tuple(tensors[name].shape):
            raise UserError(
                f"The parameter '{name}' has the shape {list(tensors[name].shape)}, got "
                f"{list(array.shape)}."
            )
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[name].copy_(torch.from_numpy(np.array(array)))
    return module


class SplitModule(NamedTuple):
    """A module whose parameters are divided into upper and lower ones.

    Call it inside a PyTorch loss: `model(x, y, inputs)`.

    Attributes:
        module: the module.
        x: its initial upper parameters by name.
        y: its initial lower parameters by name.
    """

    module: Any
    x: Arrays
    y: Arrays

    def __call__(self, x: Any, y: Any, *inputs: Any, **named: Any) -> Any:
        """Return the module's output with the parameters x and y."""
        functional_call = require("torch.func", "torch").functional_call
        return functional_call(self.module, {**x, **y}, inputs, named)


def split(module: Any, *, upper: Globs, lower: Globs | None = None) -> SplitModule:
    """Divide a module's parameters into upper and lower ones by their names.

    All other parameters are frozen.

    Args:
        module: the module, in evaluation mode if it has dropout or batch normalisation.
        upper: names of the upper parameters; `*` stands for anything, as in "encoder.*".
        lower: names of the lower parameters; all others by default.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        >>> model = split(net, upper="0.*", lower="2.*")
        >>> list(model.x), list(model.y)
        (['0.weight', '0.bias'], ['2.weight', '2.bias'])
    """
    all_parameters = parameters(module)
    x = _matching(all_parameters, upper)
    others = OrderedDict((name, a) for name, a in all_parameters.items() if name not in x)
    y = others if lower is None else _matching(all_parameters, lower)
    if in_both := [name for name in x if name in y]:
        raise UserError(
            f"The parameter '{in_both[0]}' is named both upper and lower: name it once."
        )
    if not y:
        raise UserError(f"'{upper}' names all parameters: leave some of them to the other level.")
    return SplitModule(module, x, y)


def _matching(candidates: Arrays, globs: Globs) -> Arrays:
    """Return the parameters that match any of the globs; raise if a glob matches none."""
    chosen: set[str] = set()
    for glob in [globs] if isinstance(globs, str) else globs:
        names = [name for name in candidates if fnmatchcase(name, glob)]
        if not names:
            raise UserError(f"No parameter is named '{glob}'. {_some(candidates)}")
        chosen.update(names)
    return OrderedDict((name, a) for name, a in candidates.items() if name in chosen)


def _some(names: Iterable[str]) -> str:
    """List the first names in a sentence.

    Example:
        >>> _some(["a", "b"])
        'Its parameters are a, b.'
    """
    all_names = list(names)
    return f"Its parameters are {', '.join(all_names[:8])}{', ...' if len(all_names) > 8 else ''}."
