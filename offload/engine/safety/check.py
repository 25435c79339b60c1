"""The entry: whether a model may be computed layer by layer, and what a step may do with it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from offload.engine.batch import ROW_LENS, Batch
from offload.engine.model.layers import LayeredModel
from offload.engine.passes.part import Table
from offload.engine.recompute import TiledMlp
from offload.engine.results import Computing
from offload.engine.safety.attached import are_same
from offload.engine.safety.inspection import Inspection
from offload.engine.safety.packed_trial import LENS, LongTrial, PackedTrial
from offload.engine.safety.watch import all_hooks
from offload.engine.verdict import Allowed, Case, TrialSize, Verdict
from offload.errors import UnsupportedModelError
from offload.plan.schedule.op import Kind, Op

Walk = Callable[[Table], None]
"""Passes over the layers once, each with its weights in place, and calls a function at each op."""


def check(
    model: LayeredModel,
    batches: Sequence[Batch],
    *,
    adapter: str | None,
    has_labels: bool,
    computing: Computing,
    walk: Walk,
) -> Verdict:
    """Return the model's verdict, extended to micro-batches that it is not known to hold for.

    A model is inspected once per mode and set of inputs, and again after its code changed. What it
    does with many tokens is tried again before micro-batches that are larger than any before. No
    gradient is touched.

    Args:
        model: The model, in the mode in which it will compute.
        batches: Micro-batches, on the compute device.
        adapter: The adapter that computes; None for those that are active.
        has_labels: Whether a loss will be computed.
        computing: How steps compute.
        walk: Passes over the layers; called only where there is something to find out.
    """
    verdict = model.verdict
    code = [*all_hooks(model.whole, model.around), model.model.loss_function]
    if not are_same(code, verdict.code):
        verdict = replace(verdict, code=code, sizes={})
    mode = adapter, model.model.training
    try:
        for names in dict.fromkeys(map(frozenset, batches)):
            alike = [batch for batch in batches if frozenset(batch) == names]
            size = TrialSize.of(alike, max_row_tokens=model.max_positions)
            cases = [(mode, has, names) for has in (True, has_labels)]
            tried = [verdict.sizes[case] for case in cases if case in verdict.sizes]
            if any(one.covers(size) for one in tried):
                continue
            for (*_, others), one in verdict.sizes.items():
                if others == names:  # whether a layer keeps packed rows apart is kept once for all
                    size = size.join(one)
            passed = partial(_passed, verdict, model, alike[0], size, cases[-1])
            verdict = passed(computing, walk, is_known=bool(tried))
    except UnsupportedModelError as error:
        return replace(verdict, refusal=error)
    return verdict


def _passed(
    verdict: Verdict,
    model: LayeredModel,
    inputs: Batch,
    size: TrialSize,
    case: Case,
    computing: Computing,
    walk: Walk,
    *,
    is_known: bool,
) -> Verdict:
    """Return a verdict after one pass over the layers.

    Args:
        verdict: What is known.
        model: The model.
        inputs: A micro-batch.
        size: Size of the largest micro-batch.
        case: The mode, whether there are labels, and the names of the inputs.
        computing: How steps compute.
        walk: Passes over the layers.
        is_known: Whether the layers were inspected, and only smaller micro-batches tried.

    Raises:
        UnsupportedModelError: The layers cannot be computed one by one.
    """
    (mode, has_labels, _), known = case, verdict.of(case[0])
    unread, attention, mlps = dict(known.unread), dict(known.attention), dict(known.mlps)
    together, unjoined = set(verdict.together), set(verdict.unjoined)
    inspections: list[Inspection] = []
    packed: list[PackedTrial | LongTrial] = []
    are_inspected: list[bool] = []

    def front(_op: Op) -> None:
        inspections.append(
            Inspection(
                model,
                inputs,
                has_labels=has_labels,
                mlp_chunk_tokens=computing.mlp_chunk_tokens,
                head_chunk_tokens=computing.head_chunk_tokens,
            )
        )
        if ROW_LENS in inputs:
            ids_BT = inputs["input_ids"]
            if not is_known:
                packed.append(PackedTrial(model, ids_BT, LENS, together, unjoined))
            packed.append(LongTrial(model, ids_BT, size.row_lens, together, unjoined))

    def inspect_layer(op: Op) -> None:
        layer = op.layer_index
        if not is_known:
            if has_labels and computing.records_attention:
                attention[layer] = inspections[0].attention(layer)
            products, mlps[layer] = inspections[0].visit(layer)
            if has_labels:
                unread[layer] = products if computing.leaves_out else ()
        for trial in packed:
            (together.add if trial.visit(layer) else together.discard)(layer)

    def around(_op: Op) -> None:
        are_inspected.append(inspections[0].around(size))

    walk({Kind.FRONT: front, Kind.FORWARD: inspect_layer, Kind.TAIL: around})
    _require_tiles(model, computing, mlps)
    allowed = Allowed(unread=unread, attention=attention, mlps=mlps)
    return replace(
        verdict,
        sizes={**verdict.sizes, **({case: size} if are_inspected[0] else {})},
        allowed={**verdict.allowed, mode: allowed},
        together=frozenset(together),
        unjoined=frozenset(unjoined),
    )


def _require_tiles(
    model: LayeredModel, computing: Computing, mlps: Mapping[int, Sequence[TiledMlp]]
) -> None:
    """Refuse a model of which no MLP can be computed in tiles, where that is asked for."""
    if computing.mlp_chunk_tokens is not None and not any(mlps.values()):
        raise UnsupportedModelError(
            f"mlp_chunk_tokens is {computing.mlp_chunk_tokens}, but no MLP of {model.name} can be"
            " computed in tiles",
            limit="its parts must compute each token by itself, draw no random numbers (a"
            " dropout) and have no hooks; routed experts are computed whole",
            hint="`mlp_chunk_tokens=None`",
        )
