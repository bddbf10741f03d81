"""Repeated search for step sizes: `simfbo reproduce NAME --tune`.

An experiment's configuration holds the results of the search; this module repeats it.
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

    Every method begins with the same step sizes and has the same budget of communication rounds,
    with a seed of its own. The best settings are saved as tuning/METHOD.toml, the trials as
    METHOD.jsonl; existing results are not repeated.
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
    file, scratch = folder / f"{name}.toml", folder / name
    ranges = space(name, method, rules)
    if not file.exists():
        make_folder(folder)
        initial = {key: rules["begin"][key[-1]] for key in ranges}
        config = checked(method.config.model_dump(), {**initial, "seed": rules["seed"]})

        def show(stage: int, stages: int, done: int, total: int) -> None:
            if resources.on_progress is not None:
                resources.on_progress(done, total)

        result = tune(
            config,
            scratch,
            budget=rules["budget"],
            trials=rules["trials"],
            space=ranges,
            workers=resources.workers,
            data_dir=resources.data_dir,
            on_progress=show,
            tracking=resources.tracking,
        )
        (scratch / "trials.jsonl").replace(folder / f"{name}.jsonl")
        write_atomic(file, as_toml(result.best))
        put_away(scratch, folder)
    steps = {key: lookup(load_config(file, {}), key) for key in ranges}
    return method._replace(config=checked(method.config.model_dump(), steps))


def space(name: str, method: Method, rules: Json) -> Space:
    """Return the ranges of y, v and x; the method's own override the common ones."""
    ranges = {**rules["ranges"], **rules.get(name, {})}
    return {key: tuple(ranges[key[-1]]) for key in default_space(method.config)}
