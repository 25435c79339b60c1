"""The chart of tokens/s over tokens per step, with the break-even."""

from collections.abc import Sequence
from typing import Any

from finetune.report.charts import HEIGHT, Chart, Row

AROUND = {"left": 5, "top": 5, "bottom": 5, "right": 18}  # half of the last label


def break_even(points: Sequence[Row], *, break_even_tokens: int | None) -> Chart:
    """Return tokens/s over tokens per step, and from where streaming is free.

    Args:
        points: Each with `tokens per step` and `tokens/s`.
        break_even_tokens: Tokens per step from which streaming is free: 0 where nothing is
            streamed; None where it is more than any step should have.
    """
    # on a phone a long label, or the last one if it were moved, would overlap and be dropped
    in_k = {"labelExpr": "format(datum.value / 1024, ',') + 'k'", "labelFlush": False}
    x: dict[str, Any] = {
        "field": "tokens per step",
        "type": "quantitative",
        "title": "tokens per step (k: 1,024)",
    }
    x |= {"axis": in_k, "scale": {"type": "log", "base": 2, "nice": False}}
    y = {"field": "tokens/s", "type": "quantitative", "scale": {"zero": True}}
    shown = [{"field": "tokens per step", "format": ","}, {"field": "tokens/s", "format": ",.0f"}]
    layers: list[dict[str, Any]] = [
        {
            "data": {"name": "points", "values": list(points)},
            "mark": {"type": "line", "point": {"filled": True, "size": 40}, "strokeWidth": 2},
            "encoding": {"x": x, "y": y, "tooltip": shown},
        }
    ]
    line = ""
    if break_even_tokens == 0:
        line = "The whole model is on the device: nothing is streamed."
    elif break_even_tokens is not None:
        line = f"The line is the break-even: {break_even_tokens:,} tokens."
        layers.append(
            {
                "data": {"values": [{"tokens per step": break_even_tokens}]},
                "mark": {"type": "rule", "strokeDash": [6, 4], "strokeWidth": 2},
                "encoding": {"x": x},
            }
        )
    return Chart(
        name="curve",
        title="Tokens per second over tokens per step",
        summary=f"Predicted tokens per second for steps of more and fewer tokens. {line}",
        note=line,
        spec={"height": HEIGHT, "padding": AROUND, "layer": layers},
    )
