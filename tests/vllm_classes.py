"""What vLLM's classes make of an adapter's names: the mapper and the modules of each.

Facts of vllm/model_executor/models at the commit of each, read in 2026. A name is mapped as
`WeightsMapper` maps those of weights (`parse_fine_tuned_lora_name` of vllm/lora/utils.py): first
parts of it, then its beginning. What it becomes has to be a module of the served class, which for
packed modules is the name before packing; otherwise vLLM ignores it, or refuses the adapter.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


def _modules(owner: str, names: str) -> frozenset[str]:
    return frozenset(f"{owner}.{name}" for name in names.split())


_ATTENTION = _modules("self_attn", "q_proj k_proj v_proj o_proj")
_MLA = _modules("self_attn", "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj")
_GDN = _modules("linear_attn", "in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj")
_MLP = _modules("mlp", "gate_proj up_proj down_proj")
_SHARED = _modules("mlp.shared_experts", "gate_proj up_proj down_proj")
_SHARED_EXPERT = _modules("mlp.shared_expert", "gate_proj up_proj down_proj")
_EXPERTS = _modules("mlp.experts.N", "gate_proj up_proj down_proj")
_FUSED = _modules("mlp", "experts experts.base_layer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A class of vLLM."""

    file: str  # where it is
    commit: str  # at which it was read
    layers: str  # the name of its decoder's layers
    modules: frozenset[str]  # what takes an adapter in a layer; N is an expert's number
    prefixes: Mapping[str, str] = field(default_factory=dict)  # beginnings of names -> others
    parts: Mapping[str, str] = field(default_factory=dict)  # parts of names -> others

    def module(self, key: str) -> str | None:
        """Return the module that a tensor of an adapter's file is for; None if there is none."""
        name = re.sub(r"\.lora_[AB]\.weight$", "", key).replace("base_model.model.", "")
        for old, new in self.parts.items():
            name = name.replace(old, new, 1)
        for old, new in self.prefixes.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        found = re.fullmatch(rf"{re.escape(self.layers)}\.\d+\.(.+)", name)
        inner = re.sub(r"\.experts\.\d+\.", ".experts.N.", found[1]) if found else None
        return name if inner in self.modules else None


_IN_LANGUAGE_MODEL = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}
_TEXT = "language_model.model.layers"
_QWEN3_VL = {
    "model.visual.": "visual.",
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
}
SERVED: Mapping[str, Served] = {
    "gemma3": Served(
        file="gemma3_mm.py",
        commit="e5fa94509b708330e28208a55c84aba8a7781675",
        layers=_TEXT,
        modules=_ATTENTION | _MLP,
        prefixes=_IN_LANGUAGE_MODEL,
    ),
    "gemma4": Served(
        file="gemma4_mm.py",
        commit="01bae2190e1c298115941f50bd6ed508216f24e7",
        layers=_TEXT,
        modules=_ATTENTION | _MLP,
        prefixes=_IN_LANGUAGE_MODEL | {"model": "language_model.model"},
    ),
    "glm4_moe_lite": Served(
        file="glm4_moe_lite.py",
        commit="055e47c28003156421365af985d676fc921cb075",
        layers="model.layers",
        modules=_MLA | _MLP | _SHARED | _EXPERTS,
    ),
    "gpt_oss": Served(
        file="gpt_oss.py",
        commit="a6b6cfaa0cedff84872a0118380c6cfea91b635d",
        layers="model.layers",
        modules=_FUSED | _modules("attn", "q_proj k_proj v_proj o_proj"),
        parts={".self_attn.": ".attn."},
    ),
    "lfm2_moe": Served(
        file="lfm2_moe.py",
        commit="030ea52effcb05071543c8c42b8f0145e94cee43",
        layers="model.layers",
        modules=_modules("self_attn", "q_proj k_proj v_proj out_proj")
        | _modules("short_conv", "in_proj out_proj")
        | _modules("feed_forward", "w1 w2 w3")
        | _modules("feed_forward.experts.N", "w1 w2 w3"),
        parts={".conv.": ".short_conv."},
    ),
    "mixtral": Served(
        file="mixtral.py",
        commit="f0e26957c6af4d1ce3d0642120b011949da65885",
        layers="model.layers",
        modules=_ATTENTION | _modules("block_sparse_moe.experts.N", "w1 w2 w3"),
    ),
    "nemotron_h": Served(
        file="nemotron_h.py",
        commit="00b08dc44519a82cbdd9061d92d1226985094622",
        layers="model.layers",
        modules=_modules("mixer", "q_proj k_proj v_proj o_proj in_proj up_proj down_proj")
        | _modules("mixer.experts.N", "up_proj down_proj")
        | _modules("mixer.shared_experts", "up_proj down_proj"),
        prefixes={"backbone": "model"},
    ),
    "qwen3_5": Served(
        file="qwen3_5.py",  # its mapper is qwen3_vl's
        commit="00def4f8421153e037ff6270c0a8c31912a00206",
        layers=_TEXT,
        modules=_ATTENTION | _GDN | _MLP,
        prefixes=_QWEN3_VL,
    ),
    "qwen3_5_moe": Served(
        file="qwen3_5.py",
        commit="00def4f8421153e037ff6270c0a8c31912a00206",
        layers=_TEXT,
        modules=_ATTENTION | _GDN | _SHARED_EXPERT | _FUSED,
        prefixes=_QWEN3_VL,
    ),
    "mistral3": Served(
        file="mistral3.py",
        commit="02677fd9d49b6b4b3082967642a0d1ff45c36c0a",
        layers=_TEXT,
        modules=_ATTENTION | _MLP,
        prefixes=_IN_LANGUAGE_MODEL | {"model.": "language_model.model."},
    ),
    "qwen2_5_vl": Served(
        file="qwen2_5_vl.py",
        commit="fb33ec8cf0a73c82af00a2128dee4ad058d16e9b",
        layers=_TEXT,
        modules=_ATTENTION | _MLP,
        prefixes={
            "model.language_model.": "language_model.model.",
            "model.visual.": "visual.",
            "lm_head.": "language_model.lm_head.",
            "model.": "language_model.model.",
        },
    ),
    "qwen3_vl": Served(
        file="qwen3_vl.py",
        commit="4f5768c74b6f87eedb592dac8a7fe39f2aecb1ab",
        layers=_TEXT,
        modules=_ATTENTION | _MLP,
        prefixes=_QWEN3_VL,
    ),
    "qwen3_vl_moe": Served(
        file="qwen3_vl_moe.py",  # its mapper is qwen3_vl's
        commit="055e47c28003156421365af985d676fc921cb075",
        layers=_TEXT,
        modules=_ATTENTION | _MLP | _FUSED,
        prefixes=_QWEN3_VL,
    ),
    "glm4v": Served(
        file="glm4_1v.py",
        commit="002d181a55a03803d7d69547846630069d2378b8",
        layers=_TEXT,
        modules=_ATTENTION | _modules("mlp", "gate_up_proj down_proj"),
        prefixes=_IN_LANGUAGE_MODEL | {"model.visual.": "visual."},
    ),
    "lfm2_vl": Served(
        file="lfm2_vl.py",
        commit="045d7575500e01e0f4a7ff84e039a9f7f7dc3bd0",
        layers=_TEXT,
        modules=_modules("self_attn", "q_proj k_proj v_proj out_proj")
        | _modules("feed_forward", "w1 w2 w3"),
        prefixes=_IN_LANGUAGE_MODEL,
    ),
}
"""The classes that serve checkpoints, by the model type in their config."""
