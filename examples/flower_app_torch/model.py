"""The model and the losses, in PyTorch. Run this file after a change: it writes problem.json.

Only this file needs PyTorch. Server and nodes run from problem.json.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from simfbo.torch import check_loss, from_torch, save, split

FILE = Path(__file__).parent / "problem.json"
BATCH_SIZE = 32


class Net(torch.nn.Module):
    """One hidden layer, which clients learn together, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(64, 64)
        self.classifier = torch.nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return class scores."""
        return self.classifier(torch.tanh(self.hidden(images)))


torch.manual_seed(0)
model = split(Net(), upper="hidden.*", lower="classifier.*")


def upper(x, y, batch):
    """Return the loss on validation images: what the representation x is for."""
    images, labels = batch
    return F.cross_entropy(model(x, y, images), labels)


def lower(x, y, batch):
    """Return the loss on training images, strongly convex in the head y."""
    return upper(x, y, batch) + 0.01 * sum((weights**2).sum() for weights in y.values())


def accuracy(x, y, batch):
    """Return the share of images whose class is found."""
    images, labels = batch
    return (model(x, y, images).argmax(1) == labels).float().mean()


def main() -> None:
    """Check the losses and write them."""
    functions = {"upper": upper, "lower": lower, "accuracy": accuracy}
    rng = np.random.default_rng(0)
    images, labels = rng.random((BATCH_SIZE, 64), "float32"), rng.integers(10, size=BATCH_SIZE)
    batch = images, labels.astype("int32")
    print(check_loss(lower, (model.x, model.y, batch)))
    traced = {name: from_torch(function) for name, function in functions.items()}
    save(FILE, traced, model.x, model.y, batch, sizes=[BATCH_SIZE])
    print(f"Wrote {FILE.name}, {FILE.stat().st_size / 1000:.0f} kB.")


if __name__ == "__main__":
    main()
