"""What writing a layer down in fewer bytes costs, and what is left of its weights.

    python -m tests.bench.bench_codecs [--device cuda] [--rounds 7] [--out FILE.jsonl]

One decoder layer of Qwen3's shape (0.6B's on a CPU, 8B's on a GPU), its matrices normal with the
standard deviation that they are initialised with, in bf16. Encoding and decoding run in turn with a
plain copy and with the layer's forward, in each round, so that a machine that changes its speed
changes it for all. GB/s are of decoded bytes, 1e9.

A layer is decoded once per visit, however many micro-batches it then computes: the last columns
are decoding as a share of the forward of M micro-batches, all in one visit.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3Model

from offload.engine.codec import Form, form_named
from offload.plan.facts.codec import CODECS
from tests.bench.record import git, median

MICRO_BATCHES = (1, 2, 4)
SHAPES = {
    "cpu": {"hidden": 1024, "mlp": 3072, "heads": 16, "tokens": 512},
    "cuda": {"hidden": 4096, "mlp": 12288, "heads": 32, "tokens": 2048},
}


@dataclass(frozen=True, kw_only=True)
class Written:
    """A layer's matrices in one form, and where they are decoded to."""

    codec: Form
    encoded: list[torch.Tensor]
    decoded: list[torch.Tensor]

    def encode(self, matrices: list[torch.Tensor]) -> None:
        """Write all matrices down."""
        for matrix, encoded in zip(matrices, self.encoded, strict=True):
            self.codec.encode(matrix, encoded)

    def decode(self) -> None:
        """Read all matrices back."""
        for encoded, decoded in zip(self.encoded, self.decoded, strict=True):
            self.codec.decode(encoded, decoded)

    def error(self, matrices: list[torch.Tensor]) -> tuple[float, float]:
        """Return the root of the mean square, and the largest, in the weights' root mean square."""
        truth = torch.cat([matrix.view(-1) for matrix in matrices]).double()
        found = torch.cat([decoded.view(-1) for decoded in self.decoded]).double()
        error, unit = found - truth, truth.square().mean().sqrt()
        rms = error.square().mean().sqrt() / unit
        return float(rms), float(error.abs().max() / unit)


class Bench:
    """One layer, its forward, and its matrices in every form."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.shape = SHAPES[device]
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with self.device:
            self._model = self._build()
            self._hidden = torch.randn(1, self.shape["tokens"], self.shape["hidden"])
        torch.set_default_dtype(torch.float32)
        layer = self._model.layers[0].parameters()
        self.matrices = [weight.detach() for weight in layer if weight.ndim > 1]
        self.written = {
            name: self._write(form_named(name)) for name in CODECS if not CODECS[name].published
        }
        self._copies = [torch.empty_like(matrix) for matrix in self.matrices]

    @property
    def decoded_bytes(self) -> int:
        """The size of the layer's matrices as they compute."""
        return sum(matrix.nbytes for matrix in self.matrices)

    def visit(self, num_micro_batches: int) -> None:
        """Compute some micro-batches."""
        with torch.no_grad():
            for _ in range(num_micro_batches):
                self._model(inputs_embeds=self._hidden, use_cache=False)

    def copy(self) -> None:
        """Copy the matrices."""
        for matrix, copy in zip(self.matrices, self._copies, strict=True):
            copy.copy_(matrix)

    def seconds(self, work: Callable[[], None]) -> float:
        """Return how long some work takes, to its end."""
        if self.device.type == "cpu":
            start_s = time.perf_counter()
            work()
            return time.perf_counter() - start_s
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def round(self) -> dict[str, float]:
        """Time everything once."""
        found = {"copy": self.seconds(self.copy)}
        for count in MICRO_BATCHES:
            found[f"visit {count}"] = self.seconds(lambda count=count: self.visit(count))  # type: ignore[misc]
        for name, written in self.written.items():
            found[f"encode {name}"] = self.seconds(lambda w=written: w.encode(self.matrices))  # type: ignore[misc]
            found[f"decode {name}"] = self.seconds(written.decode)
        return found

    def _build(self) -> Qwen3Model:
        config = Qwen3Config(
            hidden_size=self.shape["hidden"],
            intermediate_size=self.shape["mlp"],
            num_attention_heads=self.shape["heads"],
            num_key_value_heads=8,
            num_hidden_layers=1,
            vocab_size=8,
        )
        return Qwen3Model(config)

    def _write(self, codec: Form) -> Written:
        sizes = [codec.num_bytes(matrix.shape, matrix.dtype) for matrix in self.matrices]
        return Written(
            codec=codec,
            encoded=[torch.empty(n, dtype=torch.uint8, device=self.device) for n in sizes],
            decoded=[torch.empty_like(matrix) for matrix in self.matrices],
        )


