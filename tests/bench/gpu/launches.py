"""Visits of a layer as today, as CUDA graphs, and compiled with reduced overhead.

What docs/development/launches.md asks first: whether a replay saves the host's time, its copies in
and out included, and gives the same bits. A layer with its adapters, all on the card, is visited
upwards, then downwards (recompute and backward in one capture), as from a visit's second
micro-batch on. On a CPU nothing is captured: a replay is the same visit again.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from finetune.adapter.linear_lora import Linear, compute_in_base_dtype
from offload.engine.model.layers import LayeredModel
from offload.engine.model.visits import visit_with_graph, visit_without_graph
from offload.engine.visit_cache import VISIT_CACHE
from tests.bench.gpu import models
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.settings import Settings
from tests.bench.gpu.training import FAILURES, TINY
from tests.bench.record import quantiles

SHAPES, LENS, COMPILED_LEN = ("qwen3-0.6b", "llama-3.1-8b"), (128, 512, 2048), 512
REHEARSED_LENS, REHEARSED_COMPILED_LEN = (8, 16), 0
VOCAB_SIZE = 512  # embeddings and head are not visited
RANK, NUM_WARM, NUM_VISITS, NUM_ROUNDS = 16, 3, 48, 5
Visit = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer with what its visits read.

    Attributes:
        input_BTD: Its input.
        gradient_BTD: By its output.
        up: Its forward, without a graph; returns the output.
        down: Its recompute and backward; returns the gradient by the input.
        gradients: Of its adapters, added to by `down`.
        compile: Has torch compile it.
    """

    input_BTD: torch.Tensor
    gradient_BTD: torch.Tensor
    up: Visit
    down: Visit
    gradients: tuple[torch.Tensor, ...]
    compile: Callable[[], None]


def run(settings: Settings, journal: Journal) -> None:
    """Measure both shapes at all lengths."""
    lens = REHEARSED_LENS if settings.is_rehearsal else LENS
    compiled = REHEARSED_COMPILED_LEN if settings.is_rehearsal else COMPILED_LEN
    work = [(shape, num, False) for shape in SHAPES for num in lens]
    work += [(shape, compiled, True) for shape in SHAPES if compiled]
    work = [one for one in work if settings.wants(name_of(*one))]
    journal.expect([name_of(*one) for one in work])
    for shape, num_tokens, is_compiled in work:
        name = name_of(shape, num_tokens, is_compiled)
        if journal.has(name) or settings.left_s < 0:
            continue
        measure = compiled_visits if is_compiled else replayed_visits
        try:
            layer = made(shape, num_tokens, settings)
            with VISIT_CACHE.in_pass():
                VISIT_CACHE.enter(name)
                journal.add(name, shape=shape, num_tokens=num_tokens, **measure(layer))
        except (*FAILURES, RuntimeError) as error:  # of a capture or the compiler: a result, too
            journal.fail(name, error)


def name_of(shape: str, num_tokens: int, is_compiled: bool) -> str:
    """Return what a part's row is called."""
    return f"{shape}-{num_tokens}" + "-compiled" * is_compiled


def made(shape: str, num_tokens: int, settings: Settings) -> Layer:
    """Make one layer of a shape, with adapters on all its linears, and something to visit it with.

    Its norms, rotation and gate are fused on a card, as a run has them.
    """
    is_cpu = settings.is_rehearsal
    fields = models.fields(shape, num_layers=1, vocab_size=VOCAB_SIZE)
    fields |= {**TINY, "num_hidden_layers": 1} if is_cpu else {}
    dtype, device = (torch.float32 if is_cpu else torch.bfloat16), torch.device(settings.device)
    base = models.with_values(models.empty(fields, dtype))
    adapters = LoraConfig(
        r=RANK,
        lora_alpha=RANK,
        target_modules="all-linear",
        init_lora_weights=False,  # B is not zero, so that A has gradients
    )
    model: Any = get_peft_model(base, adapters).to(device)
    compute_in_base_dtype(model)
    layered = LayeredModel(model)
    if not is_cpu:
        layered.fuse()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, int(fields["vocab_size"]), (1, num_tokens), generator=generator)
    call = layered.front({"input_ids": drawn.to(device)}).calls[0]
    size = (1, num_tokens, int(fields["hidden_size"]))
    given = torch.randn(2, *size, generator=generator).to(device, dtype)
    input_BTD, gradient_BTD = given[0], given[1]

    def up() -> torch.Tensor:
        visited = visit_without_graph(
            layered, 0, input_BTD=input_BTD, call=call, mlps=(), has_output=False
        )
        return visited.output_BTD

    def down() -> torch.Tensor:
        graph = visit_with_graph(layered, 0, input_BTD=input_BTD, call=call)
        found_BTD = graph.backward(gradient_BTD, [])
        assert found_BTD is not None
        return found_BTD

    trained = [p for p in layered.layers[0].parameters() if p.requires_grad]
    for parameter in trained:  # a capture adds to what is there
        parameter.grad = torch.zeros_like(parameter)
    return Layer(
        input_BTD=input_BTD,
        gradient_BTD=gradient_BTD,
        up=up,
        down=down,
        gradients=tuple(p.grad for p in trained if p.grad is not None),
        compile=partial(_compile, layered.layers[0]),
    )


