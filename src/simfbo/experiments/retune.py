"""Step sizes searched anew: `simfbo reproduce NAME --tune`.

An experiment's configuration holds what the search found; this repeats it.
"""

from pathlib import Path

from simfbo.config.files import as_toml
from simfbo.config.run import checked
from simfbo.config.run import load as load_config
from simfbo.experiments.experiment import Method, Part
from simfbo.experiments.results import Resources, put_away
from simfbo.runs.files import Json, folder_names, make_folder, write_atomic
from simfbo.studies.tuning import Space, default_space, lookup, tune


def tuned(part: Part, rules: Json, folder: Path, resources: Resources) -> Part:
    """Search step sizes for the tuned methods of a part.

    Every method begins with the same step sizes and may spend the same number of communication
    rounds, with a seed of its own. The winner is kept as tuning/METHOD.toml, the trials as
    METHOD.jsonl; what is there is not searched again.
    """
    methods = {
        name: _searched(name, method, rules, folder / "tuning", resources)
        if method.tuned
        else method
        for name, method in zip(folder_names(part.methods), part.methods.values(), strict=True)
    }
    return part._replace(methods=methods)


def _searched(name: str, method: Method, rules: Json, folder: Path, resources: Resources) -> Method:
    """Search the best step sizes of a method."""
    kept, scratch = folder / f"{name}.toml", folder / name
    within = space(name, method, rules)
    if not kept.exists():
        make_folder(folder)
        first = {key: rules["begin"][key[-1]] for key in within}
        config = checked(method.config.model_dump(), {**first, "seed": rules["seed"]})

        def show(stage: int, stages: int, done: int, total: int) -> None:
            if resources.on_progress is not None:
                resources.on_progress(done, total)

        found = tune(
            config, scratch, budget=rules["budget"], trials=rules["trials"], space=within,
            workers=resources.workers, data_dir=resources.data_dir, on_progress=show,
            tracking=resources.tracking,
        )  # fmt: skip
        (scratch / "trials.jsonl").replace(folder / f"{name}.jsonl")
        write_atomic(kept, as_toml(found.best))
        put_away(scratch, folder)
    steps = {key: lookup(load_config(kept, {}), key) for key in within}
    return method._replace(config=checked(method.config.model_dump(), steps))


def space(name: str, method: Method, rules: Json) -> Space:
    """Return where to search: the ranges of y, v and x, the method's own before the common ones."""
    ranges = {**rules["ranges"], **rules.get(name, {})}
    return {key: tuple(ranges[key[-1]]) for key in default_space(method.config)}
