"""Settings derived from a function's signature, and hostile text on its way through TOML."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Optional

import pytest
from pydantic import Field

from simfbo.config.catalogue import METHODS, TASKS, MethodRecord, TaskRecord
from simfbo.config.files import as_toml, read
from simfbo.config.run import checked, load
from simfbo.errors import UserError


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Forget after a test what it added to the catalogue."""
    for shelf in (METHODS, TASKS):
        monkeypatch.setattr(shelf, "_records", dict(shelf._records))


def shaped(
    problem,
    steps,
    count: int = 3,
    rate: float = 0.5,
    flag: bool = False,
    kind: Literal["a", "b"] = "a",
    sizes: list[int] = [1, 2],  # noqa: B006
    radius: float | None = None,
    old: Optional[int] = 4,  # noqa: UP045
    sloppy: float = None,  # noqa: RUF013
    share: Annotated[float, Field(gt=0, lt=1)] = 0.1,
    bare=2,
    unknown=None,
    # What a file cannot hold, or a model cannot have as a field, keeps its default:
    transform: Callable[[float], float] = abs,
    pair: tuple[int, int] = (1, 2),
    file: Path = Path("x"),
    name="free",
    copy=True,
    _hidden=0,
    *rest,
    **more,
):
    raise AssertionError("never called")


def settings(**given):
    METHODS.add(MethodRecord("shaped", "Shaped", shaped))
    tree = {"task": {"name": "quadratic"}, "algorithm": {"name": "shaped", **given}}
    return checked(tree, {}).algorithm


def test_a_field_per_parameter():
    assert settings().model_dump() == {
        "name": "shaped", "steps": {"x": 0.05, "y": 0.2, "v": 0.1}, "count": 3, "rate": 0.5,
        "flag": False, "kind": "a", "sizes": [1, 2], "radius": None, "old": 4, "sloppy": None,
        "share": 0.1, "bare": 2, "unknown": None,
    }  # fmt: skip
    given = {"count": 7, "rate": 2, "flag": True, "kind": "b", "radius": 1.5, "old": "none",
             "sloppy": 0.5, "bare": 5, "unknown": "text", "sizes": []}  # fmt: skip
    found = settings(**given).model_dump()
    assert {key: found[key] for key in given} == given | {"old": None, "rate": 2.0}
    assert settings(radius="none").radius is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"count": 1.5}, "'algorithm.count' should be a valid integer, got 1.5."),
        ({"count": "x"}, "'algorithm.count' should be a valid integer, got 'x'."),
        ({"rate": "x"}, "'algorithm.rate' should be a valid number, got 'x'."),
        ({"flag": 1}, "'algorithm.flag' should be a valid boolean, got 1."),
        ({"kind": "c"}, "'algorithm.kind' should be 'a' or 'b', got 'c'."),
        ({"radius": "x"}, "'algorithm.radius' should be a valid number, got 'x'."),
        ({"sloppy": "x"}, "'algorithm.sloppy' should be a valid number, got 'x'."),
        ({"share": 1.0}, "'algorithm.share' should be less than 1, got 1.0."),
        ({"bare": 0.5}, "'algorithm.bare' should be a valid integer, got 0.5."),
        ({"sizes": [1, "x"]}, "'algorithm.sizes.1' should be a valid integer, got 'x'."),
        ({"steps": {"z": 1.0}}, "Unknown setting 'algorithm.steps.z'."),
        ({"counts": 1}, "Unknown setting 'algorithm.counts'. Did you mean 'algorithm.count'?"),
        ({"transform": 1}, "Unknown setting 'algorithm.transform'. The settings in 'algorithm' are "
         "bare, count, flag, kind, old, radius, rate, share, sizes, sloppy, steps, unknown."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(given, sentence):
    with pytest.raises(UserError) as caught:
        settings(**given)
    assert str(caught.value) == sentence


def without_default(problem, steps, depth):
    raise AssertionError("never called")


def without_steps(problem, rate: float = 0.5):
    raise AssertionError("never called")


def without_server(problem, local):
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (without_default, "'odd' needs a default for 'depth': it is called without that argument."),
        (without_steps, "'odd' must take its step sizes as (problem, local, server) or as "
                        "(problem, steps)."),
        (without_server, "'odd' must take its step sizes as (problem, local, server) or as "
                         "(problem, steps)."),
        (dict, "The parameters of 'odd' cannot be read: wrap it in a function of your own."),
    ],
)  # fmt: skip
def test_a_factory_that_cannot_be_called(factory, sentence):
    METHODS.add(MethodRecord("odd", "Odd", factory))
    with pytest.raises(UserError) as caught:
        checked({"task": {"name": "quadratic"}, "algorithm": {"name": "odd"}}, {})
    assert str(caught.value) == sentence


