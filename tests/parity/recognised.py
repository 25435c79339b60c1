"""What the engine recognises of each exact architecture, which a new version may lose in silence.

    python -m tests.parity.recognised --write tests/golden/recognised.json
    python -m tests.parity.recognised llama qwen3_moe

What is not recognised is computed by the model's own code: as exact, and slower, and nothing says
so. So the committed table has, for each exact type, built tiny and random as for
`docs/architectures.md`: the fused norms, rotations and gates of all layers; the layers that compute
packed rows together, and those whose attention outputs can be kept; whether it generates with its
own cache; the expert modules whose kernels can be selected.
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import offload
from offload.engine.engine import Engine
from offload.engine.experts.products import reason_outside
from offload.engine.model.layers import LayeredModel
from offload.engine.pointwise.layers import FusedLayers
from tests.parity.architectures import exact_types, rows_alone_and_packed
from tests.parity.steps import OPTIONS
from tests.parity.tiny_models import tiny_model, with_adapters

PATH = Path(__file__).parents[1] / "golden" / "recognised.json"
Row = Mapping[str, int]


def read_rows() -> dict[str, Row]:
    """Return the committed table."""
    rows: dict[str, Row] = json.loads(PATH.read_text())
    return rows


def recognised_of(model_type: str) -> Row:
    """Return what is recognised of a type, by name, without what is not."""
    model: Any = tiny_model(model_type)
    layers = LayeredModel(model).layers
    fused = FusedLayers(list(layers))
    found = sum((fused.counts(layer) for layer in range(len(layers))), Counter())
    found["experts"] = sum(reason_outside(module) is None for module in model.modules())
    adapted: Any = with_adapters(model, layers)
    _, packed = rows_alone_and_packed()
    options = replace(OPTIONS, num_kept_outputs=len(layers))
    engine = Engine(adapted, device=torch.device("cpu"), options=options)
    try:
        engine.forward_backward(packed, dropout_seed=0)
        found["together"] = len(engine.rows_together)
        allowed = engine._layered.verdict.allowed.values()
        found["outputs"] = sum(bool(calls) for one in allowed for calls in one.attention.values())
    finally:
        engine.detach()
    found["cached"] = int(_generates(adapted.eval()))
    return {name: num for name, num in sorted(found.items()) if num}


def _generates(model: Any) -> bool:
    engine = offload.attach(model, num_slots=2, device="cpu")
    try:
        with engine.generation() as generation:
            for tokens in ([[5, 6, 7, 9]], [[8]]):
                generation.next_logits({0: torch.tensor(tokens)})
    except offload.UnsupportedModelError:
        return False
    finally:
        engine.detach()
    return True


def main() -> int:
    """Show what is recognised, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, committed = {}, read_rows()
    for model_type in options.model_types or exact_types():
        rows[model_type] = recognised_of(model_type)
        was = committed.get(model_type)
        change = "" if was == rows[model_type] else f" (was {was})"
        sys.stdout.write(f"{model_type}: {rows[model_type]}{change}\n")
        sys.stdout.flush()
    if options.write:
        lines = (f'"{name}": {json.dumps(row)}' for name, row in sorted(rows.items()))
        options.write.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return int(any(committed.get(name) != row for name, row in rows.items()))


if __name__ == "__main__":
    raise SystemExit(main())
