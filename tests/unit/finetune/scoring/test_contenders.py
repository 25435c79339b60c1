"""Which adapters peft can hold together."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.scoring.contenders import BASE, Contender, waves
from tests.builders import qwen3_30b

FACTS = qwen3_30b()
EXPERTS = ["mlp.experts.down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "other": {"target_modules": ["v_proj"]},
    "down": {"target_parameters": EXPERTS},
    "down too": {"target_parameters": EXPERTS, "r": 2},
    "experts": {"target_parameters": [*EXPERTS, "mlp.experts.gate_up_proj"]},
    "whole": {"modules_to_save": ["norm"]},
    "whole linear": {"modules_to_save": ["model.layers.0.self_attn.v_proj"]},
    "pattern": {"target_modules": ".*_proj"},
    "ia3": {"peft_type": "IA3"},
    "vera": {"peft_type": "VERA", "projection_prng_key": 0},
    "vera too": {"peft_type": "VERA", "projection_prng_key": 0},
    "vera of another key": {"peft_type": "VERA", "projection_prng_key": 1},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


def contender(name: str, folder: Path) -> Contender:
    folder = folder / name
    folder.mkdir()
    config = {"peft_type": "LORA", "target_modules": ["q_proj"], **KINDS[name]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return Contender(name=name, folder=folder)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["plain", "other", "whole", "down"], [["plain", "other", "whole", "down"]]),
        (["down", "experts", "down too"], [["down", "down too"], ["experts"]]),
        (["whole linear", "plain", "other"], [["whole linear", "plain"], ["other"]]),
        (["whole linear", "pattern"], [["whole linear"], ["pattern"]]),
        (["ia3", "plain"], [["ia3"], ["plain"]]),
        (
            ["vera", "vera of another key", "vera too"],
            [["vera", "vera too"], ["vera of another key"]],
        ),
        (["tied", "plain"], [["tied"], ["plain"]]),
    ],
)
def test_waves_hold_what_peft_holds_together(
    names: list[str], expected: list[list[str]], tmp_path: Path
) -> None:
    found = waves([contender(name, tmp_path) for name in names], FACTS)
    assert [[one.name for one in wave] for wave in found] == expected


def test_the_base_goes_where_no_embedding_is_tied_anew(tmp_path: Path) -> None:
    base = Contender(name=BASE)
    found = waves([contender("tied", tmp_path), base, contender("plain", tmp_path)], FACTS)
    assert [[one.name for one in wave] for wave in found] == [["tied"], [BASE, "plain"]]