def unresolved(problem, steps, depth: "NoSuchName" = 3):  # noqa: F821
    raise AssertionError("never called")


def test_an_annotation_that_cannot_be_resolved_leaves_the_default_s_type():
    METHODS.add(MethodRecord("odd", "Odd", unresolved))
    tree = {"task": {"name": "quadratic"}, "algorithm": {"name": "odd"}}
    assert checked(tree, {"algorithm.depth": 5}).algorithm.model_dump()["depth"] == 5
    with pytest.raises(UserError, match=r"^'algorithm.depth' should be a valid integer, got 'x'.$"):
        checked(tree, {"algorithm.depth": "x"})


def from_file(path: str = "", clients: tuple = (), seed: int = 0, data_dir=None):
    raise AssertionError("never called")


@pytest.mark.parametrize(
    "text",
    ["C:\\data\\😀", 'say "hi"', "it's", "one\ntwo\r\nthree\ttab", "\0\x1b[31m\x7f\u2028\u202e",
     "'''\"\"\"", "ends in \\", "größe 数", "# = [x]", "", "none of these"],
)  # fmt: skip
def test_hostile_text_survives_its_file(tmp_path, text):
    TASKS.add(TaskRecord("from-file", from_file))
    config = load(None, {"task.name": "from-file", "task.path": text})
    assert config.task.model_dump() == {"name": "from-file", "path": text}
    file = tmp_path / '😀 "quoted".toml'
    file.write_text(as_toml(config), encoding="utf-8")
    assert read(file)["task"]["path"] == text
    assert load(file, {}) == config


@pytest.mark.parametrize(
    ("name", "key", "value", "sentence"),
    [
        ("simfbo", "radius", -1, "should be greater than 0, got -1."),
        ("mimefbo", "radius", float("inf"), "should be a finite number, got inf."),
        ("mimefbo", "theta", 0.0, "should be greater than 0, got 0.0."),
        ("fedmsa", "momentum", 1.5, "should be less than or equal to 1, got 1.5."),
        ("fednest", "lower_rounds", 0, "should be greater than 0, got 0."),
        ("aggitd", "lower_rounds", 2**31, "should be less than or equal to 2147483647"),
        ("fedbioacc", "c", float("nan"), "should be a finite number, got nan."),
        ("memfbo", "order", 3, "should be 1 or 2, got 3."),
        ("fedmbo", "mode", "other", "should be 'paper' or 'as_released', got 'other'."),
        ("memfbo", "local", {"v": 1.0}, "Unknown setting 'algorithm.local.v'."),
    ],
)
def test_annotations_of_the_librarys_methods_limit_their_settings(name, key, value, sentence):
    tree = {"task": {"name": "quadratic"}, "algorithm": {"name": name, key: value}}
    with pytest.raises(UserError) as caught:
        checked(tree, {})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("name", "radius"), [("simfbo", 10.0), ("fedmsa", 10.0)])
def test_defaults_of_a_record_replace_those_of_the_factory(name, radius):
    tree = {"task": {"name": "quadratic"}, "algorithm": {"name": name}}
    assert checked(tree, {}).algorithm.radius == radius
