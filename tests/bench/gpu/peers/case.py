"""The case `peers`: jobs that each peer is given in turn, and a row for each."""

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.plan.machine.machine import GIB
from tests.bench.gpu.journal import Journal, Row
from tests.bench.gpu.peers import watched
from tests.bench.gpu.peers.equal import differences
from tests.bench.gpu.peers.jobs import ATTENTION, LINEARS, Job, model_folder, write
from tests.bench.gpu.settings import Settings
from tests.bench.record import ROOT, median, quantiles

PYTHONS = "peer_pythons.json"
SLUICE, NEEDED = "sluice", ("hf", "fsdp2", "sdpa")
NEMO_TOKENS_PER_S = 12_473.0
"""NVIDIA's NeMo AutoModel, performance summary of its documentation: Llama-3.1-8B, LoRA of rank 16
on all linears, rows of 4,096, 2 per micro-batch and 16 of these, no recompute, one H100."""
LEAST_S = 8.0  # a peer is not begun for less
MAX_LETTERS = 120
ONE_PROCESS = (
    "RANK=0",
    "LOCAL_RANK=0",
    "WORLD_SIZE=1",
    "MASTER_ADDR=127.0.0.1",
    "MASTER_PORT=29517",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A program to run.

    Attributes:
        program: Of `programs`.
        way: What it is asked for.
        limit_s: After this it is ended, on a card.
        said: What a row calls it.
    """

    program: str
    way: str
    limit_s: float
    said: str


PEERS = {
    SLUICE: Peer(program="sluice", way="finetune", limit_s=150.0, said="sluice finetune"),
    "hf": Peer(program="by_trainer", way="resident", limit_s=100.0, said="Trainer + peft"),
    "device_map": Peer(
        program="by_trainer", way="device_map", limit_s=150.0, said="Trainer + peft, device_map"
    ),
    "fsdp2": Peer(
        program="by_trainer", way="fsdp2", limit_s=150.0, said="FSDP2 with CPUOffloadPolicy"
    ),
    "zero3": Peer(
        program="by_trainer", way="zero3", limit_s=240.0, said="DeepSpeed ZeRO-3 offload"
    ),
    "unsloth": Peer(program="by_trainer", way="unsloth", limit_s=100.0, said="unsloth"),
    "soup": Peer(program="by_soup", way="stream", limit_s=150.0, said="soup-cli, stream_layers"),
    "experts4bit": Peer(
        program="by_experts4bit", way="host", limit_s=150.0, said="experts4bit-qlora, layer-major"
    ),
    "sdpa": Peer(program="by_sft", way="sdpa", limit_s=60.0, said="TRL + peft, SDPA"),
    "liger": Peer(program="by_sft", way="liger", limit_s=60.0, said="TRL + peft, SDPA, Liger"),
    "compiled": Peer(
        program="by_sft", way="compiled", limit_s=90.0, said="TRL + peft, SDPA, compiled"
    ),
}
RESIDENT = (SLUICE, "sdpa", "liger", "compiled")
ALL = (SLUICE, "hf", "fsdp2", "device_map", "zero3", "soup", "unsloth")
ON_EXPERTS = (SLUICE, "hf", "device_map")
IN_4_BITS = (SLUICE, "experts4bit")

TINY: Mapping[str, Any] = {
    "num_layers": None,
    "vocab_size": 512,
    "vram_gib": None,
    "dtype": "float32",
    "codec": "native",
    "rank": 4,
    "seq_len": 64,
    "micro_batch_size": 2,
    "num_micro_batches": 2,
    "num_steps": 6,
    "lr": 5e-3,
    "num_slots": 2,  # a CPU would hold all layers, and nothing would be streamed
    "loss_tolerance": 1e-5,
    "norm_tolerance": 1e-4,
}
CARD: Mapping[str, Any] = {
    "vocab_size": None,
    "dtype": "bfloat16",
    "rank": 16,
    "seq_len": 2048,
    "micro_batch_size": 1,
    "num_micro_batches": 8,
    "num_steps": 6,
    "lr": 2e-4,
    "num_slots": None,
    "loss_tolerance": 0.003,
    "norm_tolerance": 0.05,
}


def jobs(settings: Settings) -> tuple[Job, ...]:
    """Return the jobs, the one that all peers can do first."""
    if settings.is_rehearsal:
        return (
            Job(
                name="tiny",
                shape="tiny-qwen3",
                targets=LINEARS,
                has_experts=False,
                peers=ALL,
                **TINY,
            ),
            Job(
                name="tiny-experts",
                shape="tiny-qwen3-moe",
                targets=ATTENTION,
                has_experts=True,
                peers=ON_EXPERTS[:2],
                **TINY,
            ),
            Job(
                name="tiny-resident",
                shape="tiny-qwen3",
                targets=LINEARS,
                has_experts=False,
                peers=RESIDENT,
                is_resident=True,
                **TINY,
            ),
        )
    cap, num_layers = settings.vram_gib, settings.num_layers
    dense: Mapping[str, Any] = {
        "shape": "qwen3-8b",
        "targets": LINEARS,
        "has_experts": False,
        "vram_gib": cap or 12.0,
        "codec": "native",
        "peers": ALL,
        **CARD,
    }
    mixture: Mapping[str, Any] = {
        "shape": "qwen3-30b-a3b",
        "num_layers": num_layers or 20,
        "targets": ATTENTION,
        **CARD,
    }
    native: Mapping[str, Any] = {"codec": "native", "vram_gib": cap or 24.0, **mixture}
    resident: Mapping[str, Any] = {
        "shape": "llama-3.1-8b",
        "num_layers": num_layers,
        "targets": LINEARS,
        "has_experts": False,
        "vram_gib": cap,
        "codec": "native",
        "peers": RESIDENT,
        "is_resident": True,
        **CARD,
    }
    nemo = {"seq_len": 4096, "micro_batch_size": 2, "num_micro_batches": 16, "num_steps": 3}
    return (
        Job(name="8b-resident", **resident),
        Job(
            name="8b-nemo",
            published={"NeMo AutoModel, one H100": NEMO_TOKENS_PER_S},
            **{**resident, **nemo, "peers": (SLUICE, "liger", "compiled", "sdpa")},
        ),
        Job(name="8b-in-part", num_layers=min(num_layers or 8, 8), **dense),
        Job(name="8b", num_layers=num_layers, **dense),
        Job(name="30b-a3b", has_experts=False, peers=ALL, **native),
        Job(
            name="30b-a3b-nf4",
            codec="nf4",
            vram_gib=min(cap or 8.0, 8.0),  # in 4 bits, 12 GiB would hold all of these layers
            has_experts=True,
            peers=IN_4_BITS,
            **mixture,
        ),
        Job(name="30b-a3b-experts", has_experts=True, peers=ON_EXPERTS, **native),
    )


def run(settings: Settings, journal: Journal) -> None:
    """Give each job to its peers, and say of each whether and how they compare."""
    mine = [job for job in jobs(settings) if any(map(settings.wants, parts(job)))]
    journal.expect([name for job in mine for name in parts(job) if settings.wants(name)])
    for number, job in enumerate(mine):
        if not all(map(journal.has, parts(job))):
            give(job, settings, journal)
        if settings.left_s < LEAST_S:
            return
        if job.model_name not in {later.model_name for later in mine[number + 1 :]}:
            # tens of GB, and all have seen them
            shutil.rmtree(model_folder(job, settings.scratch / "peers"), ignore_errors=True)


def parts(job: Job) -> list[str]:
    """Return the rows of a job: of each peer, and of all together."""
    return [job.part(name) for name in (*job.peers, "all")]


def give(job: Job, settings: Settings, journal: Journal) -> None:
    """Give a job to those peers that have no row yet, as long as there is time; then compare."""
    folder = settings.scratch / "peers" / job.name
    machine = settings.out / f"machine-{job.dtype}.json" if settings.is_rehearsal else None
    if machine is not None:
        settings.machine(job.dtype)
    job_file = write(job, folder, device=settings.device, machine=machine)
    for peer in job.peers:
        if journal.has(job.part(peer)):
            continue
        if settings.left_s < LEAST_S:
            return
        with watched.card(settings.device, job.vram_gib) as free_bytes:
            result = ask(peer, job_file, settings)
        if result is None:
            return
        note(journal, job, peer, result, free_bytes=free_bytes)
    compare(journal, job)
    shutil.rmtree(folder / "cache", ignore_errors=True)


def ask(peer: str, job_file: Path, settings: Settings) -> Row | None:
    """Run a peer's program on a job; return its result, or why there is none.

    None is that the case's own time was over before the peer's: it is asked again next time.
    """
    known, folder = PEERS[peer], job_file.parent
    result_file, log = folder / f"{peer}.json", folder / f"{peer}.log"
    result_file.unlink(missing_ok=True)
    limit_s = min(known.limit_s, settings.left_s)
    extensions = settings.scratch / "peers" / "extensions"
    for lock in extensions.glob("**/lock"):  # of a compiler that was ended, waited for for ever
        lock.unlink()
    python = pythons(settings.out).get(peer, sys.executable)
    given = [f"XDG_CACHE_HOME={folder / 'cache'}", "HF_HUB_OFFLINE=1"]
    given.append(f"TORCH_EXTENSIONS_DIR={extensions}")
    given.append(f"SOUP_LAYER_STREAM_CACHE_DIR={folder / 'cache' / 'soup'}")
    given += ["OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1"] if settings.is_rehearsal else []
    given += launched(known.way, settings.device)
    program = ["-m", f"tests.bench.gpu.peers.programs.{known.program}", known.way]
    own = [] if python == sys.executable else ["-u", "PYTHONPATH"]  # another's packages
    start_s = time.perf_counter()
    told = [str(job_file), str(result_file), f"{start_s}"]
    command = ["env", *own, *given, python, *program, *told]
    try:
        ended = watched.run(command, cwd=ROOT, log=log, limit_s=limit_s)
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seen: Row = {
        "wall_s": ended.seconds,
        "peak_host_bytes": ended.peak_host_bytes,
        "python": python,
    }
    said = log.read_text(errors="replace").strip().splitlines()
    if result_file.exists():
        found: Row = json.loads(result_file.read_text())
        if "error" in found:  # a program that ends by itself says why on a line of its own
            found["error"] = " / ".join(
                [found["error"], *(x for x in said if x.startswith("error:"))]
            )
        return found | seen
    if ended.status is not None:
        last = said[-1] if said else "it said nothing"
        return seen | {"error": f"exit status {ended.status}: {last[:MAX_LETTERS]}"}
    if limit_s < known.limit_s:
        return None
    return seen | {"error": f"its {limit_s:.0f} s were over"}


def launched(way: str, device: str) -> list[str]:
    """Return what `accelerate launch --num_processes 1` would set; on a CPU it shards nothing."""
    if way == "fsdp2" and device == "cuda":
        return [*ONE_PROCESS, "ACCELERATE_USE_FSDP=true", "FSDP_OFFLOAD_PARAMS=true"]
    return [*ONE_PROCESS] if way == "zero3" else []


def pythons(out: Path) -> dict[str, str]:
    """Return which Python runs a peer, where it is not this one."""
    file = out / PYTHONS
    found: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    return found


def write_pythons(out: Path, given: Sequence[str]) -> None:
    """Keep what `--peer-python NAME=PATH` says for this run and those that go on with it.

    Raises:
        SystemExit: It names no peer, or no program.
    """
    named = dict(text.split("=", 1) for text in given if "=" in text)
    for name, path in named.items():
        if name not in PEERS or not Path(path).exists():
            raise SystemExit(f"--peer-python {name}={path}: peers are {', '.join(PEERS)}")
    if len(named) < len(given):
        raise SystemExit("--peer-python takes NAME=PATH")
    if named:
        (out / PYTHONS).write_text(json.dumps(pythons(out) | named))


def note(journal: Journal, job: Job, peer: str, result: Row, *, free_bytes: int | None) -> None:
    """Write a peer's row, with what it says of the work beside Sluice's."""
    work: Row = {
        "job": job.name,
        "peer": peer,
        "budget_gib": job.vram_gib,
        "free_bytes": free_bytes,
        "tokens_per_step": job.tokens_per_step,
        "num_layers": job.config()["num_hidden_layers"],
        "rank": job.rank,
        "dtype": job.dtype,
        "is_resident": job.is_resident,
        "published_tokens_per_s": dict(job.published),
    }
    if "error" in result:
        journal.add(job.part(peer), **work, **result)
        return
    if free_bytes is not None:
        work["peak_process_bytes"] = free_bytes - result.pop("least_free_bytes")
    steps_s = result.pop("steps_s")
    row = work | result | {"step_s": quantiles(steps_s), "n": len(steps_s), "steps_s": steps_s}
    row["tokens_per_s"] = quantiles([job.tokens_per_step / step_s for step_s in steps_s])
    if "peak_allocated_bytes" in row:
        row["peak_bytes"] = row["peak_allocated_bytes"]
    waited = f"first step after {row['first_step_s']:.0f} s"
    said = [f"{PEERS[peer].said}, {waited}, {row['peak_host_bytes'] / GIB:.1f} GiB of RAM"]
    said += [f"published: {rate:,.0f} tokens/s by {who}" for who, rate in job.published.items()]
    if peer != SLUICE:
        row |= beside(row, own_row(journal, job, SLUICE), job)
        said.append(verdict(row))
    journal.add(job.part(peer), **row, note=": ".join(said))


def beside(row: Row, reference: Row | None, job: Job) -> Row:
    """Return how a peer's row stands to Sluice's: equal work or not, and then how fast."""
    if reference is None or "error" in reference:
        return {"is_equal_work": False, "differences": ["Sluice has no result to compare with"]}
    found = differences(
        row, reference, loss_tolerance=job.loss_tolerance, norm_tolerance=job.norm_tolerance
    )
    if found:
        return {"is_equal_work": False, "differences": found}
    ratio = median(row, "tokens_per_s") / median(reference, "tokens_per_s")
    return {"is_equal_work": True, "differences": [], "of_ours": ratio}


def verdict(row: Row) -> str:
    """Say it in words."""
    if row["is_equal_work"]:
        return f"equal work, {row['of_ours']:.2f} of Sluice's tokens/s"
    return f"not compared, {'; '.join(row['differences'])}"


def compare(journal: Journal, job: Job) -> None:
    """Write down whether a job compares Sluice with its peers, and with which."""
    rows = {peer: own_row(journal, job, peer) for peer in job.peers if peer != SLUICE}
    equal = {p: row["of_ours"] for p, row in rows.items() if row and "of_ours" in row}
    missing = [peer for peer in NEEDED if peer in job.peers and peer not in equal]
    if missing:
        said = f"no comparison: {' and '.join(missing)} did not do this work"
    else:
        slower = [peer for peer, ratio in equal.items() if ratio > 1]
        said = f"compared with {len(equal)} of {len(rows)} peers at equal work"
        said += f"; slower than {', '.join(slower)}" if slower else "; faster than each"
    journal.add(job.part("all"), note=said, is_compared=not missing, of_ours_by_peer=equal)


def own_row(journal: Journal, job: Job, peer: str) -> Row | None:
    """Return the last row of a peer in a job."""
    part = job.part(peer)
    rows = [row for row in journal.rows if (row["case"], row["part"]) == ("peers", part)]
    return rows[-1] if rows else None
