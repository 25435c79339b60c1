import re
from xml.etree import ElementTree

import pytest

from finetune.report.gantt import COLOURS, WIDTH, gantt_svg
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.timeline import Timeline
from tests.builders import simulated as step

SVG = "{http://www.w3.org/2000/svg}"


def bars(drawing: str) -> list[ElementTree.Element]:
    """Return what has a tooltip: the ops."""
    root = ElementTree.fromstring(drawing)
    return [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def test_both_steps_are_drawn_over_the_same_seconds() -> None:
    drawing = gantt_svg({"predicted": step(3, 1), "measured": step(3, 1, visit_s=2.0)})
    found = bars(drawing)
    updates = [bar for bar in found if bar.get("fill") == COLOURS[Kind.OPTIMIZER]]
    assert len(found) == 2 * len(step(3, 1).spans)
    short, long = (float(bar.get("width", 0)) for bar in updates)
    assert long == pytest.approx(2 * short, abs=0.02)  # one scale
    ends = [float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in found]
    assert max(ends) == pytest.approx(WIDTH - 20, abs=0.1)  # the longer one fills the axis
    words = [text.text for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")]
    assert words.index("predicted") < words.index("measured")
    for lane in Lane:
        if lane is Lane.NETWORK:  # of several ranks
            assert lane.value not in words
            continue
        assert words.count(lane.value) == 2
    for kind in {span.kind for span in step(3, 1).spans}:  # the legend
        assert kind.value.replace("_", " ") in words
    titles = [str(bar.findtext(f"{SVG}title")) for bar in found]
    assert "load of layer 2, 100 bytes: " in " ".join(titles)
    assert any(
        title.startswith("backward of layer 1, micro-batch 0, ")
        or title.startswith("backward of layer 1, micro-batch 0: ")
        for title in titles
    )


def test_every_kind_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(Kind)
    assert len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.thorough
def test_a_step_of_ten_thousand_ops_is_a_small_file_that_hides_nothing() -> None:
    large = step(64, 40)
    drawing = gantt_svg({"predicted": large, "measured": large})
    assert len(large.spans) > 10_000
    assert len(drawing) < 600_000
    found = bars(drawing)
    assert f"{2 * len(large.spans)} ops in {len(found)} bars" in drawing
    titles = [str(bar.findtext(f"{SVG}title")) for bar in found]
    shown = sum(int(t.split(" x ")[0]) if " x " in t else 1 for t in titles)
    assert shown == 2 * len(large.spans)


def test_of_ops_that_share_a_pixel_the_longest_is_drawn_and_the_others_are_counted() -> None:
    large = step(64, 40)
    drawing = gantt_svg({"predicted": large}, width=300)
    titles = [str(bar.findtext(f"{SVG}title")) for bar in bars(drawing)]
    lanes = len({span.lane for span in large.spans})
    assert len(titles) <= 2 * 300 * lanes
    drawn = sum(int(t.split(" x ")[0]) if " x " in t else 1 for t in titles)
    hidden = sum(int(n) for n in re.findall(r"and (\d+) narrower", " ".join(titles)))
    assert drawn + hidden == len(large.spans)
    assert hidden > 0


def test_a_step_without_ops_can_be_drawn() -> None:
    assert "0 ops in 0 bars" in gantt_svg({"nothing": Timeline(spans=())})


def test_headings_cannot_break_the_drawing() -> None:
    words = [t.text for t in ElementTree.fromstring(gantt_svg({"<a&b>": step(2, 1)})).iter()]
    assert "<a&b>" in words
