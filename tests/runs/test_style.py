"""The style of figures: labels that do not overlap, and SVG that is safe, small and repeatable."""

import itertools
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.text import Text

from simfbo.runs import style
from simfbo.runs._svg import as_svg, only_light
from simfbo.runs.palette import COLOURS, on_dark

HOSTILE = ["<script>alert(1)</script>", "$x$ and $\\nothing", "a\x00b\x1b[31m", '"}</style>',
           "]]>", "&amp; %s {}", "x" * 500]  # fmt: skip


def drawn(names, ends=None, title="A finding"):
    """Return a figure with lines of these names, which end at these values."""
    figure, ((ax,),) = style.new(title, "what is plotted", size=(6, 3))
    style.frame(ax, "rounds", "loss, %")
    labels = []
    for i, name in enumerate(names):
        values = [0, 1.0 if ends is None else ends[i]]
        colour = COLOURS[i % len(COLOURS)]
        ax.plot([0, 1], values, color=colour)
        labels.append(style.Label(name, [0, 1], values, colour))
    style.label_lines(ax, labels)
    return figure


def boxes(figure):
    """Return where the axes of a figure is and where its labels are, without their leaders."""
    figure.draw_without_rendering()
    (ax,) = figure.axes
    return ax.get_window_extent(), [Text.get_window_extent(text) for text in ax.texts]


@pytest.mark.parametrize("ends", [[1.0] * 12, list(np.linspace(0, 1, 12)), [0] * 6 + [1] * 6])
def test_labels_neither_overlap_nor_leave_the_figure(ends):
    figure = drawn([f"method {i}" for i in range(12)], ends)
    axes, labels = boxes(figure)
    assert len(labels) == 12
    for one, other in itertools.combinations(labels, 2):
        assert one.y0 >= other.y1 or other.y0 >= one.y1
    for label in labels:
        assert axes.x1 < label.x0 < label.x1 <= figure.bbox.x1
        assert axes.y0 - label.height < label.y0 < label.y1 < axes.y1 + label.height


def test_labels_are_in_the_order_of_the_ends():
    figure = drawn(["low", "high", "middle"], [0.1, 1.0, 0.11])
    low, high, middle = boxes(figure)[1]
    assert low.y0 < middle.y0 < high.y0


def test_a_label_stands_where_its_line_is_last_in_sight():
    _, ((ax,),) = style.new("A finding")
    ax.set(xlim=(0, 10), ylim=(0, 1))
    fallen = style.Label("fallen", [1, 2, 3], [0.5, 0.9, -5], COLOURS[0])
    style.label_lines(ax, [fallen, style.Label("never seen", [1, 2], [7, np.nan], COLOURS[1])])
    (text,) = ax.texts
    assert (text.get_text(), text.xy) == ("fallen", (2, 0.9))


def test_spread_moves_no_more_than_it_has_to():
    np.testing.assert_allclose(style.spread([1, 5, 9], 2, 0, 10), [1, 5, 9])
    np.testing.assert_allclose(style.spread([5, 5, 5, 0], 2, 0, 10), [3, 5, 7, 0])
    np.testing.assert_allclose(style.spread([10, 10], 2, 0, 10), [8, 10])
    np.testing.assert_allclose(style.spread([-3, 0], 2, 0, 10), [0, 2])
    np.testing.assert_allclose(style.spread([1, 1, 1], 4, 0, 5), [0, 4, 8])  # no room: none overlap


def test_a_long_title_is_broken_into_lines_above_the_axes():
    figure, ((ax,),) = style.new("A finding that needs many words. " * 6, "small", size=(6, 3))
    figure.draw_without_rendering()
    assert len(figure.texts) > 3
    extents = [text.get_window_extent() for text in figure.texts]
    assert all(box.x1 <= figure.bbox.x1 for box in extents)
    assert min(box.y0 for box in extents) > ax.get_tightbbox().y1
    assert all(upper.y0 >= lower.y0 for upper, lower in itertools.pairwise(extents))


def test_equal_figures_give_equal_files(tmp_path):
    for name in ("a.svg", "b.svg"):
        style.save_svg(drawn(["one", "two"]), tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert not re.search(r"20\d\d-|date|matplotlib v|DTD", text, re.IGNORECASE)


def test_hostile_names_stay_text():
    svg = as_svg(drawn(HOSTILE, title=HOSTILE[0]))
    root = ET.fromstring(svg)  # well-formed, whatever the names hold
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "title", "defs", "style", "g", "path", "use", "text", "clipPath", "rect"}
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {HOSTILE[0], HOSTILE[1], HOSTILE[3], HOSTILE[4], HOSTILE[5]} <= texts
    assert "a\\x00b\\x1b[31m" in texts
    assert max(map(len, texts)) < 80
    assert root.findtext("{http://www.w3.org/2000/svg}title") == HOSTILE[0]
    assert svg.count("</style>") == 1


def test_one_file_for_light_and_dark_pages():
    svg = as_svg(drawn(["one", "two"]))
    style_sheet = svg[svg.index("<style>") : svg.index("</style>")]
    light, _, dark = style_sheet.partition("@media (prefers-color-scheme: dark) {")
    assert "#" not in light  # colours are the figure's own, also where style sheets are ignored
    for what, colour in set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", svg.partition("</s")[2])):
        rule = f'[style*="{what}: {colour}"] {{ {what}: {on_dark(colour)} !important }}'
        assert rule in dark
    assert "#ffffff" not in svg.partition("</style>")[2]  # nothing white behind it
    assert "system-ui" in light
    assert "DejaVu" not in svg
    assert "prefers-color-scheme" not in only_light(svg)
    ET.fromstring(only_light(svg))


def test_ticks_are_written_as_people_write_numbers():
    figure, ((left, right),) = style.new("A finding", columns=2)
    left.set(xscale="log", xlim=(1, 1000), ylim=(0.8, 1))
    style.numbers(left.xaxis)
    style.per_cent(left.yaxis)
    right.set_xlim(0, 120_000)
    style.numbers(right.xaxis)
    figure.draw_without_rendering()
    ticks = [[tick.get_text() for tick in axis.get_ticklabels()]
             for axis in (left.xaxis, left.yaxis, right.xaxis)]  # fmt: skip
    assert {"1", "10", "100", "1,000"} <= set(ticks[0])
    assert {"80 %", "100 %"} <= set(ticks[1])
    assert ticks[2] == ["0", "30,000", "60,000", "90,000", "120,000"]
