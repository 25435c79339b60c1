import json

from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.timeline import perfetto_trace
from tests.builders import simulated


def test_the_arrows_of_a_trace_lead_from_what_was_waited_for() -> None:
    timeline = simulated(4, 1)
    events = json.loads(perfetto_trace({"predicted": timeline}))["traceEvents"]
    ends: dict[str, dict[str, dict]] = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    lanes = list(Lane)
    spans = {(lanes.index(s.lane), s.start_s * 1e6): s for s in timeline.spans}
    arrows = [
        tuple(spans[end["tid"], end["ts"]] for end in (pair["s"], pair["f"]))
        for pair in ends.values()
    ]
    assert len(arrows) == len(list(timeline.crossings())) > 0
    assert all(source.end_s <= target.start_s for source, target in arrows)
    loads = [
        (s.layer, t.layer) for s, t in arrows if s.kind is Kind.LOAD and t.lane is Lane.COMPUTE
    ]
    assert loads
    assert all(loaded == visited for loaded, visited in loads)
    assert {e["cat"] for e in events if e["ph"] == "X"} >= {"load", "decode", "optimizer"}
