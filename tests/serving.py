"""A server of a tiny model in a process of its own, and clients of it."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tinker
import torch
from tinker import types
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from finetune.serve.server import KEY_FILE
from tests.doubles import tiny_tokenizer

NAME = "tiny/qwen3"
START_S = 120.0
_TOOL = Path(sys.executable).with_name("tinker")


def save_base(folder: Path, *, kind: Literal["dense", "tied", "mixture"] = "dense") -> Path:
    """Write a tiny model with random weights, and its tokenizer; return the folder."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind == "tied",
        "eos_token_id": tokenizer.eos_token_id,
    }
    model: Qwen3ForCausalLM | Qwen3MoeForCausalLM
    if kind == "mixture":
        experts: dict[str, Any] = {
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server."""

    process: subprocess.Popen[str]
    address: str
    folder: Path
    base: Path

    @property
    def key(self) -> str:
        return (self.folder / KEY_FILE).read_text().strip()

    def tool(self, *words: str) -> str:
        """Run Tinker's own command, and return what it prints."""
        settings = (f"TINKER_BASE_URL={self.address}", f"TINKER_API_KEY={self.key}")
        command = ["env", *settings, "TINKER_TELEMETRY=0", str(_TOOL), *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def service(address: str, key: str) -> Iterator[tinker.ServiceClient]:
    """A client, which ends its session; in a process of its own, as it leaves connections open."""
    found = tinker.ServiceClient(base_url=address, api_key=key)
    try:
        yield found
    finally:
        found.close("success").result()


@contextmanager
def served(
    base: Path, folder: Path, machine_file: Path, *words: str, port: int = 0
) -> Iterator[Served]:
    """Serve a base in this context."""
    command = [
        *(sys.executable, "cli.py", "serve", str(base), "model.dtype=float32"),
        *("offload.num_slots=2", "--machine", str(machine_file), "--folder", str(folder)),
        *("--name", NAME, "--rank", "8", "--row-tokens", "128", "--cached-tokens", "2048"),
        *("--port", str(port), *words),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield Served(process=process, address=_address(process), folder=folder, base=base)
    finally:
        assert process.stderr is not None
        process.stderr.close()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _address(process: subprocess.Popen[str]) -> str:
    """Return where a server listens, once it does."""
    assert process.stderr is not None
    said, ends_s = "", time.monotonic() + START_S
    while time.monotonic() < ends_s:
        line = process.stderr.readline()
        said += line
        found = re.search(r"TINKER_BASE_URL=(\S+)", line)
        if found:
            return found[1]
        assert line or process.poll() is None, said
    raise AssertionError(f"no address after {START_S} s: {said}")


def row(ids: Sequence[int], targets: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    given: dict[str, Any] = {"target_tokens": list(targets), **inputs}
    tensors = {
        name: types.TensorData(
            data=list(values), dtype="int64" if name == "target_tokens" else "float32"
        )
        for name, values in given.items()
    }
    return types.Datum(model_input=types.ModelInput.from_ints(list(ids)), loss_fn_inputs=tensors)
