"""Every operator of the table against PyTorch: value, gradient and Hessian product.

Losses are grouped so that a group compiles one program.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from simfbo.core.problem import BilevelProblem, hvp
from simfbo.torch import from_torch
from simfbo.torch._graph import form_of
from simfbo.torch._loss import TorchFunction
from simfbo.torch.operators import TABLE

RNG = np.random.default_rng(0)
TOLERANCE = 1e-9


def some(*shape):
    return RNG.normal(size=shape)


LABELS = np.array([0, 2, 1, -100])
SHARES = np.exp(some(4, 3)) / np.exp(some(4, 3)).sum()
WORDS = RNG.integers(0, 11, (4, 5))


def waves(out):
    """Return a scalar in which every entry of an output counts differently."""
    out = out[0] if isinstance(out, tuple) else out
    return (out.sin() * torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()).mean()


def layer(module, *inputs):
    """Return the loss of a module's parameters and inputs, with arrays to start from."""
    module = module.double().eval()
    names = [name for name, _ in module.named_parameters()]
    start = [0.5 * some(*p.shape) for p in module.parameters()]

    def loss(*arguments):
        own = dict(zip(names, arguments))
        return waves(torch.func.functional_call(module, own, arguments[len(names) :]))

    return loss, (*start, *inputs)


def as_one(cases):
    """Return all losses as one function of {case: arguments}."""
    return TorchFunction(
        lambda given: torch.stack([loss(*given[name]) for name, (loss, _) in cases.items()])
    )


def on(array, **losses):
    """Return cases that share their argument."""
    return {name: (loss, (array,)) for name, loss in losses.items()}


def activations():
    modules = [
        nn.ELU(), nn.CELU(), nn.SELU(), nn.ReLU(), nn.ReLU6(), nn.Hardtanh(), nn.Hardswish(),
        nn.LeakyReLU(), nn.PReLU(), nn.Softplus(), nn.Softsign(), nn.Tanhshrink(), nn.Softshrink(),
        nn.Hardshrink(), nn.LogSigmoid(), nn.Mish(), nn.SiLU(), nn.GELU(), nn.GELU("tanh"),
        nn.Threshold(0.1, 0.2), nn.Softmin(1), nn.Softmax(1), nn.LogSoftmax(1), nn.GLU(),
    ]  # fmt: skip
    return {str(module): layer(module, 2 * some(4, 6)) for module in modules}


def functions():
    a, b = some(4, 3), SHARES
    pair = {
        "atan2": torch.atan2, "hypot": torch.hypot, "maximum": torch.maximum, "fmax": torch.fmax,
        "minimum": torch.minimum, "fmin": torch.fmin, "pow": lambda a, b: (a.abs() + 0.1) ** b,
        "fmod": lambda a, b: torch.fmod(a, 0.7) * b, "remainder": lambda a, b: (a % 0.7) * b,
        "copysign": torch.copysign, "xlogy": lambda a, b: torch.xlogy(b, a.abs() + 0.1),
        "floor": lambda a, b: (a.floor() + a.ceil() + a.round() + a.trunc() + a.sign()) * b,
        "scalar": lambda a, b: 2 ** a + 3 - a * 2 + (1 / (b + 1)) ** 3.0 + b ** -2,
        "compare": lambda a, b: (a > b) * a + (a <= b) * b * ((a == b) | ~(a != b)) + a * (a >= 0),
        "bits": lambda a, b: a * ((torch.arange(3) & 1) ^ (torch.arange(3) | 2)) * (b < 2),
        "logic": lambda a, b: a * torch.logical_xor(a > 0, torch.logical_and(b > 0.1, a > b)),
        "or": lambda a, b: a * torch.logical_or(a > 0, b > 0.1) * torch.logical_not(a > 1),
        "divide": lambda a, b: a * (torch.arange(3) // 2) + b * torch.div(
            torch.arange(3), 2, rounding_mode="trunc") + a * (torch.arange(3) / 2),
        "types": lambda a, b: a.float().double() * torch.tensor([1, 2, 3]) + torch.tensor(2.0) * b,
        "finite": lambda a, b: torch.nan_to_num(a) + a * (a.isnan() | a.isinf()),
        "lerp": lambda a, b: torch.lerp(a, b, 0.3) + torch.addcdiv(a, b, b + 1),
    }  # fmt: skip
    single = {
        name: getattr(torch, name)
        for name in ("exp", "exp2", "expm1", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asinh",
                     "atan", "erf", "erfc", "sigmoid", "abs", "neg", "square", "sinc", "frac")
    }  # fmt: skip
    positive = {
        name: lambda a, f=getattr(torch, name): f(a.abs() + 1.1)
        for name in ("log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "acosh",
                     "lgamma", "digamma")
    }  # fmt: skip
    inside = {
        name: lambda a, f=getattr(torch, name): f(a.tanh() * 0.9)
        for name in ("asin", "acos", "atanh", "erfinv")
    }
    found = {name: (lambda a, b, f=f: waves(f(a, b)), (a, b)) for name, f in pair.items()}
    for name, f in {**single, **positive, **inside}.items():
        found[name] = (lambda a, f=f: waves(f(a)), (a,))
    return found


