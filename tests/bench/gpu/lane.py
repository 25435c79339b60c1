"""One layer's visit by each lever, in turn: the compute lane alone, its weights on the card.

    then                peft's fp32 branches, the model's own norms, rotations, gates: as measured
                        on the H200 of 2026-11-26
    branches            branches in the base's dtype
    main                fused operators too: what a run does by default, experts by Triton
    grouped_mm          main, experts by torch's grouped products
    tile M x N x K ...  main, another tile for all kernels of the experts
    replayed            main, its visits as CUDA graphs

Each arm says its milliseconds forward and back (recompute and backward), FLOP/s with the recompute
counted, whether a visit repeats to the bit, how far it is from `main`, and `main` every kernel by
name. A lever that is a switch of its own gets an arm in `arms`.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile

from finetune.adapter.linear_lora import compute_beside, compute_in_base_dtype
from offload.engine.experts import fused
from offload.engine.experts.autotune import use
from offload.engine.experts.launcher import Blocks, blocks_for
from offload.engine.experts.products import goes_through_interface
from offload.engine.model.layers import LayeredModel
from offload.engine.model.visits import attempt, visit_with_graph, visit_without_graph
from offload.engine.recompute import Unread
from offload.engine.safety.parts import candidates, unheld_products
from offload.engine.streams import release_cached, seconds_of
from offload.engine.visit_cache import VISIT_CACHE
from offload.plan.machine.machine import ExpertsImplementation
from tests.bench.gpu import models
from tests.bench.gpu.ceiling import ceiling_of
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.kernels import top_of
from tests.bench.gpu.launches import captured
from tests.bench.gpu.settings import Settings
from tests.bench.gpu.training import TINY, TINY_EXPERTS
from tests.bench.grouped import failures
from tests.builders import model_facts

SHAPES = ("qwen3-30b-a3b", "qwen3-8b")
LENS, REHEARSED_LENS = (8192, 2048), (16,)
VOCAB_SIZE = 512
RANK, EXPERTS_RANK = 16, 8
NUM_ROUNDS, NUM_VISITS = 5, 6
THEN, BRANCHES, MAIN, GROUPED, REPLAYED = "then", "branches", "main", "grouped_mm", "replayed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A way to compute the layer.

    Attributes:
        name: What its row is called.
        is_in_base_dtype: Whether branches are in the base's dtype.
        is_fused: Whether norms, rotations and gates are fused.
        experts: What multiplies experts.
        blocks: The tile of their kernels; None for the default.
    """

    name: str
    is_in_base_dtype: bool = True
    is_fused: bool = True
    experts: ExpertsImplementation = "triton"
    blocks: Blocks | None = None

    @property
    def layer(self) -> tuple[object, ...]:
        """What it is of a layer; arms that agree in it share one."""
        return (self.is_in_base_dtype, self.is_fused, self.experts)

    def tile(self) -> AbstractContextManager[object]:
        """Return what has its tile taken by the experts' kernels."""
        if self.blocks is None:
            return nullcontext()
        return mock.patch.object(fused, "blocks_for", return_value=self.blocks)


TILES = tuple(
    Blocks(m=m, n=n, k=k, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (64, 128, 64, 4, 3),
        (128, 256, 64, 8, 3),
    )
)


