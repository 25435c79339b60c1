"""Ranks that use torch.distributed: gloo for messages; gloo or, on CUDA, NCCL for gradients.

How a failure of one rank ends all, in order of the means:

1. A process that ends closes its connections, which is an error of the others' collectives within
   seconds. A launcher ends the other processes of its machine too.
2. A collective has a time limit, torch's own: in a step `LEAST_STEP_S`, or `STEPS` times the
   longest step so far if that is more; elsewhere, and before the first step has ended, `TIMEOUT_S`.
   So a process that hangs, or a machine that is unplugged, ends the others.
3. Whoever fails leaves one word in the store of the launch: the cause. A rank whose collective
   fails looks there; if there is none it leaves who has ended, or does not come to know of it.

The first word is what all show, one rank of each machine: the one that left it or the first that
asks. A launcher ends the others of its machine as soon as one exits with an error, and would cut
off that report, so ranks that show nothing wait `QUIET_S` before they exit. Rank 0 may have the
store: it stays until the others that live know the word, for `MOMENT_S` at most.

How strangers are kept out: whoever reaches torch's store can read it and write to it, and gloo and
NCCL connect to the addresses in it. So each value is signed, by HMAC-SHA256 of its key and itself,
and one without a valid signature is refused. The processes know a secret: on one machine it is in a
file that its user alone can read, so that nothing is to be set; on several it is an environment
variable. A signature of an earlier launch would still be valid, so each process first writes a
random number among what it says of itself. What gloo and NCCL write is signed by a key that is made
of the secret and all these numbers: it is good for these processes alone.
"""

import hmac
import json
import os
import platform
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import distributions
from itertools import accumulate, groupby
from pathlib import Path
from tempfile import NamedTemporaryFile
from timeit import repeat
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import (  # type: ignore[attr-defined]  # no stub has them
    PrefixStore,
    Store,
    TCPStore,
    distributed_c10d,
)

from finetune.env import SECRET, Launch, cache_dir, connect_on_loopback
from finetune.errors import FinetuneError, RankError, RunFailedError
from finetune.training.messages import read, written
from finetune.training.ranks import Ranks
from offload.errors import SluiceError
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.machine.machine import MEASURED, Network, Rate
from offload.plan.memory.memory import GRADIENT_BUCKET_BYTES
from offload.plan.schedule.schedule import Reduced

T = TypeVar("T")

JOIN_S, TIMEOUT_S = 120.0, 2 * 3600.0
LEAST_STEP_S, STEPS = 60.0, 10
BLOCK_BYTES, MOST_ELEMENTS = 2**20, 2**24
QUIET_S, MOMENT_S, NOTICED_S, ANSWER_S = 12.0, 10.0, 1.0, 5.0
_POLL_S, _POLL_FRAC, _MOST_POLL_S = 0.0002, 0.02, 0.01
_OF_NETWORK = re.compile("gloo|pair closure|NCCL|store")
PACKAGES = (
    *("sluice-finetune", "torch", "transformers", "peft", "accelerate", "bitsandbytes"),
    *("tokenizers", "triton"),
)
_LOOPBACK = "127.0.0.1"
_NUM_BYTES = 32  # of a secret, and of a signature