def losses():
    right, shares = torch.tensor(LABELS), torch.tensor(SHARES)
    weight = torch.tensor([1.0, 2.0, 3.0]).double()
    return on(
        some(4, 3),
        plain=lambda a: F.cross_entropy(a, right),
        total=lambda a: F.cross_entropy(a, right, reduction="sum", label_smoothing=0.1),
        weighted=lambda a: F.cross_entropy(a, right, weight=weight),
        shares=lambda a: F.cross_entropy(a, shares, label_smoothing=0.1),
        pixels=lambda a: F.cross_entropy(a.reshape(1, 3, 4), torch.tensor([[0, 1, 2, 0]])),
        each=lambda a: waves(F.cross_entropy(a, right, reduction="none")),
        binary=lambda a: F.binary_cross_entropy_with_logits(a, shares, pos_weight=weight),
        sigmoid=lambda a: F.binary_cross_entropy(torch.sigmoid(a), shares),
        nll=lambda a: F.nll_loss(F.log_softmax(a, 1), right, weight),
        kl=lambda a: F.kl_div(F.log_softmax(a, 1), shares, reduction="batchmean"),
        mse=lambda a: F.mse_loss(a, shares), l1=lambda a: F.l1_loss(a, shares),
        smooth=lambda a: F.smooth_l1_loss(a, shares), huber=lambda a: F.huber_loss(a, shares),
        poisson=lambda a: F.poisson_nll_loss(a, shares),
        cosine=lambda a: F.cosine_embedding_loss(a, shares, torch.tensor([1, -1, 1, 1])),
        triplet=lambda a: F.triplet_margin_loss(a, shares, a.flip(0)),
        margin=lambda a: F.soft_margin_loss(a, shares.sign()),
        several=lambda a: F.multilabel_soft_margin_loss(a, shares.round()),
    )  # fmt: skip


