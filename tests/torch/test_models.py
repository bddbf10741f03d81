"""Whole models: value, gradient, Hessian product and mixed product are PyTorch's."""

import threading

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from simfbo import UserError
from simfbo.torch import check_loss, from_torch, split

RNG = np.random.default_rng(0)
LABELS = np.array([0, 2, 1])
IMAGES = RNG.normal(size=(3, 3, 12, 12))
WORDS = RNG.integers(0, 11, (3, 5))


class Block(nn.Module):
    """A residual block with group normalisation."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.GroupNorm(2, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(2, outputs),
        )  # fmt: skip
        self.around = nn.Conv2d(inputs, outputs, 1, 2, bias=False)

    def forward(self, images):
        return F.relu(self.body(images) + self.around(images))


class Words(nn.Module):
    """Embeddings, something on top of them, and a head."""

    def __init__(self, body, width=8):
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.body, self.head = body, nn.Linear(width, 3)

    def forward(self, words):
        inputs = self.words(words)
        if isinstance(self.body, nn.TransformerEncoder):
            return self.head(self.body(inputs, src_key_padding_mask=words == 0).mean(1))
        out, _ = self.body(inputs)
        return self.head(out[:, -1])


class Patches(nn.Module):
    """A small vision transformer."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.place = nn.Parameter(torch.randn(1, 10, 8))
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.body = encoder(norm_first=True, activation="gelu")
        self.head = nn.Linear(8, 3)

    def forward(self, images):
        patches = self.patches(images).flatten(2).transpose(1, 2)
        first = self.first.expand(len(images), -1, -1)
        return self.head(self.body(torch.cat([first, patches], 1) + self.place)[:, 0])


def encoder(**options):
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(11, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, words):
        return self.head(torch.tanh(self.bag(words)))


def perceptron():
    net = nn.Sequential(nn.Flatten(), nn.Linear(432, 5), nn.ReLU(), nn.Linear(5, 3))
    return net, "3.*", IMAGES


def lenet():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.Tanh(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return net, "7.*", IMAGES


def resnet():
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    return nn.Sequential(Block(3, 4), Block(4, 6), pooled), "2.*", IMAGES


def vision_transformer():
    return Patches(), "head.*", IMAGES


def text_transformer():
    return Words(encoder()), "head.*", WORDS


def lstm():
    return Words(nn.LSTM(8, 4, batch_first=True), 4), "head.*", WORDS


def gru():
    return Words(nn.GRU(8, 4, 2, batch_first=True), 4), "head.*", WORDS


def bag():
    return Bag(), "head.*", WORDS


MODELS = [perceptron, lenet, resnet, vision_transformer, text_transformer, lstm, gru, bag]


def problem(build):
    """Return a model's regularised loss and an example for it, in double precision."""
    torch.manual_seed(0)
    module, head, inputs = build()
    found = split(module.double().eval(), upper=head)
    model = found._replace(x=found.y, y=found.x)

    def loss(x, y, batch):
        fit = F.cross_entropy(model(x, y, batch[0]), batch[1])
        return fit + 0.01 * sum((p**2).sum() for p in y.values())

    return loss, (model.x, model.y, (inputs, LABELS))


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_model(build):
    found = check_loss(*problem(build), tolerance=1e-9)
    assert found.gradient > 0  # another implementation: never equal to the last bit
    assert (found.mixed is None) == (build is bag)  # of which PyTorch has no second derivative


def test_a_wrong_operator_is_found(monkeypatch):
    from simfbo.torch.operators import TABLE

    monkeypatch.setitem(TABLE, "relu", lambda a: jax.nn.relu(a) + 1e-3)
    with pytest.raises(UserError, match=r"^The value of 'loss' differs between PyTorch and JAX"):
        check_loss(*problem(perceptron))


def test_a_wrong_derivative_is_found(monkeypatch):
    from simfbo.torch.operators import TABLE

    def relu(a):
        value = jax.nn.relu(a)
        return jax.lax.stop_gradient(value - 2 * a) + 2 * a

    monkeypatch.setitem(TABLE, "relu", relu)
    with pytest.raises(UserError, match=r"^The gradient of 'loss' differs"):
        check_loss(*problem(perceptron))


def test_a_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, num_labels=3,
    )  # fmt: skip
    module = transformers.BertForSequenceClassification(settings).double().eval()
    found = split(module, upper="classifier.*")

    def loss(x, y, batch):
        words, labels = batch
        out = found(x, y, input_ids=words, attention_mask=(words != 0).long())
        return F.cross_entropy(out.logits, labels)

    check_loss(loss, (found.y, found.x, (WORDS, LABELS)), tolerance=1e-9)


def test_one_trace_serves_a_shape():
    loss, (x, y, (images, labels)) = problem(perceptron)
    calls = []

    def counted(*arguments):
        calls.append(1)
        return loss(*arguments)

    traced = from_torch(counted)
    values = [
        float(jax.jit(lambda *given: traced(*given))(x, y, (images[rows], labels[rows])))
        for rows in ([0], [0], [0, 1])  # JAX traces each of them
    ]
    assert len(calls) == 2
    assert values[0] == values[1] != values[2]


def test_a_nan_is_found():
    """A gradient that is NaN in JAX alone is a difference, next to one that agrees."""
    from simfbo.torch._check import _difference

    good, bad = np.ones(2), np.array([1.0, np.nan])
    assert _difference((good, bad), (torch.ones(2), torch.ones(2))) == np.inf
    assert _difference((good, good), (torch.ones(2), torch.tensor([1.0, np.nan]))) == 0


def test_weights_that_change_between_traces_are_refused():
    frozen = nn.Linear(3, 1).double()
    loss = from_torch(lambda x, y, batch: (frozen(batch) * y).mean())
    loss(None, np.ones(1), np.ones((2, 3)))
    with torch.no_grad():
        frozen.weight.zero_()
    with pytest.raises(UserError, match="have changed since it was first traced"):
        loss(None, np.ones(1), np.ones((4, 3)))


def test_other_threads_train_while_one_traces():
    dropout, failures, done = nn.Dropout(0.5), [], threading.Event()

    def train():
        while not done.is_set():
            try:
                dropout(torch.ones(3))
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        from_torch(problem(perceptron)[0])(*problem(perceptron)[1])
    finally:
        done.set()
        thread.join()
    assert failures == []
