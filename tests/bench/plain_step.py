"""One training step of plain transformers + peft, traced on a CPU as a card would run it.

It is built as such a run is: weights put on the card tensor by tensor, in 4 bits by way of a 16-bit
copy, adapters in fp32, then two steps, since the optimizer's states come with the first.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from offload.engine.tracing.cuda_kernels import (
    CUDA_WORKSPACES,
    Attention,
    Capability,
    CudaKernels,
)
from offload.engine.tracing.tracer import Tracer, fake_copy, values_are_unasked
from tests.bench.caching_allocator import CachingAllocator

NF4_BLOCK, NF4_BLOCK_OF_BLOCKS = 64, 256
ADAM_BLOCK, MIN_8BIT, MIN_PAGED = 256, 4096, 100_000
HOPPER = 9


def cublas_bytes(capability: Capability) -> int:
    """Return a cuBLAS workspace: one for each handle and stream; backward has its own handle.

    Source: pytorch aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    return 32 * 2**20 if capability[0] >= HOPPER else 4096 * 1024 * 2 + 16 * 1024 * 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainRun:
    """How a run was set up.

    Attributes:
        config: The model's, as Hugging Face writes it.
        dtype: Of weights that are not quantised, and of products of those that are.
        quant: `none`, `nf4`, or `nf4+dq` with the scales in 8 bits too.
        rank: Of LoRA on `targets`, in fp32.
        optimizer: `adamw`, or bitsandbytes' `paged_adamw_8bit`.
        attention: `eager`, or the kernel of `sdpa`; None for torch's choice.
        keeps_output: Whether the loop holds a step's output, and with it the logits, until the next
            forward returns, as `out = model(...)` in a bare loop does.
    """

    config: dict[str, Any]
    dtype: torch.dtype
    quant: str
    rank: int
    targets: tuple[str, ...]
    optimizer: str
    batch_size: int
    seq_len: int
    is_checkpointed: bool
    attention: str | None
    capability: Capability
    keeps_output: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """What `torch.cuda.max_memory_allocated` and `max_memory_reserved` would say."""

    allocated_bytes: int
    reserved_bytes: int


def trace_plain_run(run: PlainRun) -> Peaks:
    """Load a model without its weights, train it for two steps, and return the peaks."""
    memory = CachingAllocator()
    memory.allocate(cublas_bytes(run.capability))
    tracer = Tracer(memory, CUDA_WORKSPACES)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        built = _adapted(_build(run), run)
    model = fake_copy(built, mode)
    trained = [p for p in model.parameters() if p.requires_grad]
    _load(model, trained, tracer, memory)
    with ExitStack() as stack:
        if run.attention == "efficient":
            stack.enter_context(_repeated_keys())
        stack.enter_context(_cuda_kernels(run))
        stack.enter_context(values_are_unasked())
        stack.enter_context(mode)
        stack.enter_context(tracer)
        optimizer = (
            torch.optim.AdamW(trained, foreach=True)
            if run.optimizer == "adamw"
            else _PagedAdamW8bit(trained)
        )
        ids = torch.zeros(run.batch_size, run.seq_len, dtype=torch.long)
        for step in range(2):
            out = model(input_ids=ids, labels=ids)
            if step == 0:  # the thread of the backward has a handle of its own
                memory.allocate(cublas_bytes(run.capability))
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if not run.keeps_output:
                del out
    return Peaks(
        allocated_bytes=memory.peak_allocated_bytes, reserved_bytes=memory.peak_reserved_bytes
    )