def arrays():
    shares, eye = torch.tensor(SHARES), torch.eye(3).double()
    rows, ones = torch.tensor([0, 1, 1, 2]), torch.ones(4, 5).double()

    def assigned(a):
        b = a.clone()
        b[0] = 1.0
        b[:, 1] *= 2
        b[1:3, ::2] = 0.5
        return b.pow(2).sum()

    def ungraded(a):
        with torch.no_grad():
            weight = a * 2
        return (weight * a * a).sum()

    return on(
        some(4, 3),
        assigned=assigned, ungraded=ungraded, detached=lambda a: (a.detach() * a * a).sum(),
        index=lambda a: a[[0, 2], [1, 1]].sum() + a[:, [0, 2]].prod() + a[rows].pow(2).sum(),
        put=lambda a: waves(ones.T.index_put((rows,), a.repeat(1, 2)[:, :4], accumulate=True)),
        add=lambda a: waves(ones.scatter_add(1, rows[None, :3].repeat(4, 1), a)),
        scatter=lambda a: waves(ones.scatter(1, torch.tensor([[4, 0, 2]] * 4), a)),
        value=lambda a: waves(a.scatter(1, torch.tensor([[2]]), 0.3)),
        gather=lambda a: waves(a.gather(0, torch.tensor([[3, 1], [0, 0]]))),
        select=lambda a: waves(a.index_select(1, torch.tensor([2, 0]))) + a[1, 2] * a[-1, 0],
        extremes=lambda a: a.max(1).values.prod() + a.min(0)[0].sum() * a.max()
        + a.amin() + a.amax(1).prod(),
        places=lambda a: waves(a * a.argmax(1, keepdim=True))
        + a.flatten().gather(0, a.argmin()[None]).sum() ** 2,
        top=lambda a: a.topk(2, 1)[0].pow(2).sum() + waves(a.topk(2, 0, largest=False)[0]),
        sort=lambda a: waves(a.sort(0, descending=True)[0]),
        moments=lambda a: a.std(0).sum() + a.var() + torch.var_mean(a, 1)[0].prod() + a.mean(),
        norms=lambda a: a.norm() + a.norm(p=1) + waves(a.norm(dim=1, p=3)) + a.norm(float("inf"))
        + torch.linalg.vector_norm(a, 0),
        flat=lambda a: (a * 0).norm() + F.normalize(a * 0, dim=1).sum() + a.sum(),
        running=lambda a: a.cumsum(0).prod() + a.cumprod(1).sum(),
        triangle=lambda a: waves((a @ a.T).tril() - 2 * (a @ a.T).triu(1)) + torch.trace(a @ a.T),
        around=lambda a: waves(a.roll(1, 0) * a.flip(1)) + waves(a.repeat(2, 2)) + waves(a.tile(2)),
        truth=lambda a: a.sum() * (a > 3).any() + waves(a * (a > -9).all(1, keepdim=True)),
        one_hot=lambda a: waves(F.one_hot(torch.tensor([0, 1, 2, 1]), 3) * a),
        pads=lambda a: waves(F.pad(a, (1, 2, -1, 0), value=0.5)) + waves(
            F.pad(a[None], (1, 1), "reflect")) + waves(F.pad(a[None], (2, 1), "replicate")),
        stack=lambda a: waves(torch.stack([a, a * 2], 1).unbind(1)[1].chunk(2, 0)[0]),
        shapes=lambda a: waves(a.movedim(0, 1).contiguous().view(-1)[::2] + a[:1].squeeze()[0]),
        wide=lambda a: waves(a.unsqueeze(0).expand(2, -1, -1)) + waves(a.split([1, 3])[1]),
        written=lambda a: waves(torch.select_scatter(a, a[0] * 2, 0, 1) + torch.ops.aten.alias(a)),
        window=lambda a: waves(a.unfold(0, 2, 1)) + waves(torch.diag(a @ a.T)),
        products=lambda a: torch.einsum("ij,kj,ik->", a, a, a @ a.T) + (a @ a[0]).sum()
        + waves(torch.kron(a, a)) + torch.cross(a, a.roll(1, 0), dim=1).sum(),
        batches=lambda a: waves(torch.baddbmm((a @ a.T)[None], a[None], a.T[None], beta=0.5))
        + waves(torch.addmm(a @ a.T, a, a.T, beta=0.5, alpha=2))
        + waves(torch.addmv(a[:, 0], a, a[0])) + torch.bmm(a[None], a.T[None]).sum(),
        clamp=lambda a: a.clamp(-0.3, 0.3).pow(2).sum() + a.clamp(min=shares).sum(),
        solve=lambda a: waves(torch.linalg.solve(a.T @ a + eye, a.T)) + torch.linalg.solve(
            a.T @ a + eye, a[0]).sum() + waves(torch.linalg.solve(a.T @ a + eye, a, left=False)),
        determinant=lambda a: torch.logdet(a.T @ a + eye) + torch.linalg.slogdet(a.T @ a)[1],
        cholesky=lambda a: waves(torch.linalg.cholesky(a.T @ a + eye)) + torch.linalg.inv(
            a.T @ a + eye).sum(),
        buckets=lambda a: waves(a * torch.bucketize(shares, torch.tensor([0.2, 0.5]).double())),
        grid=lambda a: waves(F.grid_sample(a.reshape(1, 1, 4, 3), shares[None, None, :, :2])),
        norm=lambda a: waves(F.rms_norm(a, (3,))) + waves(F.instance_norm(a.T[None])),
        numbers=lambda a: (a * torch.zeros_like(a).fill_(2.0) * torch.full((3,), 0.5)).pow(2).sum()
        + (a * torch.linspace(0, 1, 3) + torch.empty_like(a).copy_(a)).pow(3).sum(),
    )  # fmt: skip


