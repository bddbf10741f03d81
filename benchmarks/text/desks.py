"""Sixteen desks that label texts, four for each source, and how far each of them is wrong."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from bert import Bert, pooled
from opinions import SOURCES, Opinion
from wordpiece import encode

KINDS = ("panel", "one rater", "coin", "reversed")
Rows = list[np.ndarray]
_CHUNK = 250


class Sizes(NamedTuple):
    """How many texts of each source there are for what."""

    desk: int = 250
    trusted: int = 48
    test: int = 350

    @property
    def source(self) -> int:
        """All texts of a source."""
        return len(KINDS) * self.desk + self.trusted + self.test


class Texts(NamedTuple):
    """Texts as numbers.

    Attributes:
        states: [N, L, width], after all layers but the last.
        embeddings: [N, width], those of the whole model.
        mask: [N, L], 1 where there is a piece of the text.
        truth: [N], 1 if its mean rating is positive.
        opinions: the texts and ratings.
    """

    states: np.ndarray
    embeddings: np.ndarray
    mask: np.ndarray
    truth: np.ndarray
    opinions: Sequence[Opinion]


class World(NamedTuple):
    """Who holds which texts, and what they say of them.

    Attributes:
        labels: [N], those of the desks; the truth for all other texts.
        desks: the rows that each desk labelled.
        trusted: each desk's trusted rows, which are not among those it labelled.
        test: rows for tests.
        kinds: each desk's kind and source.
    """

    labels: np.ndarray
    desks: Rows
    trusted: Rows
    test: np.ndarray
    kinds: Sequence[tuple[str, str]]

    def wrong(self, truth: np.ndarray) -> np.ndarray:
        """Return the share of wrong labels of every desk."""
        return np.array([np.mean(self.labels[own] != truth[own]) for own in self.desks])


def chosen(opinions: Sequence[Opinion], sizes: Sizes) -> list[Opinion]:
    """Return as many texts of every source, whose mean rating is at least 1 in size."""
    rng, found = np.random.default_rng(0), []
    for source in SOURCES:
        clear = [one for one in opinions if one.source == source and abs(one.mean) >= 1]
        picks = rng.permutation(len(clear))[: sizes.source]
        found += [clear[i] for i in picks]
    return found


def read(bert: Bert, opinions: Sequence[Opinion], pieces: Mapping[str, int], length: int) -> Texts:
    """Return texts as the model sees them."""
    ids, mask = encode([one.text for one in opinions], pieces, length)
    truth = np.array([one.mean > 0 for one in opinions]).astype(np.int32)
    starts = range(0, len(ids), _CHUNK)
    parts = [_states(bert, ids[i : i + _CHUNK], mask[i : i + _CHUNK]) for i in starts]
    states, embeddings = map(np.concatenate, zip(*parts, strict=True))
    return Texts(states, embeddings, mask, truth, opinions)


@torch.no_grad()
def _states(bert: Bert, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the states after all layers but the last, which no client changes, and embeddings."""
    given = torch.from_numpy(mask)
    states = bert(torch.from_numpy(ids).long(), given, layers=len(bert.layers) - 1)
    return states.numpy(), pooled(bert.layers[-1](states, given), given).numpy()


def world(opinions: Sequence[Opinion], truth: np.ndarray, sizes: Sizes, seed: int) -> World:
    """Deal texts to desks, let the desks label them, and set trusted and test texts apart."""
    rng = np.random.default_rng(seed)
    labels, desks, trusted, test = truth.copy(), [], [], []
    for i in range(len(SOURCES)):
        rows = i * sizes.source + rng.permutation(sizes.source)
        own, known, rest = np.split(rows, [len(KINDS) * sizes.desk, -sizes.test])
        for kind, part in zip(KINDS, np.split(own, len(KINDS)), strict=True):
            labels[part] = _LABELLED[kind]([opinions[row] for row in part], truth[part], rng)
            desks.append(part)
        trusted += np.split(known, len(KINDS))
        test.append(rest)
    kinds = [(kind, source) for source in SOURCES for kind in KINDS]
    return World(labels, desks, trusted, np.concatenate(test), kinds)


def _one_rater(own: Sequence[Opinion], truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return one person's view of each text; a coin where that is neutral."""
    views = np.array([rng.choice(one.ratings) for one in own])
    return np.where(views == 0, rng.integers(0, 2, len(own)), views > 0)


_Labels = Callable[[Sequence[Opinion], np.ndarray, np.random.Generator], np.ndarray]
_LABELLED: Mapping[str, _Labels] = {
    "panel": lambda own, truth, rng: truth,
    "one rater": _one_rater,
    "coin": lambda own, truth, rng: rng.integers(0, 2, len(truth)),
    "reversed": lambda own, truth, rng: 1 - truth,
}
