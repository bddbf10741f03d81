"""One implementation in a process of its own, timed on demand.

Started by run.py with the case as JSON in argv; turns.py says what it reads and answers.
"""

from problems import (
    STEPS,
    Case,
    Rounds,
    fednest_library,
    fednest_torch,
    library,
    quadratic_task,
    reference_rounds,
    ridge_samples,
    setting,
)
from turns import serve


def by_hand(case: Case) -> Rounds:
    """Return the rounds of NumPy's closed forms."""
    import numpy_reference

    steps = STEPS[case["problem"]]
    if case["problem"] == "mlp":
        return reference_rounds(case, "numpy_reference")
    if case["problem"] == "quadratic":
        return numpy_reference.prepare_quadratic(quadratic_task(case), steps)
    gram = case["implementation"] == "numpy-gram"
    return numpy_reference.prepare_ridge(*ridge_samples(case["clients"]), steps, gram=gram)


def centralised(case: Case) -> Rounds:
    """Return the rounds of SOBA."""
    import soba

    problem, data, x0, y0, _ = setting(case)
    return soba.on_one_client(problem, data, x0, y0, STEPS[case["problem"]])


def in_torch(case: Case, notes: list[str]) -> Rounds:
    """Return the rounds of a PyTorch version."""
    import torch

    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    name = case["implementation"]
    if name == "torch-released":
        return fednest_torch()
    if name.startswith("torchopt"):
        import bilevel_libraries

        return getattr(bilevel_libraries, name.replace("-", "_"))(case)
    if name == "torch-channels-last":
        return reference_rounds(case, "torch_reference", channels_last=True)
    import torch_clients

    if name == "torch-loop":
        return torch_clients.loop(case)
    return torch_clients.compiled(case, notes)


def by_jaxopt(case: Case) -> Rounds:
    """Return the rounds of JAXopt."""
    import bilevel_libraries

    return bilevel_libraries.jaxopt_implicit(case)


def build(case: Case, notes: list[str]) -> Rounds:
    """Return the function that runs a number of rounds of a case's implementation."""
    name = case["implementation"]
    if name.startswith("torch"):
        return in_torch(case, notes)
    if case["problem"] == "fednest":
        return fednest_library()
    kinds = {
        "simfbo": library,
        "numpy": by_hand,
        "numpy-gram": by_hand,
        "soba-jax": centralised,
        "jaxopt-implicit": by_jaxopt,
    }
    return kinds[name](case)


if __name__ == "__main__":
    serve(build)