def tiles_for(capability: int) -> tuple[Blocks, ...]:
    """Return the tiles of the arms, and those that the kernels take by default on a card."""
    known = [
        blocks_for(divmod(capability, 10), torch.bfloat16, rows_per_expert=num * 8 // 128)
        for num in LENS
    ]
    return tuple(dict.fromkeys((*known, *TILES)))


def arms(shape: str, num_tokens: int) -> tuple[Arm, ...]:
    """Return the arms of a shape, those first that tell most; `then` only at the length it had."""
    main: tuple[Arm, ...] = (Arm(name=MAIN),)
    if num_tokens == LENS[0]:
        main += (
            Arm(name=THEN, is_in_base_dtype=False, is_fused=False),
            Arm(name=BRANCHES, is_fused=False),
        )
    if "a3b" not in shape:
        return main
    tiled = tuple(Arm(name=name_of(blocks), blocks=blocks) for blocks in TILES)
    return (*main, Arm(name=GROUPED, experts="grouped_mm"), *tiled)


def name_of(blocks: Blocks) -> str:
    """Return what the arm of a tile is called."""
    tile = f"tile {blocks.m}x{blocks.n}x{blocks.k}"
    return f"{tile}, {blocks.num_warps} warps, {blocks.num_stages} stages"


def run(settings: Settings, journal: Journal) -> None:
    """Time all arms of both shapes, the long length first."""
    lens = REHEARSED_LENS if settings.is_rehearsal else LENS
    work = [
        (shape, num, arm)
        for num in lens
        for shape in SHAPES
        for arm in arms(shape, LENS[0] if settings.is_rehearsal else num)
    ]
    names = [part_of(shape, num, arm.name) for shape, num, arm in work]
    graphs = [part_of(shape, num, REPLAYED) for num in lens for shape in SHAPES]
    journal.expect([*names, *graphs])
    layers = Layers(settings)
    for (shape, num_tokens, arm), name in zip(work, names, strict=True):
        if journal.has(name) or settings.left_s < 0:
            continue
        ways: dict[str, Callable[[Layer, Arm], dict[str, Any]]] = {name: layers.measured}
        if arm.name == MAIN:
            ways[part_of(shape, num_tokens, REPLAYED)] = layers.replayed
        for part, measured in ways.items():
            try:
                with arm.tile() if not settings.is_rehearsal else nullcontext():
                    journal.add(part, **measured(layers.of(shape, num_tokens, arm), arm))
            except failures() as error:  # a tile that does not fit: a result, too
                journal.fail(part, error)


def part_of(shape: str, num_tokens: int, arm: str) -> str:
    """Return what a row is called."""
    return f"{shape} {num_tokens} {arm}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer on the card, and what visits it.

    Attributes:
        key: Shape and tokens.
        up: Its forward.
        down: Its recompute and backward; returns the gradient by the input.
        gradients: Of its adapters, added to by `down`.
        flops: Of both, recompute counted.
        ceiling_flops_per_s: The best of its products.
    """

    key: tuple[str, int]
    up: Callable[[], torch.Tensor]
    down: Callable[[], torch.Tensor]
    gradients: tuple[torch.Tensor, ...]
    flops: float
    ceiling_flops_per_s: float


class Layers:
    """One layer at a time on the device, and what `main` gave for each shape and length."""

    def __init__(self, settings: Settings) -> None:
        """Make none yet."""
        self._settings, self._device = settings, torch.device(settings.device)
        self._key: tuple[object, ...] = ()
        self._layer: Layer | None = None
        self._ceilings: dict[tuple[str, int], float] = {}
        self._main: dict[tuple[str, int], list[torch.Tensor]] = {}

    def of(self, shape: str, num_tokens: int, arm: Arm) -> Layer:
        """Return a layer as an arm has it."""
        key = (shape, num_tokens, *arm.layer)
        if self._layer is None or key != self._key:
            self._layer = None
            gc.collect()
            release_cached(self._device)
            self._layer, self._key = self._made(shape, num_tokens, arm), key
        return self._layer

    def measured(self, layer: Layer, arm: Arm) -> dict[str, Any]:
        """Time an arm and compare what it gives; of `main` name every kernel."""
        start_s = time.perf_counter()
        with in_visit(arm.name):
            first = _results(layer)
            again = _results(layer)
            warm_s = time.perf_counter() - start_s
            times = self._timed(layer.up, layer.down)
            host_s = time.perf_counter()
            layer.up(), layer.down()
            host_s = time.perf_counter() - host_s
            found: dict[str, Any] = _said(layer, times) | {
                "warm_s": warm_s,
                "host_s": host_s,
                "repeats": all(map(torch.equal, first, again)),
            }
            if arm.name == MAIN:
                self._main[layer.key] = first
                found["top"] = self._kernels(layer)
        of_main = self._main.get(layer.key)
        if of_main is not None:
            found["from_main"] = max(map(_distance, first, of_main))
        repeats = "repeats" if found["repeats"] else "DOES NOT REPEAT"
        apart = f", {found['from_main']:.2g} from main" if "from_main" in found else ""
        return found | {"note": f"{found['note']}, {repeats}{apart}"}

    def replayed(self, layer: Layer, _arm: Arm) -> dict[str, Any]:
        """Time an arm as CUDA graphs; on a CPU nothing is captured."""
        with in_visit(REPLAYED):
            up, down = captured(layer.up), captured(layer.down)
            return _said(layer, self._timed(up, down))

    def _timed(self, *visits: Callable[[], object]) -> list[float]:
        """Return the seconds of each, its launches queued before the clock starts."""
        num = 1 if self._settings.is_rehearsal else NUM_VISITS
        found = []
        for visit in visits:

            def several(visit: Callable[[], object] = visit) -> None:
                for _ in range(num):
                    visit()

            rounds = [seconds_of(several, self._device) / num for _ in range(NUM_ROUNDS)]
            found.append(statistics.median(rounds))
        return found

    def _kernels(self, layer: Layer) -> list[dict[str, Any]]:
        is_cuda = self._device.type == "cuda"
        kind = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
        with profile(activities=[kind]) as seen:
            layer.up(), layer.down()
            if is_cuda:
                torch.cuda.current_stream().synchronize()
        return top_of(seen, is_cuda=is_cuda)

    def _made(self, shape: str, num_tokens: int, arm: Arm) -> Layer:
        is_tiny = self._settings.is_rehearsal
        fields = models.fields(shape, num_layers=1, vocab_size=VOCAB_SIZE)
        if is_tiny:
            experts = {k: v for k, v in TINY_EXPERTS.items() if k in fields}
            fields |= {**TINY, **experts, "num_hidden_layers": 1}
            fields |= {"num_experts_per_tok": 2} if experts else {}
        dtype = torch.float32 if is_tiny else torch.bfloat16
        model = _adapted(fields, dtype, arm, is_tiny=is_tiny).to(self._device).train()
        layered = LayeredModel(model)
        if arm.is_fused and not is_tiny:
            layered.fuse()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, VOCAB_SIZE, (1, num_tokens), generator=generator)
        call = layered.front({"input_ids": ids.to(self._device)}).calls[0]
        size = (2, 1, num_tokens, int(fields["hidden_size"]))
        input_BTD, gradient_BTD = torch.randn(size, generator=generator).to(self._device, dtype)
        trained = [p for p in layered.layers[0].parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        visit = partial(visit_with_graph, layered, 0, input_BTD=input_BTD, call=call)
        unread = _unread(layered, visit)

        def up() -> torch.Tensor:
            return visit_without_graph(
                layered, 0, input_BTD=input_BTD, call=call, mlps=(), has_output=False
            ).output_BTD

        def down() -> torch.Tensor:
            found_BTD = visit(unread=unread).backward(gradient_BTD, [])
            assert found_BTD is not None
            return found_BTD

        key = (shape, num_tokens)
        if key not in self._ceilings:
            found = ceiling_of(model_facts(fields), num_tokens, device=self._device, dtype=dtype)
            self._ceilings[key] = found.flops_per_s
        return Layer(
            key=key,
            up=up,
            down=down,
            gradients=tuple(p.grad for p in trained if p.grad is not None),
            flops=visit_flops(fields, num_tokens),
            ceiling_flops_per_s=self._ceilings[key],
        )


def _adapted(fields: dict[str, Any], dtype: torch.dtype, arm: Arm, *, is_tiny: bool) -> Any:
    """Return a model of one layer with an adapter on what the recipes adapt."""
    base = models.with_values(models.empty(fields, dtype))
    has_experts = "num_experts" in fields
    for module in base.modules():
        if has_experts and goes_through_interface(module):
            use("eager" if is_tiny else arm.experts, module)
    rank = EXPERTS_RANK if has_experts else RANK
    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(models.ATTENTION) if has_experts else "all-linear",
        target_parameters=list(models.EXPERTS) if has_experts else None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    model: Any = compute_beside(get_peft_model(base, lora))
    if arm.is_in_base_dtype:
        compute_in_base_dtype(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero to begin with, which would leave A without gradients
            torch.nn.init.normal_(parameter, std=models.STD / 10)
    return model


def _unread(layered: LayeredModel, visit: Callable[..., Any]) -> tuple[Unread, ...]:
    """Return the products that a recompute leaves out, as the engine finds them."""
    named = candidates(layered.layers[0])
    paths = unheld_products(layered.layers[0], lambda unread: visit(unread=unread))
    found = (Unread(module=named[name], path=path) for name, path in paths.items())
    return tuple(one for one in found if attempt(partial(visit, unread=(one,))))


@contextmanager
def in_visit(name: str) -> Iterator[None]:
    """Be within one visit of a step, for what keeps casts of A and B that long."""
    with VISIT_CACHE.in_pass():
        VISIT_CACHE.enter(name)
        yield


def _results(layer: Layer) -> list[torch.Tensor]:
    for gradient in layer.gradients:
        gradient.zero_()
    found = [layer.up().clone(), layer.down().clone()]
    return [*found, *(gradient.clone() for gradient in layer.gradients)]


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _said(layer: Layer, times: Sequence[float]) -> dict[str, Any]:
    up_s, down_s = times
    rate = layer.flops / (up_s + down_s)
    share = rate / layer.ceiling_flops_per_s
    note = f"{up_s * 1e3:.3g} ms up, {down_s * 1e3:.3g} down, {rate / 1e12:.3g} TFLOP/s"
    return {
        "num_tokens": layer.key[1],
        "up_s": up_s,
        "down_s": down_s,
        "visit_flops_per_s": rate,
        "best_product_flops_per_s": layer.ceiling_flops_per_s,
        "visit_share": share,
        "note": f"{note}, {share:.0%} of the best product",
    }


def visit_flops(fields: dict[str, Any], num_tokens: int) -> float:
    """Count a forward, its recompute and its backward, without the branches.

    A recompute leaves out the last product, and attention's backward is two and a half forwards.
    """
    (layer,) = model_facts(fields).layers
    products = sum(x.active * x.d_in * x.d_out for x in layer.linears)
    unread = sum(x.active * x.d_in * x.d_out for x in layer.linears if x.is_unread)
    attention = layer.attention.flops_per_token(num_tokens)
    return num_tokens * (2.0 * (3 * products - unread) + 4.5 * attention)