def _compile(layer: Any) -> None:
    for module in layer.modules():
        if isinstance(module, Linear):  # as `compile_layers` leaves them
            vars(module)["forward"] = torch.compiler.disable(module.forward)
    layer.compile(mode="reduce-overhead")


def replayed_visits(layer: Layer) -> dict[str, Any]:
    """Time visits as they are today, then as graphs, and compare what both give."""
    today = _visited(layer, layer.up, layer.down)
    before_bytes = reserved_bytes()
    up, down = captured(layer.up), captured(layer.down)
    found = _visited(layer, up, down)
    is_equal = all(map(torch.equal, today, found))
    # Inputs arrive in other buffers, and outputs outlive the next replay: all are copied.
    input_BTD, gradient_BTD = layer.input_BTD.clone(), layer.gradient_BTD.clone()

    def up_copied() -> torch.Tensor:
        layer.input_BTD.copy_(input_BTD)
        return up().clone()

    def down_copied() -> torch.Tensor:
        layer.input_BTD.copy_(input_BTD)
        layer.gradient_BTD.copy_(gradient_BTD)
        return down().clone()

    arms = {
        "up": layer.up,
        "down": layer.down,
        "replayed_up": up_copied,
        "replayed_down": down_copied,
    }
    times = timed(arms, layer.input_BTD.device)
    before, after = (
        sum(times[f"{arm}{name}"]["p50"] for name in ("up", "down")) for arm in ("", "replayed_")
    )
    return {
        **{f"{name}_s": seconds for name, seconds in times.items()},
        "replay_is_equal": is_equal,
        "graph_bytes": reserved_bytes() - before_bytes,
        "note": f"replays take {after / before:.2f} of the time, equal bits: {is_equal}",
    }


def compiled_visits(layer: Layer) -> dict[str, Any]:
    """Time visits as they are today, then compiled with reduced overhead."""
    device = layer.input_BTD.device
    before = timed({"up": layer.up, "down": layer.down}, device)
    layer.compile()
    start_s = time.perf_counter()

    def marked(visit: Visit) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return visit()

    arms = {"compiled_up": partial(marked, layer.up), "compiled_down": partial(marked, layer.down)}
    for visit in arms.values():
        visit()
    compile_s = time.perf_counter() - start_s
    times = before | timed(arms, device)
    sums = [times[f"{arm}up"]["p50"] + times[f"{arm}down"]["p50"] for arm in ("", "compiled_")]
    return {
        **{f"{name}_s": seconds for name, seconds in times.items()},
        "compile_s": compile_s,
        "note": f"compiled visits take {sums[1] / sums[0]:.2f} of the time",
    }


def _visited(layer: Layer, up: Visit, down: Visit) -> list[torch.Tensor]:
    """Return copies of what a visit up and one down give."""
    for gradient in layer.gradients:
        gradient.zero_()
    found = [up().clone(), down().clone()]
    return [*found, *(gradient.clone() for gradient in layer.gradients)]


def captured(visit: Visit) -> Visit:
    """Return a visit's replay, whose result is overwritten by the next one."""
    if not torch.cuda.is_available():
        return visit
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # Triton compiles, cuBLAS takes its workspace
        for _ in range(NUM_WARM):
            visit()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = visit()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def timed(arms: Mapping[str, Visit], device: torch.device) -> dict[str, dict[str, float]]:
    """Return seconds per visit of each arm, all in turn within a round.

    Visits are issued one after the other, and the end waited for once: what takes longer, the host
    or the card, is what is seen.
    """
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(NUM_ROUNDS):
        for name, visit in arms.items():
            visit()
            wait(device)
            start_s = time.perf_counter()
            for _ in range(NUM_VISITS):
                visit()
            wait(device)
            found[name].append((time.perf_counter() - start_s) / NUM_VISITS)
    return {name: quantiles(seconds) for name, seconds in found.items()}


def reserved_bytes() -> int:
    """Return what torch's allocator holds of the card's memory, that of captures included."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def wait(device: torch.device) -> None:
    """Wait for all that was issued on this stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
