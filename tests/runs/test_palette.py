"""The palette: lines and labels can be read on either background."""

from simfbo.runs import palette
from simfbo.runs.palette import COLOURS, COLOURS_ON_DARK, DARK, WHITE, contrast, on_dark, readable


def test_lines_and_labels_can_be_read():
    for colour in COLOURS:
        assert min(contrast(colour, WHITE), contrast(colour, DARK)) >= 3
        assert contrast(on_dark(colour), DARK) >= 4.5
    for colour in (*COLOURS, palette.GREY, palette.INK, palette.MUTED, "#ffff00"):
        assert contrast(readable(colour), WHITE) >= 4.5
        assert contrast(on_dark(readable(colour)), DARK) >= 4.5


def test_a_label_has_its_lines_colour_on_dark_pages_too():
    assert [on_dark(readable(colour)) for colour in COLOURS] == list(COLOURS_ON_DARK)
    assert on_dark(WHITE) == DARK