class ProcessGroup(Ranks):
    """The ranks of a launch with several processes."""

    run_errors = (RunFailedError,)  # any other error may be of one rank, for which the others wait

    def __init__(
        self,
        launch: Launch,
        *,
        bucket_bytes: int = GRADIENT_BUCKET_BYTES,
    ) -> None:
        """Wait for the others.

        Raises:
            FinetuneError: They cannot be reached, or do not belong to this one.
        """
        self.num, self.index, self.local_index = launch.num, launch.index, launch.local_index
        self._launch, self._bucket_bytes, self._bucket = launch, bucket_bytes, torch.empty(0)
        self._knowing = [f"knows/{rank}" for rank in range(self.num)]
        self._pids: list[int] = []
        self._longest_step_s: float | None = None  # but for the first, in which layers are compiled
        self._begun_s = time.monotonic()
        with self._reaching():
            secret, store = secret_of(launch), _opened_store(launch)
        self._all_attempts = SignedStore(store, secret)
        self._store = SignedStore(PrefixStore(f"attempt/{launch.num_restarts}", store), secret)
        with self, self._reaching():
            tables = _met(self._store, launch)
            self.nodes = tuple(table["node"] for table in tables)
            self._pids = [table["pid"] for table in tables]
            if launch.is_on_one_machine:
                connect_on_loopback()
            if has_cuda := torch.cuda.is_available():
                torch.cuda.set_device(self.local_index)
            of_all = hmac.digest(secret, json.dumps(tables).encode(), "sha256")
            dist.init_process_group(
                backend="cuda:nccl,cpu:gloo" if has_cuda else "gloo",
                store=SignedStore(self._store.store, of_all),
                rank=self.index,
                world_size=self.num,
                timeout=timedelta(seconds=JOIN_S),
            )
            self.is_restart = bool(
                launch.num_restarts and store.check(["begun"]) and self._all_attempts.get("begun")
            )

    def note_begun(self) -> None:
        """Let processes that the launcher starts after these continue the run."""
        self._all_attempts.set("begun", "yes")

    # ------------------------------------------------------------------------------------ failures

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Disconnect; or leave word why this rank fails, and let one of its machine show it.

        Raises:
            RankError: Another rank shows it.
        """
        if error is None:
            self.exchange(None)
            return
        what = error.what if isinstance(error, SluiceError) else f"{type(error).__name__}: {error}"
        failure = (
            error
            if isinstance(error, RankError)
            else self._failure(f"rank {self.index} has failed: {what}")
        )
        if self.index == 0:
            ended = {rank for rank, _ in enumerate(self._pids) if self._has_ended(rank)}
            others = [key for rank, key in enumerate(self._knowing) if rank not in ended]
            with suppress(RuntimeError):
                self._store.wait(others, timedelta(seconds=MOMENT_S))
        if isinstance(error, Exception) and not failure.is_shown:
            with suppress(KeyboardInterrupt):  # the launcher's SIGTERM
                time.sleep(QUIET_S)
            raise failure from None

    def _failure(self, own: str | None, why: str = "") -> RankError:
        """Return the error for the first word on why the launch ends.

        Args:
            own: Why this rank fails; None if another does, which is then to be named.
            why: The message of torch's error.
        """
        here = [r for r, node in enumerate(self.nodes) if r and node == self._launch.node]
        shown, what = min(here, default=self.index), own or self._gone([0], "its store is gone")
        with suppress(RuntimeError, OSError, FinetuneError):  # without a store
            # on a thread of its own: a store that has stopped never answers
            shown, what = ThreadPoolExecutor(1).submit(self._word, own, why).result(ANSWER_S)
        return RankError(
            what,
            limit="all must live, and do their share of each step",
            hint="see what the others and the launcher show; `--resume` continues from the newest"
            " checkpoint",
            is_shown=shown == self.index,
        )

    def _word(self, own: str | None, why: str) -> tuple[int, str]:
        """Return the rank that shows here why the launch ends, and the first word on that."""
        with suppress(RuntimeError, ValueError):  # torch closes all connections, as for a timeout
            neighbour = (self.index + 1) % self.num
            work = dist.irecv(torch.empty(1), src=neighbour)
            work.wait(timedelta(milliseconds=1))  # type: ignore[union-attr]  # of a group's member
        self._store.set(self._knowing[self.index], "")
        if own is None:
            with suppress(RuntimeError):  # others come here too, but for those that fail otherwise
                self._store.wait(["failure"], timedelta(seconds=NOTICED_S))
            late = [r for r, key in enumerate(self._knowing) if not self._store.store.check([key])]
            own = self._gone([r for r in late if self._has_ended(r)] or late, why)
        word = json.dumps([self.index, self._launch.node, own])
        rank, node, what = json.loads(self._store.compare_set("failure", "", word))
        first = self._store.compare_set(f"shown/{self._launch.node}", "", str(self.index))
        return rank if node == self._launch.node else int(first), what

    def _has_ended(self, rank: int) -> bool:
        """Return whether a process is one of this machine and has ended."""
        status = Path("/proc", str(self._pids[rank]), "status")
        is_running = status.exists() and "(zombie)" not in status.read_text()
        return self.nodes[rank] == self._launch.node and not is_running

    def _gone(self, ranks: Sequence[int], why: str) -> str:
        shown = "rank {} (machine {})" if self.num_machines > 1 else "rank {}"
        names = " and ".join(shown.format(rank, self.nodes[rank]) for rank in ranks)
        return f"{names or 'another rank'} is gone or does not answer: {why}"

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError, ValueError) as error:
            host, port = self._launch.store
            raise FinetuneError(
                f"rank {self.index} of {self.num} cannot reach the others at {host}:{port}:"
                f" {str(error).partition(chr(10))[0] or 'no answer'}",
                limit=f"all must be there within {JOIN_S:,.0f} s; the launcher's MASTER_ADDR and"
                " MASTER_PORT lead to a port that is rank 0's or the launcher's alone",
                hint="start the same command on each machine, with a port that is free"
                " (`--main_process_port 0` of `accelerate launch` on one); see that a firewall lets"
                " them through",
            ) from error

    @contextmanager
    def in_collectives(self, *, is_step: bool) -> Iterator[None]:
        """See `Ranks`."""
        own_s = max(self._longest_step_s or 0.0, time.monotonic() - self._begun_s)
        is_first = self._longest_step_s is None
        limit_s = TIMEOUT_S if is_first or not is_step else max(LEAST_STEP_S, STEPS * own_s)
        distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), dist.group.WORLD)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not _OF_NETWORK.search(str(error)):
                raise
            why = re.sub(r"^\[\S+:\d+\] |\. This is typically caused by .*|\n.*", "", str(error))
            raise self._failure(None, why) from error

    # ------------------------------------------------------------------------------------ messages

    def exchange(self, value: T, *, is_step: bool = False) -> tuple[T, ...]:
        """Return the values of all ranks, in rank order."""
        own: list[torch.Tensor] = []
        content = json.dumps(written(value, own)).encode()
        size, sizes = torch.tensor([len(content)]), torch.empty(self.num, dtype=torch.int64)
        self._run(dist.all_gather_into_tensor, (sizes, size), is_step=is_step)
        most = int(sizes.max())
        sent = torch.frombuffer(bytearray(content.ljust(most)), dtype=torch.uint8)
        every = torch.empty(self.num * most, dtype=torch.uint8)
        self._run(dist.all_gather_into_tensor, (every, sent), is_step=is_step)
        values = []
        for rank, text in enumerate(every.view(self.num, -1)):
            is_own, theirs = rank == self.index, list[torch.Tensor]()
            values.append(value if is_own else read(json.loads(text.numpy().tobytes()), theirs))
            for tensor in own if is_own else theirs:
                for piece in tensor.view(-1).split(MOST_ELEMENTS):
                    self._run(dist.broadcast, (piece,), src=rank, is_step=is_step)
        if not is_step:
            self._begun_s = time.monotonic()
        return tuple(values)

    def _run(
        self,
        collective: Callable[..., Any],
        *blocks: tuple[torch.Tensor, ...],
        is_step: bool,
        **how: Any,
    ) -> None:
        """Run a collective on the bytes of each block, as gloo does not know all types, and wait.

        Signals are handled meanwhile.
        """
        with self.in_collectives(is_step=is_step):
            works = [
                collective(*(one.view(torch.uint8) for one in block), **how, async_op=True)
                for block in blocks
            ]
            start_s = time.monotonic()
            for work in works:
                while not work.is_completed():  # a lane that polls often keeps the GIL from others
                    waited_s = time.monotonic() - start_s
                    time.sleep(min(_POLL_S + _POLL_FRAC * waited_s, _MOST_POLL_S))
                work.wait()

    def sum_losses(self, loss: float) -> float:
        """Return the sum of the losses of all ranks, at the end of a step."""
        losses = self.exchange(loss, is_step=True)
        took_s, longest_s = time.monotonic() - self._begun_s, self._longest_step_s
        self._longest_step_s = 0.0 if longest_s is None else max(longest_s, took_s)
        self._begun_s = time.monotonic()
        return sum(losses)

    # ----------------------------------------------------------------------------------- gradients

    def sum_gradients(self, parameters: Sequence[nn.Parameter], *, dtype: torch.dtype) -> None:
        """Add up the gradients of all ranks, in place."""
        missing = {i for i, parameter in enumerate(parameters) if parameter.grad is None}
        for i in missing:
            parameters[i].grad = torch.zeros_like(parameters[i])
        gradients = [p.grad.view(-1) for p in parameters if p.grad is not None]
        total = sum(map(len, gradients))
        largest = min(self._bucket_bytes // 4 // FP32_BYTES, total)
        num_elements = 2 * (min(2 * largest, total) + self.num)  # sent and received, in two pieces
        if len(self._bucket) < num_elements:
            self._bucket = torch.empty(num_elements, device=gradients[0].device)
        # All memory is allocated: from here on no rank can fail alone and leave others waiting.
        gathered = self.exchange(missing, is_step=True)
        pieces = [piece for gradient in gradients for piece in gradient.split(largest)]
        ends = accumulate(map(len, pieces))
        for _, part in groupby(pieces, key=lambda _: (next(ends) - 1) // largest):
            self._sum_in_order(list(part), self._bucket.view(dtype))
        for i in set.intersection(*gathered):
            parameters[i].grad = None

    def send_from_main(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by those of the main rank; all are fp32."""
        every = ((tensor.view(-1),) for tensor in tensors)
        self._run(dist.broadcast, *every, src=0, is_step=True)

    def _sum_in_order(self, part: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """Add up in fp32, in the order of the ranks; each rank adds up an equal share.

        It gets the others' gradients of its share, and sends them the sums: 2 (N - 1) / N of the
        data, as the best all-reduce. So the bits depend on no size of bucket, and on no place in
        it: a layer's own sums are those of all gradients at once.
        """
        sizes = [piece.numel() for piece in part]
        num_elements = -(-sum(sizes) // self.num) * self.num
        sent, received = memory[: 2 * num_elements].split(num_elements)
        pieces = sent[: sum(sizes)].split(sizes)
        for piece, place in zip(part, pieces, strict=True):
            place.copy_(piece)
        # gloo moves a large message in one direction at a time, and several small ones in both
        most = self.num * BLOCK_BYTES // memory.itemsize if memory.is_cpu else num_elements
        blocks = list(zip(received.split(most), sent.split(most), strict=True))
        self._run(dist.all_to_all_single, *blocks, is_step=True)
        rows = [(block, every.view(self.num, -1)) for every, block in blocks]
        shares = [(block, own[0].copy_(sum(one.float() for one in own))) for block, own in rows]
        self._run(dist.all_gather_into_tensor, *shares, is_step=True)
        for piece, place in zip(part, pieces, strict=True):
            piece.copy_(place)


# ------------------------------------------------------------------------------------------- launch


class SignedStore(Store):
    """A store of signed values, also for torch's own use."""

    def __init__(self, store: Store, key: bytes) -> None:
        """Take where values are, and what they are signed with."""
        super().__init__()
        self.store: Any = store  # its stub does not know bytes
        self._key = key

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self.store.set(key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        """Return a value, once it is there.

        Raises:
            FinetuneError: It was not written by a process of this launch.
            RuntimeError: It is not there in time, or the store is gone.
        """
        return self._checked(key, self.store.get(key))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a value where there is none, and return what is there then.

        Raises:
            FinetuneError: See `get`.
        """
        return self._checked(key, self.store.compare_set(key, expected, self._signed(key, value)))

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        """Wait until something is there, by whomever."""
        self.store.wait(keys, *timeout)

    def _signed(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        return hmac.digest(self._key, json.dumps(key).encode() + content, "sha256") + content

    def _checked(self, key: str, found: bytes) -> bytes:
        content = bytes(found)[_NUM_BYTES:]
        if not hmac.compare_digest(self._signed(key, content), bytes(found)):
            raise FinetuneError(
                f"what is at {key!r} in the store of this launch is not signed with its secret",
                limit="only its own processes may take part in it",
                hint=f"set {SECRET} to the same value on each machine; on one machine start all"
                " ranks as the same user, with the same XDG_CACHE_HOME",
            )
        return content


def _opened_store(launch: Launch) -> Store:
    """Return the store of the launcher, or that of rank 0.

    On one machine the store of rank 0 listens on the loopback interface alone.

    Raises:
        RuntimeError: It cannot be reached.
        OSError: Another program has the port.
    """
    host, port = launch.store
    is_alone, is_server = launch.is_on_one_machine, not (launch.index or launch.is_store_launcher_s)
    listener = socket.create_server((_LOOPBACK, port)) if is_server and is_alone else None
    opening = ThreadPoolExecutor(1).submit(  # an answer may never come
        lambda: TCPStore(
            _LOOPBACK if is_alone else host,
            port,
            None,
            is_server,
            timedelta(seconds=JOIN_S),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),  # torch closes it
        )
    )
    return opening.result(JOIN_S + 1)


def _met(store: SignedStore, launch: Launch) -> list[dict[str, Any]]:
    """Wait until all processes are there; return what each says of itself.

    Raises:
        FinetuneError: They do not belong together, or what changes the last bits is not alike.
        RuntimeError: One is not there in time.
    """
    own = {
        "nonce": secrets.token_hex(_NUM_BYTES),
        "pid": os.getpid(),
        "node": launch.node,
        "place": {"LOCAL_RANK": launch.local_index, "LOCAL_WORLD_SIZE": launch.num_local},
        "alike": {"WORLD_SIZE": launch.num, **surroundings()},
    }
    store.set(f"rank/{launch.index}", json.dumps(own))
    tables: list[dict[str, Any]] = []
    for rank in range(launch.num):
        tables.append(json.loads(store.get(f"rank/{rank}")))
        _require_alike(rank, tables[rank]["alike"], tables[0]["alike"])
    nodes = [table["node"] for table in tables]
    for rank, node in enumerate(nodes):  # of all, as nobody waits for one that fails here
        place = {"LOCAL_RANK": nodes[:rank].count(node), "LOCAL_WORLD_SIZE": nodes.count(node)}
        _require_alike(rank, tables[rank]["place"], place)
    return tables


def surroundings() -> dict[str, str]:
    """Return versions of packages that change numerics; on a CPU also what its sums depend on."""
    found = {one.name: one.version for one in distributions() if one.name in PACKAGES}
    found |= {"Python": ".".join(platform.python_version_tuple()[:2])}
    if torch.cuda.is_available():
        return {**found, "tf32": str(torch.backends.cuda.matmul.allow_tf32)}
    return {
        **found,
        "torch's threads": str(torch.get_num_threads()),
        "torch's CPU code": torch.backends.cpu.get_cpu_capability(),
    }


def _require_alike(rank: int, found: dict[str, Any], expected: dict[str, Any]) -> None:
    other = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if other:
        raise FinetuneError(
            f"rank {rank} has {' and '.join(f'{name} {found.get(name)}' for name in other)}",
            limit="by the other ranks it is"
            f" {' and '.join(f'{name} {expected.get(name)}' for name in other)}, and what trains"
            " must stay the same on all, to the bit",
            hint="start all machines by the same launcher with the same versions and"
            " OMP_NUM_THREADS, and see that nothing else sets RANK, WORLD_SIZE, LOCAL_RANK,"
            " LOCAL_WORLD_SIZE or GROUP_RANK",
        )


def secret_of(launch: Launch) -> bytes:
    """Return the secret that all processes of a launch know.

    Raises:
        FinetuneError: It is not kept from other users of this machine.
        OSError: It cannot be read or written.
    """
    if launch.secret is not None:
        return launch.secret.encode()
    file = cache_dir() / "secret"
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent, buffering=0) as new:  # for this user alone
        new.write(secrets.token_bytes(_NUM_BYTES))
        with suppress(FileExistsError):
            os.link(new.name, file)  # that of one process, whole
    status, key = file.stat(), file.read_bytes()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or len(key) < _NUM_BYTES:
        raise FinetuneError(
            f"{file} has mode {status.st_mode & 0o777:o}, user {status.st_uid}, {len(key)} bytes",
            limit=f"it is the secret of this user's launches, of {_NUM_BYTES} bytes, which he alone"
            " reads",
            hint=f"`rm {file}`, and start again; or set {SECRET} to a secret of your own",
        )
    return key


# ------------------------------------------------------------------------------------------ network

NUM_ELEMENTS, FEWEST_ELEMENTS = 2**21, 2**12  # of the largest sum, if no layer says: 8 MiB
ENOUGH_S, NUM_REPEATS = 0.25, 5
LEAST_FRAC = 0.1  # the least share of a sum's time that is not latency; less is noise


def measure_network(
    ranks: Ranks, *, device: torch.device, num_elements: int = NUM_ELEMENTS
) -> Network:
    """Return the latency and the rate between the ranks, the same on all of them.

    They are measured by the sums that training takes. The latency is that of the sum of an element
    for each rank. Sums grow until they take long enough, or have as many elements as training's.

    Args:
        ranks: There are several.
        device: The device of this rank's gradients.
        num_elements: Elements of the largest sum.
    """

    def sum_s(num: int) -> float:
        parameter = nn.Parameter(torch.zeros(num, device=device))
        parameter.grad = torch.zeros_like(parameter)
        sum_it = partial(ranks.sum_gradients, [parameter], dtype=torch.float32)
        return max(ranks.exchange(min(repeat(sum_it, repeat=NUM_REPEATS, number=1))))

    latency_s = sum_s(ranks.num)
    num, most = FEWEST_ELEMENTS, max(num_elements, FEWEST_ELEMENTS)
    while (largest_s := sum_s(num)) < ENOUGH_S and num < most:
        num = min(4 * num, most)
    sent = Reduced.of((), num, element_bytes=FP32_BYTES, world_size=ranks.num).rest
    bytes_s = max(largest_s - latency_s, LEAST_FRAC * largest_s)
    return Network(
        world_size=ranks.num,
        latency_s=Rate(value=latency_s, source=MEASURED),
        bytes_per_s=Rate(value=sent / bytes_s, source=MEASURED),
    )