def _build(run: PlainRun) -> Any:
    """Build the frozen model, quantised by `load_in_4bit` and `prepare_model_for_kbit_training`."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**run.config, use_cache=False),
        dtype=run.dtype,
        attn_implementation="eager" if run.attention == "eager" else "sdpa",
    )
    model.requires_grad_(requires_grad=False)
    if run.quant != "none":
        for module in list(model.modules()):
            for name, linear in list(module.named_children()):
                if isinstance(linear, nn.Linear) and name != "lm_head":
                    is_double = run.quant == "nf4+dq"
                    setattr(module, name, _Nf4Linear(linear, dtype=run.dtype, is_double=is_double))
        for parameter in model.parameters():
            if parameter.dtype == run.dtype:
                parameter.data = parameter.data.to(torch.float32)
    return model


def _adapted(base: Any, run: PlainRun) -> Any:
    if run.is_checkpointed:
        # layers are computed again in the backward, which torch runs without such modes
        checkpointing = {
            "use_reentrant": False,
            "context_fn": lambda: (nullcontext(), _cuda_kernels(run)),
        }
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        base.enable_input_require_grads()
    lora = LoraConfig(
        r=run.rank, lora_alpha=2 * run.rank, target_modules=list(run.targets), bias="none"
    )
    model = get_peft_model(base, lora)
    model.train()
    return model


def _cuda_kernels(run: PlainRun) -> CudaKernels:
    is_chosen = run.attention not in (None, "eager")
    return CudaKernels(run.capability, Attention(run.attention) if is_chosen else None)


def _load(
    model: nn.Module, trained: Sequence[nn.Parameter], tracer: Tracer, memory: CachingAllocator
) -> None:
    """Put the weights on the card as transformers does.

    What is to be in 4 bits comes in 16, tensor by tensor, into a block of the size of all weights
    that was taken and given back before (`caching_allocator_warmup`). What is cast to fp32 after
    that was there in 16 bits before.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad]
    quantised = [module for module in model.modules() if isinstance(module, _Nf4Linear)]
    if quantised:
        halves = [p for p in frozen if p.dtype == torch.float32]
        packed = sum(linear.weight.nbytes for linear in quantised)
        memory.free(memory.allocate(packed + sum(p.nbytes // 2 for p in halves)))
        for linear in quantised:
            whole = memory.allocate(2 * linear.in_features * linear.out_features)
            tracer.hold([linear.weight, *linear.buffers()])
            memory.free(whole)
        handles = [memory.allocate(parameter.nbytes // 2) for parameter in halves]
        for parameter, handle in zip(halves, handles, strict=True):
            tracer.hold([parameter])
            memory.free(handle)
    tracer.hold([*frozen, *model.buffers(), *trained])


# ---------------------------------------------------------------------------------------------
# 4 bits, as bitsandbytes computes with them


class _Nf4Linear(nn.Linear):
    """Decodes its weight for each product; casts to the compute type and back."""

    def __init__(self, linear: nn.Linear, *, dtype: torch.dtype, is_double: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        size = linear.weight.numel()
        packed = torch.empty(-(-size // 2), 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        num_blocks = math.ceil(size / NF4_BLOCK)
        scale = torch.uint8 if is_double else torch.float32
        self.register_buffer("scales", torch.empty(num_blocks, dtype=scale))
        if is_double:
            second = torch.empty(math.ceil(num_blocks / NF4_BLOCK_OF_BLOCKS))
            self.register_buffer("second", second)
        self.compute_dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matmul: Any = _Nf4Matmul.apply
        shape = (self.out_features, self.in_features)
        out = matmul(x.to(self.compute_dtype), self.weight, self.scales, shape)
        if self.bias is not None:
            out = out + self.bias.to(self.compute_dtype)
        return out.to(x.dtype).clone()  # peft copies what a 4-bit layer returns


class _Nf4Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, shape: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.shape = shape
        return nn.functional.linear(x, _decoded(scales, shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, scales = ctx.saved_tensors
        gradient = gradients[0]
        return gradient @ _decoded(scales, ctx.shape, gradient.dtype), None, None, None


def _decoded(scales: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    whole_scales = (
        torch.empty_like(scales, dtype=torch.float32) if scales.dtype == torch.uint8 else None
    )
    decoded = torch.empty(shape, dtype=dtype)
    del whole_scales
    return decoded


class _PagedAdamW8bit:
    """States of bitsandbytes' optimizer; large ones are paged, which is no allocator's memory."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        self._trained = trained
        self._states: list[torch.Tensor] = []

    def step(self) -> None:
        if self._states:
            return
        for parameter in self._trained:
            size = parameter.numel()
            dtype = torch.uint8 if size >= MIN_8BIT else torch.float32
            if size < MIN_PAGED:
                self._states += [torch.zeros(size, dtype=dtype) for _ in range(2)]
            if size >= MIN_8BIT:
                num_blocks = math.ceil(size / ADAM_BLOCK)
                self._states += [torch.zeros(num_blocks) for _ in range(2)]

    def zero_grad(self, *, set_to_none: bool) -> None:
        assert set_to_none
        for parameter in self._trained:
            parameter.grad = None


# ---------------------------------------------------------------------------------------------
# Seams to transformers and peft


@contextmanager
def _repeated_keys() -> Iterator[None]:
    """Let transformers repeat keys and values, for a kernel that takes no grouped ones."""
    name = "transformers.integrations.sdpa_attention.use_gqa_in_sdpa"
    with mock.patch(name, _never):
        yield


def _never(*_: object) -> bool:
    """Say no. A mock would keep what it is asked about, which would then count."""
    return False
