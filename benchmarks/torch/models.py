"""The networks of this folder, in PyTorch."""

from itertools import pairwise

import torch
from torch import nn


class Perceptron(nn.Module):
    """784-200-10, with the pixels' scale inside."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation
        self.body = nn.Linear(784, 200)
        self.head = nn.Linear(200, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return class scores."""
        scaled = (images.float() - self.mean) / self.deviation
        return self.head(torch.relu(self.body(scaled.flatten(1))))


class LeNet(nn.Module):
    """Two 5x5 convolutions with pooling, then 120, 84 and 10, for [N, 32, 32, 3] bytes."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(84, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return class scores."""
        scaled = (images.float() - self.mean) / self.deviation
        return self.head(self.body(scaled.permute(0, 3, 1, 2)))


class Block(nn.Module):
    """Two 3x3 convolutions with group normalisation and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.GroupNorm(4, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs),
        )  # fmt: skip
        around = inputs == outputs and stride == 1
        self.around = nn.Identity() if around else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return torch.relu(self.body(images) + self.around(images))


class ResNet(nn.Module):
    """A small ResNet with GroupNorm for [N, 32, 32, 3] bytes: a stem, then one block per width."""

    def __init__(self, mean: float, deviation: float, widths: tuple[int, ...] = (16, 32, 64)):
        super().__init__()
        self.mean, self.deviation = mean, deviation
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(4, widths[0]), nn.ReLU(),
        )  # fmt: skip
        blocks = [Block(widths[0], widths[0], 1)]
        blocks += [Block(a, b, 2) for a, b in pairwise(widths)]
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(widths[-1], 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return class scores."""
        scaled = (images.float() - self.mean) / self.deviation
        found = self.blocks(self.stem(scaled.permute(0, 3, 1, 2)))
        return self.classifier(found.mean((2, 3)))
