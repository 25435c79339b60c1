"""One layer of a built model, taken apart: its matrix products, norms and attention.

The purpose of a module is recognised by its class name, as in the table of weights
(`offload.engine.model.inventory`); the rest by shapes and by the last names of modules. All
remaining parameters are counted as others, so none is lost.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from offload.engine.model.inventory import parts_of
from offload.engine.pointwise import recognise
from offload.engine.pointwise.layers import FusedModule
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import LayerFacts, TensorClass
from offload.plan.facts.linears import (
    Attention,
    DeltaAttention,
    Group,
    Linear,
    Norm,
    Reads,
    Recurrence,
    Scores,
    SoftmaxAttention,
)

_GROUPS: Mapping[TensorClass, Group] = {
    "attention": "attention",
    "experts": "experts",
    "shared experts": "shared_experts",
    "router": "router",
}
_WITH_GATES = ("mlp", "shared_experts")
_RECURRENT = re.compile(r"Delta|Lightning|LinearAttention|Mamba|Mixer|Rwkv|LSTM")
_OUTPUTS = re.compile(
    r"(^|\.)(o_proj|out_proj|o_b_proj|dense|c_proj|[wW]o|out|linear_out|output)(\.linear)?$"
)
_DOWN = re.compile(r"down|(^|\.)(w2|fc2|c_proj|fc_out|dense_4h_to_h|lin2)\b|output")
_KEYS = re.compile(r"(^|\.)(k_proj|key|k_lin|wk)$")
_QKV = re.compile(r"(^|\.)(qkv_proj|query_key_value|c_attn|Wqkv|attn_qkv)$")
_HEADS = {"num_heads", "num_attention_heads", "n_head", "n_heads"}
_ACTIVE = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
_STATES = ("mamba_d_state", "ssm_state_size", "state_size")
NUM_STACK_DIMS = 3


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, by its class name."""
    return "norm" in type(module).__name__.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """Reads layers of one model."""

    config: Mapping[str, Any]  # the config of the text part
    hidden: int  # features of a hidden state
    modules: set[int]  # linear modules that an adapter can be put on, by id
    has_rotary: bool  # whether positions turn queries and keys
    has_windows: bool  # whether its code makes masks of windows
    is_eager: bool  # whether it has no fused attention

    def layer(
        self,
        layer: nn.Module,
        number: int,
        *,
        unread: Collection[str],
        kept: Collection[str],
        fused: Sequence[FusedModule],
    ) -> LayerFacts:
        """Read one layer.

        Args:
            layer: It.
            number: Which.
            unread: The names of its linears, and of the modules of all experts, whose products
                nothing reads in a recompute.
            kept: The names of its parameters that a codec keeps as they were published.
            fused: Parts of the layer that one operator each can compute.
        """
        kinds = parts_of(layer)
        linears, counted = self._linears(layer, kinds)
        for name, linear in linears.items():
            is_last = linear.is_down and name.rpartition(".")[0] in unread  # of all experts
            linears[name] = replace(
                linear,
                is_unread=name in unread or is_last,
                is_kept=name in kept or f"{name}.weight" in kept,
            )
        attention = self._attention(layer, kinds, linears, number)
        parts = {one.module: one.part for one in fused}
        names = {module: name for name, module in layer.named_modules()}
        for module, part in parts.items():
            down = f"{names[module]}.{part.down}" if isinstance(part, recognise.GatedMlp) else ""
            if down in linears and linears[down].group in _WITH_GATES:
                linears[down] = replace(linears[down], is_gate_fusable=True)
        in_rotation = {norm for one in fused if one.normed for norm in one.normed.modules}
        norms = []
        for module, name in names.items():
            sizes = [p.numel() for p in module.parameters(recurse=False)]
            if is_norm(module) and (sizes or not any(True for _ in module.parameters())):
                num_weights, num_biases = (*sizes, 0, 0)[:2]
                norms.append(
                    Norm(
                        num_features=_normed(name, num_weights, attention, self.hidden),
                        num_weights=num_weights,
                        num_biases=num_biases,
                        is_fusable=isinstance(parts.get(module), recognise.Norm),
                        is_in_rotation=module in in_rotation,
                    )
                )
                counted += num_weights + num_biases
        is_rotated = any(isinstance(part, recognise.Rotary) for part in parts.values())
        is_softmax = isinstance(attention, SoftmaxAttention) and not attention.is_latent
        total = sum(p.numel() for p in layer.parameters())
        return LayerFacts(
            attention=attention,
            linears=tuple(linears.values()),
            norms=tuple(norms),
            num_others=total - counted,
            is_rotation_fusable=is_rotated and is_softmax,
        )

    # -------------------------------------------------------------------------------------- linears

    def _linears(
        self, layer: nn.Module, kinds: Mapping[nn.Module, TensorClass]
    ) -> tuple[dict[str, Linear], int]:
        """Return the products of a layer by name, and the parameters that they hold."""
        found: dict[str, Linear] = {}
        for name, module in layer.named_modules():
            group = _GROUPS.get(kinds[module], "mlp")
            if group == "router" and isinstance(module, nn.Linear) and module.out_features == 1:
                group = "shared_experts"  # it gates the expert that all tokens share
            if group in ("experts", "shared_experts") and not isinstance(module, nn.Linear):
                found |= self._stacks(name, module, group)
            elif group == "router" and not isinstance(module, nn.Linear):
                found |= _router(name, module)
            elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                d_out, d_in = module.weight.shape
                if not isinstance(module, nn.Linear):
                    d_in, d_out = d_out, d_in
                found[name] = Linear(
                    name=name.rsplit(".", 1)[-1],
                    group=group,
                    d_in=d_in,
                    d_out=d_out,
                    has_bias=module.bias is not None,
                    is_module=id(module) in self.modules,
                )
        counted = sum(linear.num_weights + linear.num_biases for linear in found.values())
        by_group: dict[Group, dict[str, Linear]] = {}
        for name, linear in found.items():
            by_group.setdefault(linear.group, {})[name] = linear
        for group, linears in by_group.items():
            found |= _ordered(linears, hidden=self.hidden, is_attention=group == "attention")
        return found, counted

    def _stacks(self, name: str, module: nn.Module, group: Group) -> Iterator[tuple[str, Linear]]:
        """Yield the fused products of experts: a matrix each, in one tensor."""
        parameters = dict(module.named_parameters(recurse=False))
        for key, parameter in parameters.items():
            num_experts, *sizes = parameter.shape
            if len(sizes) == 1 and (num_matrices := vars(module).get("moe_num_experts")):
                num_experts, sizes = num_matrices, [parameter.shape[0] // num_matrices, *sizes]
            if len(sizes) != NUM_STACK_DIMS - 1:
                continue
            d_out, d_in = sizes
            is_down = _DOWN.search(f"{name}.{key}") is not None
            if self.hidden in sizes and (d_out if is_down else d_in) != self.hidden:
                d_in, d_out = d_out, d_in  # stored transposed
            bias = parameters.get(f"{key}_bias")
            yield (
                f"{name}.{key}",
                Linear(
                    name=key,
                    group=group,
                    d_in=d_in,
                    d_out=d_out,
                    num_experts=num_experts,
                    active=min(self._num_active(), num_experts)
                    if group == "experts"
                    else num_experts,
                    has_bias=bias is not None and bias.numel() == num_experts * d_out,
                    reads="clamped" if is_down and "limit" in vars(module) else "input",
                    is_module=False,
                ),
            )

    def _num_active(self) -> int:
        for key in _ACTIVE:
            value = self.config.get(key)
            value = max(value) if isinstance(value, list) and value else value
            if isinstance(value, int):
                return value
        raise UnsupportedModelError(
            f"the config of a {self.config.get('model_type')} model does not say how many experts"
            " a token is sent to",
            limit=f"it is looked for in {', '.join(_ACTIVE)}",
            hint=f'add `"{_ACTIVE[0]}": ...` to config.json',
        )

    # ------------------------------------------------------------------------------------ attention

    def _attention(
        self,
        layer: nn.Module,
        kinds: Mapping[nn.Module, TensorClass],
        linears: Mapping[str, Linear],
        number: int,
    ) -> Attention:
        """Return how a layer mixes tokens; for a layer with two ways, its softmax attention."""
        mixers = [(n, m) for n, m in layer.named_modules() if kinds[m] == "attention"]
        softmax = [(n, m) for n, m in mixers if not _RECURRENT.search(type(m).__name__)]
        inner = [(n, m) for n, m in mixers if _RECURRENT.search(type(m).__name__)]
        softmax = [(n, m) for n, m in softmax if not any(n.startswith(f"{r}.") for r, _ in inner)]
        found = _outermost(softmax or inner, linears)
        if not found:
            return Recurrence(width=0, state_size=0)
        name, module = found[0]
        mine = {n: x for n, x in linears.items() if n.startswith(f"{name}.")}
        outputs = [x for n, x in mine.items() if _OUTPUTS.search(n) and x.reads == "inside"]
        num_heads = self._num_heads(module)
        if softmax and num_heads:
            head_dim = self.config.get("head_dim") or self.hidden // num_heads
            width = outputs[-1].d_in if outputs else num_heads * head_dim
            attention = self._softmax(module, mine, num_heads, width, number)
            return replace(
                attention,
                num_heads=len(found) * attention.num_heads,
                num_kv_heads=len(found) * attention.num_kv_heads,
                num_rotated_heads=len(found) * attention.num_rotated_heads,
            )
        states = [self.config[key] for key in _STATES if isinstance(self.config.get(key), int)]
        return _delta(module) or Recurrence(
            width=outputs[-1].d_in if outputs else 0,
            state_size=states[0] if states else 0,
            kept_features=_kept_in_chunks(module),
        )

    def _num_heads(self, module: nn.Module) -> int:
        """Return the heads of a layer, which may differ from those of the others."""
        inside = [inner for inner in module.modules() if _HEADS & vars(inner).keys()]
        named = {**self.config, **(vars(inside[0]) if inside else {})}
        found = [named[key] for key in sorted(_HEADS & named.keys()) if isinstance(named[key], int)]
        return found[0] if found else 0

    def _softmax(
        self,
        module: nn.Module,
        linears: Mapping[str, Linear],
        num_heads: int,
        width: int,
        number: int,
    ) -> SoftmaxAttention:
        v_dim = max(1, width // num_heads)
        has_keys = any(x.name in ("k_proj", "qkv_proj") for x in linears.values())
        is_latent = isinstance(self.config.get("kv_lora_rank"), int) and not has_keys
        qk_dim, rotary_dim = v_dim, 0
        if self.has_rotary:
            rope = self.config.get("rope_parameters") or {}
            rotary_dim = int(v_dim * rope.get("partial_rotary_factor", 1.0))
        num_kv_heads, has_output_gate = num_heads, False
        if is_latent and isinstance(self.config.get("qk_rope_head_dim"), int):
            rotary_dim = self.config["qk_rope_head_dim"]
            qk_dim = self.config["qk_nope_head_dim"] + rotary_dim
        else:
            for name, linear in linears.items():
                if _KEYS.search(name):
                    num_kv_heads = max(1, linear.d_out // qk_dim)
                elif linear.name == "q_proj":
                    has_output_gate = linear.d_out == 2 * num_heads * qk_dim
                elif _QKV.search(name):
                    num_kv_heads = max(1, (linear.d_out // qk_dim - num_heads) // 2)
        scores: Scores = "fused"
        if self.is_eager:
            scores = "capped" if self.config.get("attn_logit_softcapping") else "sinks"
        return SoftmaxAttention(
            num_heads=num_heads,
            num_kv_heads=min(num_kv_heads, num_heads),
            qk_dim=qk_dim,
            v_dim=v_dim,
            rotary_dim=rotary_dim,
            num_rotated_heads=num_heads + (1 if is_latent else num_kv_heads),
            window=self._window(module, number),
            has_output_gate=has_output_gate,
            is_fused=any(_QKV.search(name) for name in linears),
            is_latent=is_latent,
            scores=scores,
        )

    def _window(self, module: nn.Module, number: int) -> int | None:
        types = self.config.get("layer_types")
        if types and types[number] != "sliding_attention":
            return None
        if self.config.get("use_sliding_window") is False:
            return None
        default = self.config.get("sliding_window") if self.has_windows or types else None
        window = vars(module).get("sliding_window", default)
        return window if isinstance(window, int) and window > 0 else None


def _outermost(
    modules: Sequence[tuple[str, nn.Module]], linears: Mapping[str, Linear]
) -> list[tuple[str, nn.Module]]:
    """Return the attention blocks among these, without cross-attention: there is no encoder."""
    blocks = [
        (name, module)
        for name, module in modules
        if name
        and not isinstance(module, nn.ModuleList)
        and not re.search(r"encoder_attn|cross", name)
        and any(linear.startswith(f"{name}.") for linear in linears)
    ]
    names = [name for name, _ in blocks]
    return [(n, m) for n, m in blocks if not any(n.startswith(f"{outer}.") for outer in names)]


def _router(name: str, module: nn.Module) -> dict[str, Linear]:
    """Return the product of a router that holds its own matrix, a row for each expert."""
    found = {}
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.dim() == NUM_STACK_DIMS - 1 and not key.endswith("bias"):
            d_out, d_in = parameter.shape
            has_bias = getattr(module, "bias", None) is not None
            found[f"{name}.{key}"] = Linear(
                name=name.rsplit(".", 1)[-1],
                group="router",
                d_in=d_in,
                d_out=d_out,
                has_bias=has_bias,
                is_module=False,
            )
    return found


def _ordered(
    linears: Mapping[str, Linear], *, hidden: int, is_attention: bool
) -> Iterator[tuple[str, Linear]]:
    """Yield each product of a part of a layer with its input, recognised by shape and name."""
    named = _OUTPUTS if is_attention else _DOWN
    last = {
        name
        for name, linear in linears.items()
        if linear.d_out == hidden and (named.search(name) or linear.d_in != hidden)
    }
    widths: Sequence[int] = [x.d_out for name, x in linears.items() if name not in last]
    for name, linear in linears.items():
        if name in last and not is_attention:
            is_gated = sum(width for width in widths if width >= linear.d_in) >= 2 * linear.d_in
            gated: Reads = "clamped" if linear.reads == "clamped" else "gated"
            yield name, replace(linear, reads=gated if is_gated else "plain")
        else:
            is_inside = name in last or linear.d_in != hidden
            yield name, replace(linear, reads="inside" if is_inside else "input")


def _delta(module: nn.Module) -> DeltaAttention | None:
    """Return a gated delta rule, if the module names its sizes as one."""
    names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size")
    key_heads, value_heads, key_dim, value_dim, conv_tokens = _sizes(module, *names)
    if not key_heads:
        return None
    return DeltaAttention(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_tokens=conv_tokens,
    )


def _kept_in_chunks(module: nn.Module) -> int:
    """Return what a state space in chunks (Mamba-2) keeps of a token, in features of fp32.

    It is counted in transformers' own code, by heads, features of a head, of a state and of the
    groups that share it, and tokens of a chunk; `mamba_ssm` keeps less.
    """
    names = ("num_heads", "head_dim", "ssm_state_size", "n_groups", "chunk_size")
    h, p, n, g, c = _sizes(module, *names)
    return h * (9 * p + 5 * n + 3 * c + 2 * p * n // c + 3) + 4 * g * n if h else 0


def _sizes(module: nn.Module, *names: str) -> tuple[int, ...]:
    """Return the sizes that a module names so; zeros if it lacks any."""
    found = tuple(size for name in names if isinstance(size := vars(module).get(name), int))
    return found if len(found) == len(names) else (0,) * len(names)


def _normed(name: str, num_weights: int, attention: Attention, hidden: int) -> int:
    """Return the features that pass through a norm; a norm per head has one head's weights."""
    if not num_weights and isinstance(attention, SoftmaxAttention):
        if re.search(r"(^|[._])[kv]_norm", name):
            return attention.num_kv_heads * attention.qk_dim
        is_of_heads = re.search(r"(^|[._])qk?_norm", name)
        return attention.num_heads * attention.qk_dim if is_of_heads else hidden
    has_heads = num_weights != hidden  # but for latents, which are of no head
    if has_heads and isinstance(attention, SoftmaxAttention) and not attention.is_latent:
        if num_weights == attention.qk_dim and re.search(r"(^|[._])k(ey)?_", name):
            return attention.num_kv_heads * num_weights
        if num_weights == attention.qk_dim:
            return attention.num_heads * num_weights
    if isinstance(attention, DeltaAttention) and num_weights == attention.value_dim != hidden:
        return attention.num_value_heads * num_weights
    return num_weights
