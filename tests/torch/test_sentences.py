"""What a graph cannot hold ends in one sentence that says what to do."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from simfbo import UserError
from simfbo.torch import check_loss, from_torch, hyper_representation, load, parameters, split

Y = np.linspace(-1, 1, 6).reshape(2, 3)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context, a):
        return a.round()

    @staticmethod
    def backward(context, gradient):
        return gradient


def calls(module):
    return lambda x, y, batch: module(y.float()).sum()


def branches(x, y, batch):
    return y.sum() if y.sum() > 0 else -y.sum()


def written_unseen(x, y, batch):
    b = y * 2
    with torch.no_grad():
        b.clamp_(-0.5, 0.5)
    return (b**2).sum()


def inferred(x, y, batch):
    with torch.inference_mode():
        weight = y * 2
    return (weight.clone() * y.detach()).sum()


LOSSES = {
    "Dropout in training mode, which draws random numbers: call .eval()": calls(nn.Dropout(0.1)),
    "LSTM in training mode, which draws": calls(nn.LSTM(3, 2, 2, dropout=0.5)),
    "BatchNorm1d in training mode, which couples the samples": calls(nn.BatchNorm1d(3)),
    "draws random numbers (rand_like)": lambda x, y, batch: F.dropout(y, 0.5).sum(),
    "draws random numbers (rand": lambda x, y, batch: (y * torch.rand(3)).sum(),
    "control flow (if, .item(), boolean indexing): use torch.where": branches,
    "(if, .item(), boolean": lambda x, y, batch: y.sum() * y.sum().item(),
    "boolean indexing)": lambda x, y, batch: y[y > 0].sum(),
    "calls StraightThrough, an autograd.Function": lambda x, y, b: StraightThrough.apply(y).sum(),
    "operator _linalg_svd, which has no JAX counterpart": lambda x, y, b: y.svd()[1].sum(),
    "takes .data of a tensor": lambda x, y, batch: (y.data * y).sum(),
    "must return a scalar, it returns a tensor of shape [2, 3]": lambda x, y, batch: y * 2,
    "must return one tensor, it returns float": lambda x, y, batch: 3.0,
    "must return one tensor, it returns tuple": lambda x, y, batch: (y.sum(), y.sum()),
    "changes an argument in place: work on a copy": lambda x, y, batch: y.mul_(2).sum(),
    "changes a buffer or an input": lambda x, y, batch: batch.add_(1).sum() * y.sum(),
    "cannot be traced by torch.export: ": lambda x, y, batch: y @ y,
    "whole numbers by weights: convert its inputs": lambda x, y, b: F.linear(b, y.float()).sum(),
    "in place without its derivative (clamp_)": written_unseen,
    "in place without its derivative (mul_)": lambda x, y, batch: (y * 2).detach().mul_(2).sum(),
    "uses torch.inference_mode(): use torch.no_grad()": inferred,
    "operator multilabel_margin_loss_forward": lambda x, y, batch: F.multilabel_margin_loss(
        y, torch.tensor([[2, 0, -1]] * 2)),
    "operator view.dtype": lambda x, y, batch: y.view(torch.int64).sum() * y.sum(),
    "operator add cannot be computed in JAX": lambda x, y, batch: F.max_unpool2d(
        *F.max_pool2d(y[None, :, :2], 2, return_indices=True), 2).sum(),
}  # fmt: skip


@pytest.mark.parametrize("text", LOSSES)
def test_loss(text, capfd):
    with pytest.raises(UserError) as found:
        from_torch(LOSSES[text])(None, Y, np.zeros((2, 3), "uint8"))
    assert text in str(found.value)
    assert "\n" not in str(found.value)
    assert capfd.readouterr() == ("", "")  # torch.export prints graphs


def test_what_was_switched_off_for_tracing_is_on_again():
    for loss in (branches, lambda x, y, batch: StraightThrough.apply(y).sum()):
        with pytest.raises(UserError):
            from_torch(loss)(None, Y, None)
    assert float(StraightThrough.apply(torch.tensor(0.7))) == 1
    assert nn.Dropout(0.5)(torch.ones(3)).shape == (3,)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_check_of_a_bad_loss_says_the_same():
    with pytest.raises(UserError, match="'branches' depends on values"):
        check_loss(branches, (Y[0], Y, None))


NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
SAMPLES = np.zeros((4, 3), "float32"), np.array([0, 1, 0, 1])
WRONG = {
    "No parameter is named 'fc.*'. Its parameters are 0.weight, 0.bias, 2.weight, 2.bias.":
        lambda: split(NET, upper="fc.*"),
    "The parameter '2.bias' is named both upper and lower":
        lambda: split(NET, upper=["0.*", "2.bias"], lower="2.*"),
    "'*' names all parameters": lambda: hyper_representation(NET, "*", [SAMPLES]),
    "The module has no parameter 'bias'": lambda: load(NET, {"bias": [1.0]}),
    "'0.bias' has the shape [4], got [3]": lambda: load(NET, {"0.bias": np.zeros(3)}),
    "call .float() on the module": lambda: parameters(nn.Linear(2, 2).bfloat16()),
    "Give at least one client's samples": lambda: hyper_representation(NET, "2.*", []),
    "Samples must be (inputs, labels)": lambda: hyper_representation(NET, "2.*", [SAMPLES[0]]),
    "need 'labels', got ['words']": lambda: hyper_representation(NET, "2.*", [{"words": Y}]),
    "Labels must be classes": lambda: hyper_representation(NET, "2.*", [(SAMPLES[0], Y[0])]),
    "need scores of shape [batch, 3] or wider": lambda: hyper_representation(
        NET, "2.*", [(SAMPLES[0], np.array([0, 1, 2, 0]))]),
    "samples have different shapes: pad them": lambda: hyper_representation(
        NET, "2.*", [torch.utils.data.DataLoader([(Y[0, :n], 0) for n in (2, 3)])]),
    "Client 1's inputs are": lambda: hyper_representation(
        NET, "2.*", [SAMPLES, (np.zeros((4, 2), "float32"), SAMPLES[1])]),
    "A client's dataset is empty": lambda: hyper_representation(
        NET, "2.*", [torch.utils.data.DataLoader([])]),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_module_or_samples(text):
    with pytest.raises(UserError) as found:
        WRONG[text]()
    assert text in str(found.value)
    assert "\n" not in str(found.value)


def test_a_loss_may_print(capsys):
    def loss(x, y, batch):
        print(tuple(y.shape))
        return y.sum()

    from_torch(loss)(None, Y, None)
    assert capsys.readouterr().out == "(2, 3)\n"