def measure(bench: Bench, *, num_rounds: int) -> list[dict[str, object]]:
    """Time all rounds after one that warms up; return a row for the copy and for each codec."""
    bench.round()
    rounds = [bench.round() for _ in range(num_rounds)]

    def quantiles(quantity: Callable[[dict[str, float]], float]) -> dict[str, float]:
        values = sorted(quantity(found) for found in rounds)
        cuts = statistics.quantiles(values, n=10, method="inclusive")
        return {"p20": cuts[1], "p50": statistics.median(values), "p80": cuts[7]}

    def rate(key: str) -> dict[str, float]:
        return quantiles(lambda found: bench.decoded_bytes / found[key] / 1e9)

    common = {
        "bench": "codecs",
        "git_sha": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "machine": machine(bench.device),
        "torch": torch.__version__,
        "shape": bench.shape,
        "n": num_rounds,
        "copy_gb_per_s": rate("copy"),
        "forward_s": quantiles(lambda found: found["visit 1"]),
    }
    rows = []
    for name, written in bench.written.items():
        rms, largest = written.error(bench.matrices)
        row: dict[str, object] = {
            "codec": name,
            "ratio": sum(part.nbytes for part in written.encoded) / bench.decoded_bytes,
            "encode_gb_per_s": rate(f"encode {name}"),
            "decode_gb_per_s": rate(f"decode {name}"),
            "rms_error": rms,
            "max_error": largest,
        }
        for count in MICRO_BATCHES:
            row[f"decode_share_{count}"] = quantiles(
                lambda found, name=name, count=count: (  # type: ignore[misc]
                    found[f"decode {name}"] / found[f"visit {count}"]
                )
            )
        rows.append(common | row)
    return rows


def machine(device: torch.device) -> str:
    """Name what computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    name = names[0].partition(": ")[2] if names else platform.machine()
    return f"{name}, {torch.get_num_threads()} of {len(names)} cores"


def show(rows: list[dict[str, object]], print_line: Callable[[object], None]) -> None:
    """Print the rows as a table."""
    first = rows[0]
    print_line(
        f"{first['machine']}; {first['shape']}; a copy: {median(first, 'copy_gb_per_s'):.2f} GB/s;"
        f" forward of a micro-batch: {median(first, 'forward_s') * 1e3:.1f} ms"
    )
    table = Table(title="medians over the rounds; errors in the weights' root mean square")
    columns = ("codec", "ratio", "encode GB/s", "decode GB/s", "RMS error", "max error")
    for column in (*columns, *(f"decode / visit, M = {count}" for count in MICRO_BATCHES)):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['codec']}",
            f"{row['ratio']:.4f}",
            f"{median(row, 'encode_gb_per_s'):.2f}",
            f"{median(row, 'decode_gb_per_s'):.2f}",
            f"{row['rms_error']:.2e}",
            f"{row['max_error']:.2e}",
            *(f"{median(row, f'decode_share_{count}'):.1%}" for count in MICRO_BATCHES),
        )
    print_line(table)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=list(SHAPES), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = measure(Bench(options.device), num_rounds=options.rounds)
    show(rows, Console(width=120).print)
    if options.out is not None:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
