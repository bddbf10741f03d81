"""Codecs in configurations: texts in, codecs out, and a sentence for what is none."""

import pytest

from simfbo.config.build import build_codecs
from simfbo.config.codecs import parse
from simfbo.config.files import as_toml
from simfbo.config.run import checked, load
from simfbo.errors import UserError

BASE = {"task.name": "quadratic"}


def test_nothing_is_coded_by_default():
    assert build_codecs(load(None, BASE).codecs) is None


def test_every_codec_of_the_family_has_a_text():
    texts = ["float32", "bfloat16", "dithered(0.5)", "eden(2)", "lowrank(32, 0.3)",
             "random_subset(0.1)", "top_k(0.05)"]  # fmt: skip
    for text in texts:
        codec = build_codecs(load(None, BASE | {"codecs.up.x": text}).codecs).up.x
        assert codec.name.removesuffix("()") == text
    down = build_codecs(
        load(None, BASE | {"codecs.down.y": "relative_to_start( dithered(2) )"}).codecs
    )
    assert (down.down.y.name, down.down.y.relative) == ("relative_to_start(dithered(2))", True)
    assert parse("none") is None


def test_a_preset_and_what_replaces_its_parts():
    config = load(None, BASE | {"codecs.preset": "small", "codecs.up.x": "dithered(2)"})
    found = build_codecs(config.codecs)
    assert found.up.x.name == "dithered(2)"
    assert found.up.y.name == "dithered(0.5)"
    assert found.down.x.name == "relative_to_start(lowrank(56, 0.4))"
    again = checked(config.model_dump(mode="json"), {})
    assert again == config
    assert load(None, BASE | {"codecs": "small"}).codecs.preset == "small"
    assert 'preset = "small"' in as_toml(config)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("codecs.up.x", "dither(3)", "'codecs.up.x' is invalid: use float32, bfloat16, dithered"),
        ("codecs.up.x", "dithered", "dithered is written dithered(0.5)"),
        ("codecs.up.x", "dithered(1, 2)", "dithered is written dithered(0.5)"),
        ("codecs.up.x", "lowrank(0.5, 1)", "lowrank is written lowrank(32, 0.3)"),
        ("codecs.up.x", "dithered(-1)", "its numbers must be positive"),
        ("codecs.up.x", "dithered(nan)", "its numbers must be positive"),
        ("codecs.up.x", "eden(2", "use float32"),
        ("codecs.up.x", "relative_to_start(dithered(2))", "is for payloads"),
        ("codecs.up.x", 3, "'codecs.up.x' should be a valid string"),
        ("codecs.preset", "huge", "'codecs.preset' should be 'small', got 'huge'"),
        ("codecs.upp.x", "float32", "Unknown setting 'codecs.upp'. Did you mean 'codecs.up'?"),
        ("codecs", "large", "'codecs.preset' should be 'small', got 'large'"),
        ("codecs", 3, "'codecs' should be a table of settings"),
    ],
)
def test_a_wrong_text_ends_in_a_sentence(key, value, says):
    with pytest.raises(UserError) as error:
        load(None, BASE | {key: value})
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["top_k(2)", "random_subset(1.5)", "eden(7)"])
def test_numbers_out_of_range_end_in_a_sentence(text):
    with pytest.raises(UserError):
        build_codecs(load(None, BASE | {"codecs.up.x": text}).codecs)
