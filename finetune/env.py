"""The only place that reads or sets environment variables."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from finetune.errors import ConfigError

SECRET, LEAST_SECRET = "SLUICE_SECRET", 32
LLAMA_CPP = "SLUICE_LLAMA_CPP"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Which of how many processes this one is."""

    num: int  # processes of the run
    index: int  # this one's number among them
    num_local: int  # the number of processes on this machine
    local_index: int  # this one's number on this machine
    node: int  # this machine's number; two launchers on one host count as two machines
    store: tuple[str, int] = ("", 0)  # host and port at which the processes meet
    # Whether the launcher has opened the store there, and not rank 0.
    is_store_launcher_s: bool = False
    num_restarts: int = 0  # how often the launcher has started the processes again
    # What the user has set for the processes to prove to each other whose they are.
    secret: str | None = field(default=None, repr=False)

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all processes are on this machine."""
        return self.num == self.num_local


def launch() -> Launch:
    """Return what a launcher such as `accelerate launch` has set; without one, a single process.

    Raises:
        ConfigError: One of the launcher's variables is missing, or not a number; or the secret of
            a launch on several machines is missing or short.
    """
    num = _number("WORLD_SIZE", default="1")
    if num == 1:
        return Launch(num=1, index=0, num_local=1, local_index=0, node=0)
    index = _number("RANK")
    num_local = _number("LOCAL_WORLD_SIZE", default=str(num))
    found = Launch(
        num=num,
        index=index,
        num_local=num_local,
        local_index=_number("LOCAL_RANK"),
        node=_number("GROUP_RANK", default=str(index // max(1, num_local))),
        store=(os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT")),
        is_store_launcher_s=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        num_restarts=_number("TORCHELASTIC_RESTART_COUNT", default="0"),
        secret=os.environ.get(SECRET),
    )
    if found.secret is None and not found.is_on_one_machine:
        raise _no_secret("not set")
    if found.secret is not None and len(found.secret) < LEAST_SECRET:
        raise _no_secret(f"{len(found.secret)} characters long")
    return found


def _no_secret(seen: str) -> ConfigError:
    return ConfigError(
        f"the environment variable {SECRET} is {seen}",
        limit="the processes of several machines prove by it that they are of one launch; it has at"
        f" least {LEAST_SECRET} characters",
        hint=f"`export {SECRET}=$(openssl rand -hex 32)` once, and the same value on each machine",
    )


def _number(name: str, *, default: str | None = None) -> int:
    text = os.environ.get(name, default)
    if text is None or not text.isdecimal():
        seen = "not set" if text is None else repr(text)
        raise ConfigError(
            f"the environment variable {name} is {seen}",
            limit="a launcher sets WORLD_SIZE, RANK, LOCAL_RANK, MASTER_PORT to numbers, or none",
            hint="`accelerate launch --multi_gpu --num_processes N`, or `unset WORLD_SIZE`",
        )
    return int(text)


# Variable of accelerate's launcher -> its setting, and what happens instead.
_UNUSED = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", "weights compute in model.dtype"),
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", "`train.compile: true` compiles the layers"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "gradient_accumulation_steps",
        "`train.grad_accum_steps` or `train.tokens_per_step` sets it",
    ),
    "ACCELERATE_USE_FSDP": ("fsdp", "layers are streamed from one copy in RAM, not sharded"),
    "ACCELERATE_USE_DEEPSPEED": ("deepspeed", "layers are streamed from one copy in RAM"),
    "ACCELERATE_USE_MEGATRON_LM": ("megatron_lm", "processes share a step, not a layer"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("parallelism_config", "processes share a step only"),
}
_OFF = ("", "NO", "FALSE", "0", "1")  # one step is no accumulation


def launch_notes() -> tuple[str, ...]:
    """Report launcher settings that have no effect: options, and the number of processes.

    accelerate passes its settings, including those of its config file, as environment variables.
    Without `--multi_gpu` it starts one process, however many were requested; the only trace of the
    others is then the rendezvous address.
    """
    values = {name: os.environ.get(name, "") for name in _UNUSED}
    notes = [
        f"accelerate's {setting}: {values[name]} has no effect here: {instead}"
        for name, (setting, instead) in _UNUSED.items()
        if values[name].upper() not in _OFF
    ]
    is_alone = "WORLD_SIZE" not in os.environ
    if is_alone and "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ:
        notes.append(
            "accelerate was asked for several processes and has started this one alone:"
            " `accelerate launch --multi_gpu --num_processes N` starts them"
        )
    for name, launcher in (("SLURM_NTASKS", "Slurm"), ("OMPI_COMM_WORLD_SIZE", "mpirun")):
        num = os.environ.get(name, "1")
        if is_alone and num not in ("0", "1"):
            notes.append(
                f"{launcher} was asked for {num} processes ({name}), and this run is one by itself:"
                " `accelerate launch --multi_gpu --num_processes N` shares a step among them"
            )
    return tuple(notes)


def rank_label() -> str:
    """Return a suffix that names this rank if there are several processes; empty for one."""
    rank = os.environ.get("RANK")
    return "" if rank is None or os.environ.get("WORLD_SIZE", "1") == "1" else f" (rank {rank})"


def is_offline() -> bool:
    """Return whether the user has forbidden the Hugging Face hub."""
    return os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "TRUE", "YES", "ON"}


def has_proxy() -> bool:
    """Return whether connections go through a proxy, so that a direct one proves nothing."""
    return any(name.lower() in {"https_proxy", "all_proxy"} for name in os.environ)


def columns() -> int | None:
    """Return the line width that the user has set; None if it is not set."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def connect_on_loopback() -> None:
    """Have gloo and NCCL listen on the loopback interface, unless the user has named another."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")


def quiet_libraries() -> None:
    """Have libraries log only errors and draw no progress bars: a run draws its own.

    Each library reads these settings when it is imported.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its store warns of closed connections
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    # On a processor with bf16 products it asks for a kernel that nothing here would call.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def cache_dir() -> Path:
    """Return where tokens of data sets and stores of weights are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sluice"


def llama_cpp_dir() -> Path | None:
    """Return the folder of llama.cpp that the user has named; None if none is."""
    named = os.environ.get(LLAMA_CPP)
    return Path(named) if named else None


def stores_dir() -> Path:
    """Return the directory of weight stores."""
    return cache_dir() / "stores"


@contextmanager
def loading_one_by_one() -> Iterator[None]:
    """Have transformers convert tensors one at a time.

    Its threads would run ahead and hold a whole converted model in memory.
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