def kinks():
    """Return what is usually wrong: derivatives at zeros, bounds, ties and saturated values."""
    one = torch.ones(3).double()
    found = {
        "zero": on(
            np.zeros(3),
            bce=lambda a: F.binary_cross_entropy_with_logits(a, one),
            l1=lambda a: F.l1_loss(a, 0 * one) + 0.1 * a.abs().sum() + a.norm(p=1),
            logsigmoid=lambda a: F.logsigmoid(a).sum(), softsign=lambda a: F.softsign(a).sum(),
            huber=lambda a: F.huber_loss(a, 0 * one) + F.smooth_l1_loss(a, 0 * one),
            sharp=lambda a: F.smooth_l1_loss(a, 0 * one, beta=0.0), relu=lambda a: F.relu(a).sum(),
            power=lambda a: (a[:, None] ** torch.arange(4)).sum() + (a ** (2 * one)).sum(),
            line=lambda a: (a**one).sum() + (a**2).sum(), sinc=lambda a: torch.sinc(a).sum(),
            root=lambda a: a.norm(p=0.5) + a.norm() + a.norm(p=3) + a.std() + (a**2).sum(),
        ),
        "one": on(
            np.ones(3),
            ties=lambda a: torch.fmax(a, one).sum() + 2 * torch.fmin(a, one).sum() + a.max(),
            both=lambda a: torch.maximum(a, one).sum() + torch.minimum(a, 2 * one).prod(),
            clamp=lambda a: (a.clamp(-1, 1) * a).sum() + (F.hardtanh(a) * a).sum(),
            exponent=lambda a: ((2 * one) ** a).sum() + (a**a).sum(),
            std=lambda a: a.std() + (a**2).sum(), first=lambda a: a.min(0).values + a.amax(),
        ),
        "far": on(
            np.array([20.0, 3.0, -3.0]),
            bce=lambda a: F.binary_cross_entropy(torch.sigmoid(2 * a), one),
            hard=lambda a: F.hardswish(a).sum() + F.relu6(a + 3).sum(),
            whole=lambda a: (a * torch.div(torch.tensor([-7, 7, -6]), torch.tensor([2, -2, 3]),
                                           rounding_mode="trunc")).sum(),
        ),
    }  # fmt: skip
    masked = some(4, 3), np.array([[True, False, True]] * 4)

    def written(a, mask):
        b = a * 2
        b[mask] = 0.5
        return waves(b)

    found["mask"] = {"written": (written, masked)}
    found["matrix"] = on(
        some(3, 3), cholesky=lambda a: waves(torch.linalg.cholesky(a * 0.1 + torch.eye(3)))
    )
    found["probability"] = on(
        np.array([0.2, 0.5, 0.9]),
        target=lambda a: F.binary_cross_entropy(a.roll(1), a),
        weighted=lambda a: F.binary_cross_entropy(a, a.detach(), one * 2, reduction="sum"),
    )
    return {f"{at}, {name}": case for at, cases in found.items() for name, case in cases.items()}


