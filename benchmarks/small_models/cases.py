"""The cases of this benchmark: a problem, its implementations, and how many rounds a turn takes."""

from typing import Any

Case = dict[str, Any]
BOTH = ("now", "before")


def quadratic(clients: int, dims: tuple[int, int], rounds: int) -> Case:
    """Return the case of a quadratic."""
    names = (*BOTH, "numpy", "numpy-affine", "scan")
    shape = {"problem": "quadratic", "dims": dims, "clients": clients}
    return {**shape, "implementations": names, "rounds": rounds}


def network(model: str, tau: int | str, threads: int, rounds: int) -> Case:
    """Return the case of a network of benchmarks/round_speed."""
    shape = {"problem": model, "clients": 100, "cohort": 10, "tau": tau, "radius": 10.0}
    return {**shape, "threads": threads, "implementations": BOTH, "rounds": rounds}


SMALL: dict[str, Case] = {
    "quadratic-20-4x6": quadratic(20, (4, 6), 2000),
    "quadratic-20-50x50": quadratic(20, (50, 50), 1000),
    "quadratic-1000-4x6": quadratic(1000, (4, 6), 400),
    "quadratic-10000-4x6": quadratic(10_000, (4, 6), 60),
    "ridge-160": {
        "problem": "regularisation", "clients": 160, "rounds": 400, "implementations": BOTH,
    },
    "logistic-20": {
        "problem": "classification", "clients": 20, "rounds": 100, "implementations": BOTH,
    },
    "ridge-100000": {
        "problem": "ridge", "clients": 100_000, "rows": 10, "rounds": 5,
        "implementations": ("now",),
    },
    "long-run": {
        "problem": "quadratic", "dims": (4, 6), "clients": 20, "rounds": 10_000, "every": 100,
        "implementations": (*BOTH, "scan"), "unit": "run",
    },
}  # fmt: skip
FITS: dict[str, Case] = {
    "fit-second": {
        "problem": "fit", "rounds": 1, "ridgecv": 20, "unit": "fit",
        "implementations": (*BOTH, "ridgecv"),
    },
    "fit-first": {
        "problem": "fit", "rounds": 1, "unit": "fit", "implementations": BOTH, "fresh": "worker",
    },
    "startup": {"unit": "process", "implementations": BOTH, "fresh": "command"},
}  # fmt: skip
NETWORKS: dict[str, Case] = {
    **{
        f"mlp-{tau}-threads{threads}": network("mlp", tau, threads, 40 if tau == 1 else 10)
        for threads in (1, 2)
        for tau in (1, 5, 10, "random")
    },
    **{
        f"cnn-{tau}-threads{threads}": network("cnn", tau, threads, 5 if tau == 1 else 2)
        for threads in (1, 2)
        for tau in (1, 5)
    },
    "mlp-n1": {
        "problem": "mlp", "clients": 1, "cohort": 1, "rounds": 300,
        "implementations": (*BOTH, "soba-jax"),
    },
}  # fmt: skip
CASES = {**SMALL, **FITS, **NETWORKS}
GROUPS = {"Small models": SMALL, "Fits and start-up": FITS, "Networks": NETWORKS}
