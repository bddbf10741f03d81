"""What can be read from q_x where x is a fully connected layer, in a few lines of NumPy.

A sample with input u adds delta_j u to the weights of unit j and delta_j to its bias, so that their
ratio is u (Phong et al. 2018, "Privacy-preserving deep learning via additively homomorphic
encryption"). With several samples it is an affine combination of those the unit is active for.
"""

import numpy as np

_DEAD = 1e-4  # a unit that moves less than this share of the liveliest says nothing
_SAME = 1e-3  # ratios that differ by less, relative to their norm, are one image


def ratios(weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return weights over bias of every unit that is alive: [units, inputs]."""
    alive = np.abs(bias) > _DEAD * np.abs(bias).max()
    return (weight[:, alive] / bias[alive]).T


def liveliest(weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the ratio of the unit with the largest bias part: the input, where there is one."""
    unit = np.abs(bias).argmax()
    return weight[:, unit] / bias[unit]


def repeated(rows: np.ndarray) -> np.ndarray:
    """Return the two ratios that most units agree on: [2, inputs].

    Where a unit is active for one sample only, its ratio is that sample; where it is active for
    both, the ratio is a mixture of its own. So what repeats is a sample, and no truth is needed to
    find it.
    """
    norms = np.linalg.norm(rows, axis=1)
    squares = norms[:, None] ** 2 + norms**2 - 2 * rows @ rows.T
    near = np.sqrt(np.maximum(squares, 0)) < _SAME * np.minimum(norms[:, None], norms)
    first = near.sum(1).argmax()
    others = np.where(near[first], 0, (near & ~near[first]).sum(1))
    return rows[[first, others.argmax()]]


def guesses(weight: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Return the units' weights summed by how each label would move them: [labels, inputs].

    Before training, a sample of label c moves unit j by about sum_k head_jk (1/labels - [k = c]) or
    not at all. The sum over units averages noise away, which ratios do not.
    """
    labels = head.shape[1]
    return (weight @ head @ (1 / labels - np.eye(labels))).T


def correlations(found: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Return the correlation of every row of one array with every row of the other."""
    return _normal(found) @ _normal(images).T


def _normal(rows: np.ndarray) -> np.ndarray:
    rows = rows - rows.mean(1, keepdims=True)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