def convolutions():
    images = some(2, 4, 7, 6)
    settings = [
        {}, {"stride": 2}, {"dilation": 2}, {"groups": 2}, {"groups": 4}, {"padding": "same"},
        {"groups": 2, "stride": 2, "dilation": 2, "padding": 2}, {"padding": 1, "bias": False},
        {"padding_mode": "circular", "padding": 1}, {"kernel_size": 1, "stride": 2},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
    ]  # fmt: skip
    found = {
        f"conv {one}": layer(nn.Conv2d(4, 8, **{"kernel_size": 3, **one}), images)
        for one in settings
    }
    for one in ({}, {"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2, "dilation": 2}):
        found[f"transposed {one}"] = layer(nn.ConvTranspose2d(4, 6, 3, **one), some(2, 4, 4, 5))
    found["depthwise"] = layer(nn.Conv2d(4, 4, 3, groups=4), images)
    found["1d"] = layer(nn.Conv1d(4, 6, 3, stride=2, padding=1), some(2, 4, 9))
    found["3d"] = layer(nn.Conv3d(2, 3, 2), some(2, 2, 3, 4, 3))
    return found


def pooling():
    modules = [
        nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(3, 1, dilation=2), nn.MaxPool2d((2, 3)), nn.AvgPool2d(3, 2, 1),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(2, divisor_override=3),
        nn.AdaptiveAvgPool2d((3, 4)), nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1),
        nn.Upsample(scale_factor=2), nn.Upsample(size=(5, 11), mode="bilinear", align_corners=True),
        nn.Upsample(scale_factor=1.5, mode="bicubic"), nn.PixelShuffle(2), nn.Unfold(3),
        nn.LocalResponseNorm(2), nn.ReflectionPad2d(1), nn.ReplicationPad2d(2), nn.CircularPad2d(1),
    ]  # fmt: skip
    found = {str(module): layer(module, some(2, 4, 7, 5)) for module in modules}
    for module in (nn.MaxPool1d(3, 2), nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(4)):
        found[str(module)] = layer(module, some(2, 4, 6))
    found["3d"] = layer(nn.Sequential(nn.MaxPool3d(2, 1), nn.AvgPool3d(2)), some(1, 2, 4, 4, 4))
    for module in (nn.AdaptiveAvgPool3d((2, 3, 2)), nn.AdaptiveMaxPool3d(2)):
        found[str(module)] = layer(module, some(1, 2, 4, 4, 4))
    found["no batch"] = layer(nn.MaxPool2d(2), some(3, 6, 6))
    return found


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.words = nn.Embedding(11, 4, padding_idx=3)
        self.layers = getattr(nn, kind)(4, 3, 2, **options)

    def forward(self, words):
        out, last = self.layers(self.words(words))
        return torch.cat([out.flatten(), (last[0] if isinstance(last, tuple) else last).flatten()])


def layers():
    half = torch.tensor(WORDS) == 0
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    found = {
        "lstm": layer(Recurrent("LSTM", batch_first=True), WORDS),
        "gru": layer(Recurrent("GRU", bidirectional=True, bias=False), WORDS),
        "rnn": layer(Recurrent("RNN", batch_first=True, bidirectional=True), WORDS),
        "relu rnn": layer(Recurrent("RNN", nonlinearity="relu"), WORDS),
        "layer norm": layer(nn.LayerNorm([3, 6]), some(2, 3, 6)),
        "group norm": layer(nn.GroupNorm(2, 4), some(2, 4, 3, 3)),
        "batch norm": layer(nn.BatchNorm2d(4), some(2, 4, 3, 3)),
        "instance norm": layer(nn.InstanceNorm2d(4, affine=True), some(2, 4, 3, 3)),
        "bilinear": layer(nn.Bilinear(3, 2, 4), some(5, 3), some(5, 2)),
        "encoder": layer(encoder, some(2, 5, 8)),
        "attention": layer(nn.MultiheadAttention(8, 2, batch_first=True), *some(3, 2, 5, 8)),
    }
    q = some(3, 4, 4, 5, 2)

    def attend(**options):
        return lambda q, k, v: waves(F.scaled_dot_product_attention(q, k, v, **options))

    found["causal"] = attend(is_causal=True), q
    found["masked"] = attend(attn_mask=half[:, None, None]), q
    found["blind row"] = attend(attn_mask=torch.eye(5)[[0, 0, 1, 1, 1]] > 0), q
    found["added mask"] = attend(attn_mask=torch.arange(25.0).reshape(5, 5).double(), scale=0.3), q
    found["few heads"] = attend(enable_gqa=True), (q[0], q[1][:, :2], q[2][:, :2])
    return found


def bags():
    """Return bags of embeddings, of which PyTorch has no second derivative, and plain sums."""
    offsets = np.array([0, 3, 3, 9])

    def mean(table, words):
        some = (words != 0)[..., None]
        return waves((table[words] * some).sum(1) / some.sum(1).clamp(min=1))

    tables = some(11, 6), WORDS
    return {
        "mean": (lambda t, w: waves(F.embedding_bag(w, t, mode="mean", padding_idx=0)), tables),
        "plain": (mean, tables),
        "sum": (lambda t, w: waves(F.embedding_bag(w, t, mode="sum")), tables),
        "offsets": (lambda t, w, o: waves(F.embedding_bag(w, t, o, mode="sum")),
                    (some(11, 6), WORDS.ravel(), offsets)),
        "distances": (lambda a: torch.cdist(a, a.flip(0) * 2).sum(), (some(4, 3),)),
        "hardsigmoid": (lambda a: waves(F.hardsigmoid(a)), (some(4, 3),)),
    }  # fmt: skip


GROUPS = (activations, functions, losses, arrays, kinks, convolutions, pooling, layers)


@cache
def traced(group):
    """Return a group's losses, and all of them as one function."""
    global RNG
    RNG = np.random.default_rng(0)
    cases = group()
    return cases, as_one(cases)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_group(group, differences):
    assert differences(*traced(group), TOLERANCE) == {}


def test_first_order_where_pytorch_has_no_second(differences):
    assert differences(*traced(bags), TOLERANCE, second_order=False) == {}


def test_a_bag_has_the_second_derivative_of_its_plain_sum():
    cases, _ = traced(bags)
    table, words = cases["mean"][1]
    way = np.random.default_rng(1).normal(size=table.shape)
    products = []
    for name in ("mean", "plain"):
        loss = from_torch(lambda x, y, batch, f=cases[name][0]: f(y, batch))
        problem = BilevelProblem(loss, loss)
        products.append(jax.jit(lambda y, v, p=problem: hvp(p, None, y, v, words))(table, way))
    np.testing.assert_allclose(*products, rtol=1e-10, atol=1e-12)


def test_every_operator_of_the_table_is_compared():
    used = set()
    for cases, function in map(traced, (*GROUPS, bags)):
        given = {name: tuple(map(jnp.asarray, arrays)) for name, (_, arrays) in cases.items()}
        leaves, structure = jax.tree.flatten((given,))
        used |= {node.operator for node in function.graph(structure, form_of(leaves)).nodes}
    assert " ".join(sorted(set(TABLE) - used)) == ""
