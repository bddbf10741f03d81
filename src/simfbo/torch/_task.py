"""A hyper-representation task from a PyTorch module and samples."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from simfbo.core.data import federate
from simfbo.core.partition import halve
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.errors import UserError
from simfbo.runs.client_metrics import ClientMetric
from simfbo.tasks import Task
from simfbo.tasks._hyper_representation import accuracy, cross_entropy, evaluator, regularised
from simfbo.torch._loss import TorchFunction
from simfbo.torch._modules import Globs, SplitModule, split
from simfbo.torch._samples import Labelled, samples_of


def hyper_representation(
    module: Any,
    head: Globs,
    clients: Sequence[Any],
    *,
    test: Any = None,
    upper_share: float = 0.5,
    batch_size: int | None = 64,
    regularisation: float = 1e-3,
    chunk: int = 500,
    seed: int = 0,
) -> Task:
    """Build the task of learning a module's representation across clients.

    The head's parameters are the lower variable: they minimise the cross-entropy plus
    lambda/2 ||y||^2 on the clients' training samples. All other parameters are the upper variable:
    they minimise the cross-entropy of that head on the clients' validation samples.

    Args:
        module: a classifier, in evaluation mode if it has dropout or batch normalisation; its
            weights are the initial values.
        head: names of the head's parameters; `*` stands for anything, as in "classifier.*".
        clients: each client's samples: a DataLoader, a Dataset, or (inputs, labels) as arrays or
            tensors. They are read once. Several inputs, as a tuple or a dictionary, are the
            module's arguments.
        test: the test samples; the clients' validation samples by default.
        upper_share: share of each client's samples that the upper loss uses.
        batch_size: samples in a minibatch at either level.
        regularisation: lambda, which makes g strongly convex in a linear head.
        chunk: the number of samples evaluated at once.
        seed: of the split into levels.

    Returns:
        The task, for `simfbo.solve`, `simfbo.run` and, as the value of a function, the command
        line. Its metrics are accuracy and loss on the test samples, and accuracy on (up to 10,000
        of) the training samples.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        >>> samples = np.zeros((8, 4), "float32"), np.arange(8) % 2
        >>> task = hyper_representation(net, head="2.*", clients=[samples, samples])
        >>> task.data.n, list(task.y0)
        (2, ['2.weight', '2.bias'])
    """
    labelled = [samples_of(source) for source in clients]
    if not labelled:
        raise UserError("Give at least one client's samples.")
    parts_of_module = split(module, upper=head)
    model = SplitModule(module, parts_of_module.y, parts_of_module.x)
    logits = TorchFunction(_outputs(model))
    loss = cross_entropy(logits)
    pooled, parts = _concatenated(labelled)
    lower, upper = halve(parts, upper_share, seed)
    test_samples, name = _tested(test, pooled, upper)
    _require_classes(logits, model, pooled, test_samples)
    return Task(
        "hyper-representation",
        BilevelProblem(loss, regularised(loss, regularisation)),
        federate(pooled, lower, upper, batch_size=batch_size),
        model.x,
        model.y,
        evaluator(logits, test_samples, pooled, chunk=chunk, name=name),
        f"{name}_accuracy",
        "max",
        "train_accuracy",
        frozenset({"train_accuracy"}),
        own_metrics={"accuracy": ClientMetric(accuracy(logits), "max")},
    )


def _require_classes(
    logits: TorchFunction, model: SplitModule, *parts: tuple[PyTree, np.ndarray]
) -> None:
    """Raise unless the module has a score for every class; this traces it for the first time."""
    sample = jax.tree.map(lambda a: a[:1], parts[0][0])
    scores = jax.eval_shape(logits, model.x, model.y, sample).shape
    classes = 1 + max(int(labels.max()) for _, labels in parts)
    if len(scores) != 2 or scores[1] < classes:
        raise UserError(
            f"The labels need scores of shape [batch, {classes}] or wider, but the module returns "
            f"{['batch', *scores[1:]]}."
        )


def _outputs(model: SplitModule) -> Any:
    """Return the PyTorch function (x, y, inputs) -> outputs."""

    def outputs(x: Any, y: Any, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return model(x, y, **inputs)
        return model(x, y, *inputs) if isinstance(inputs, tuple) else model(x, y, inputs)

    outputs.__name__ = type(model.module).__name__  # for messages
    return outputs


def _concatenated(
    labelled: Sequence[Labelled],
) -> tuple[tuple[PyTree, np.ndarray], list[np.ndarray]]:
    """Concatenate all clients' inputs and labels; return them with each client's rows."""
    shapes = [
        jax.tree.map(lambda a: (a.shape[1:], str(a.dtype)), samples.inputs) for samples in labelled
    ]
    for client, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise UserError(
                f"Client {client}'s inputs are {shape}, but client 0's are {shapes[0]}: give all "
                "clients samples of one kind."
            )
    inputs, labels = jax.tree.map(lambda *parts: np.concatenate(parts), *map(tuple, labelled))
    ends = np.cumsum([len(samples.labels) for samples in labelled])
    return (inputs, labels), np.split(np.arange(ends[-1]), ends[:-1])


def _tested(
    test: Any, pooled: tuple[PyTree, np.ndarray], upper: Sequence[np.ndarray]
) -> tuple[tuple[PyTree, np.ndarray], str]:
    """Return the test samples, and the name of the metrics on them."""
    if test is not None:
        samples = samples_of(test)
        return (samples.inputs, samples.labels), "test"
    rows = np.concatenate(upper)
    return jax.tree.map(lambda a: a[rows], pooled), "validation"
