"""200 randomly composed losses: value, gradient and Hessian product are PyTorch's."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from simfbo.torch._loss import TorchFunction

ROWS, WIDTH, BATCH = 4, 6, 20

UNARY = [
    torch.tanh, torch.sin, torch.sigmoid, F.softplus, F.gelu, F.silu, F.elu, F.relu, torch.atan,
    lambda a: (1 + a * a).sqrt(), lambda a: (1 + a.abs()).log(), lambda a: a / (1 + a * a),
    lambda a: (-a * a).exp(), lambda a: a.clamp(-0.7, 0.9), lambda a: F.leaky_relu(a, 0.2),
    lambda a: F.softmax(a, -1), lambda a: F.log_softmax(a, 0), lambda a: F.layer_norm(a, (WIDTH,)),
    lambda a: a.flip(0), lambda a: a.roll(2, 1), lambda a: a.cumsum(1), lambda a: a - a.mean(0),
    lambda a: a.sort(1).values, lambda a: a.T.reshape(ROWS, WIDTH), lambda a: a * a.detach(),
    lambda a: F.pad(a, (1, 0))[:, :-1], lambda a: torch.cat([a[:, 3:], a[:, :3]], 1),
    lambda a: a[[1, 0, 3, 3]], lambda a: a.masked_fill(a > 1, 0.5), lambda a: torch.where(
        a > 0, a, 0.1 * a), lambda a: a.expand(2, ROWS, WIDTH).prod(0), lambda a: a.amax(
        1, keepdim=True) * a, lambda a: F.normalize(a, dim=1), lambda a: a.repeat_interleave(
        2, 0)[::2], lambda a: F.avg_pool1d(a[None], 3, 1, 1)[0], lambda a: F.max_pool1d(
        a[None], 2).repeat(1, 1, 2)[0], lambda a: a.gather(1, a.argsort(1)), lambda a: F.group_norm(
        a, 2), lambda a: a.var(0) + a, lambda a: F.hardtanh(a, -0.8, 0.8) + 0.3 * a,
]  # fmt: skip
BINARY = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda a, b: a / (1 + b * b),
    lambda a, b: a @ b.T @ a / WIDTH, lambda a, b: torch.einsum("ij,kj->ik", a, b)[:, :1] * b,
    lambda a, b: torch.lerp(a, b, 0.3), lambda a, b: torch.where(b > 0, a, b), torch.hypot,
    lambda a, b: F.linear(a, b)[:, :2].repeat(1, 3), lambda a, b: torch.addcmul(a, a, b, value=0.5),
    lambda a, b: F.scaled_dot_product_attention(a[None], b[None], a[None])[0],
    lambda a, b: F.conv1d(a[None], b[:, None, :3].repeat(1, ROWS, 1) / 3, padding=1)[0],
]  # fmt: skip
ENDS = [
    lambda a, t: a.pow(2).mean(), lambda a, t: a.logsumexp(1).sum(), lambda a, t: a.norm(),
    lambda a, t: F.cross_entropy(a, t), lambda a, t: F.cross_entropy(a, t, label_smoothing=0.1),
    lambda a, t: F.huber_loss(a, a.roll(1, 0)), lambda a, t: F.binary_cross_entropy_with_logits(
        a, a.detach().sigmoid()), lambda a, t: F.smooth_l1_loss(a, torch.ones_like(a)),
    lambda a, t: F.nll_loss(F.log_softmax(a, 1), t), lambda a, t: (a * F.one_hot(t, WIDTH)).sum(),
    lambda a, t: a.std() + a.max(), lambda a, t: F.cosine_similarity(a, a.flip(1)).mean(),
]  # fmt: skip


def plan(seed):
    """Return two to five choices of an operator and its arguments, and that of the last one."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(rng.integers(2, 6)):
        pool = BINARY if rng.random() < 0.4 else UNARY
        steps.append((pool, rng.integers(len(pool)), rng.integers(10**6, size=2)))
    return steps, rng.integers(len(ENDS))


def composed(seed):
    """Return a loss of two matrices and labels, of two to five random operators."""
    steps, end = plan(seed)

    def loss(a, b, labels):
        values = [a, b]
        for pool, choice, (i, j) in steps:
            given = values[i % len(values)], values[j % len(values)]
            values.append(pool[choice](*given[: 2 if pool is BINARY else 1]))
        return ENDS[end](values[-1] + 0.1 * values[-2], labels)

    return loss


def cases(start, dtype):
    """Return 20 losses, and all of them as one function."""
    rng = np.random.default_rng(start)
    found = {}
    for seed in range(start, start + BATCH):
        a, b = rng.normal(size=(2, ROWS, WIDTH)).astype(dtype)
        found[f"loss {seed}"] = composed(seed), (a, b, rng.integers(WIDTH, size=ROWS))
    together = TorchFunction(
        lambda given: torch.stack([loss(*given[name]) for name, (loss, _) in found.items()])
    )
    return found, together


@pytest.mark.parametrize(
    "start",
    [
        0,
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(BATCH, 200, BATCH)),
    ],
)
def test_double_precision(start, differences):
    assert differences(*cases(start, "float64"), 1e-9) == {}


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(BATCH, 200, BATCH))]
)
def test_single_precision(start, differences):
    assert differences(*cases(start, "float32"), 1e-4) == {}


def test_the_losses_use_every_operator():
    plans = [plan(seed) for seed in range(200)]
    for pool in (UNARY, BINARY):
        used = {choice for steps, _ in plans for one, choice, _ in steps if one is pool}
        assert used == set(range(len(pool)))
    assert {end for _, end in plans} == set(range(len(ENDS)))
