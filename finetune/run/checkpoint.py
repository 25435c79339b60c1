"""Checkpoints of a run: a kill at any moment cannot tear them, and damage is detected.

Data order, learning rate and dropout are pure functions of the recipe and the step, so weights,
optimizer state, the step's number and, in float16, the factor of the loss are all that has to be
kept.
Older checkpoints are removed only once the new one is whole and on the disk.

Before anything is loaded, the files are checked against their manifest. Then the step has to be the
folder's, names, shapes and dtypes of what trains those of the run, and all values finite.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from finetune.errors import CheckpointError
from finetune.files.atomic import PARTIAL, naming, remove
from finetune.files.manifest import clear_partial, damage, whole_folder

# ---------------------------------------------------------------------------------------------
# The factor of the loss of a model that computes in float16.
#
# The smallest float16 number is 6e-8, so most gradients by hidden states would be zero. The loss,
# and with it each gradient, is multiplied by a power of two, which costs no digit, and gradients of
# what trains are divided by it in fp32. A factor that is too large makes a gradient overflow: the
# step is skipped, and the factor halved. After a while without an overflow it is doubled again.
#
# Constants are those of torch.amp.GradScaler.

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
MAX_SKIPPED = 20
"""Skipped steps in a row that end a run: halved so often, the first factor is 1/16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """The factor of a step, and how it came about."""

    factor: float = FIRST  # the factor of the loss
    num_good: int = 0  # steps without an overflow since the factor has changed
    num_skipped: int = 0  # steps of the run that were skipped
    num_in_a_row: int = 0  # the number of the newest of these in a row

    def skipped(self) -> "LossScale":
        """Return the factor of the step after one that was skipped."""
        return LossScale(
            factor=self.factor * BACKOFF,
            num_skipped=self.num_skipped + 1,
            num_in_a_row=self.num_in_a_row + 1,
        )

    def applied(self) -> "LossScale":
        """Return the factor of the step after one that was applied."""
        is_grown = self.num_good + 1 == INTERVAL and math.isfinite(self.factor * GROWTH)
        return LossScale(
            factor=self.factor * GROWTH if is_grown else self.factor,
            num_good=0 if self.num_good + 1 == INTERVAL else self.num_good + 1,
            num_skipped=self.num_skipped,
        )


_STATE, _TRAINED, _OPTIMIZER = "state.json", "trained.safetensors", "optimizer.pt"
_FILES = (_STATE, _TRAINED, _OPTIMIZER)
_SCALING = "loss_scale"
_PREFIX = "step-"
_NAME = re.compile(_PREFIX + r"[0-9]{7,}")


class NamedTensors(Protocol):
    """Tensors that are read when they are asked for."""

    def __getitem__(self, name: str, /) -> torch.Tensor:
        """Return the tensor with this name."""


StateForm: TypeAlias = Mapping[str, tuple[torch.Size, torch.dtype]]


class Stateful(Protocol):
    """What a checkpoint needs of an optimizer in addition to what it updates."""

    def state_dict(self) -> dict[str, Any]:
        """Return its states and settings."""


class Resumable(Stateful, Protocol):
    """What a resume needs of it."""

    def load_state_dict(self, content: dict[str, Any], /) -> None:
        """Take what `state_dict` returned."""


class _DamagedError(Exception):
    """A file of a checkpoint is not what a run writes; users get it as a CheckpointError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    """What a checkpoint's files hold."""

    state: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    optimizer: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a run goes on with after a checkpoint."""

    scaling: LossScale | None  # how its loss is scaled; None if it is not
    tensors: NamedTensors  # name -> what trains; all of it may be more than a process has room for
    optimizer: dict[str, Any]  # its states

    def put_into(self, parameters: Mapping[str, torch.Tensor], optimizer: Resumable) -> None:
        """Copy the tensors into the parameters, and let the optimizer take its states."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.tensors[name])
        optimizer.load_state_dict(self.optimizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a checkpoint is made of."""

    # What is updated, by name, each tensor whole; none on a rank that writes nothing and has only a
    # part of it.
    weights: Mapping[str, torch.Tensor]
    optimizer: Stateful  # with the states of these


class Checkpoints:
    """The checkpoints of one run, a folder for each."""

    def __init__(self, path: Path) -> None:
        """Name their directory; nothing is created."""
        self.path = path

    def steps(self) -> list[int]:
        """Return after which steps there is a checkpoint, in order."""
        if not self.path.is_dir():
            return []
        return sorted(
            int(folder.name.removeprefix(_PREFIX))
            for folder in self.path.iterdir()
            if _NAME.fullmatch(folder.name) and any((folder / name).exists() for name in _FILES)
        )

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def folder(self, step: int) -> Path:
        """Return where the checkpoint after `step` steps is."""
        return self.path / f"{_PREFIX}{step:07d}"

    def trained_file(self, step: int) -> Path:
        """Return the file with what the run has trained after `step` steps."""
        return self.folder(step) / _TRAINED

    def clear_torn(self) -> None:
        """Remove partial checkpoints that a kill during writing or removal has left."""
        clear_partial(self.path, name=_PREFIX)
        for torn in self.path.glob(f"{PARTIAL}{_PREFIX}*"):  # a removal's
            if _NAME.fullmatch(torn.name.removeprefix(PARTIAL)):
                remove(torn)

    def save(
        self,
        step: int,
        parameters: Mapping[str, torch.Tensor],
        optimizer: Stateful,
        *,
        data_hash: str,
        scaling: LossScale | None = None,
        num_kept: int,
        best: int | None = None,
    ) -> Path:
        """Write the checkpoint after `step` steps; keep the newest `num_kept` and the `best`.

        Raises:
            CheckpointError: It cannot be written; older ones are still there.
        """
        final = self.folder(step)
        with whole_folder(final) as partial:
            tensors = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
            save_file(tensors, partial / _TRAINED)
            _save_optimizer(optimizer, partial / _OPTIMIZER)
            state = {"step": step, "data_hash": data_hash}
            scaled = {} if scaling is None else {_SCALING: asdict(scaling)}
            with naming(partial / _STATE):
                (partial / _STATE).write_text(json.dumps(state | scaled))
        for old in self.steps()[:-num_kept]:
            if old == best:
                continue
            discarded = self.folder(old).with_name(PARTIAL + self.folder(old).name)
            remove(discarded)
            self.folder(old).rename(discarded)  # a torn removal must not look complete
            remove(discarded)
        return final

    def require_whole(self, step: int) -> None:
        """Check that a checkpoint's files are what was written, before a model is loaded.

        Raises:
            CheckpointError: It is damaged; the newest earlier one that is whole is suggested.
        """
        found = self._damage(step)
        if found is not None:
            raise self._damaged(step, found)

    def read(
        self,
        step: int,
        parameters: Mapping[str, torch.Tensor],
        *,
        data_hash: str,
        form: StateForm,
        is_scaled: bool = False,
    ) -> Restored:
        """Return what a checkpoint holds, if it is what these parameters need.

        Args:
            step: The step of the checkpoint.
            parameters: Name -> what trains; all of it is in the checkpoint, and nothing else.
            data_hash: The digest of the training rows.
            form: The form of the states that the run's optimizer has after a step.
            is_scaled: Whether the run scales its loss.

        Raises:
            CheckpointError: The training rows are not those that the run was started with, or the
                checkpoint is damaged.
        """
        self.require_whole(step)
        try:
            content = _read(self.folder(step))
            _check_tensors(content.tensors, parameters)
            scaling = LossScale(**content.state[_SCALING]) if is_scaled else None
            if scaling is None or scaling.num_skipped < step:  # else no state was made
                _check_states(content.optimizer, form)
        except _DamagedError as error:
            raise self._damaged(step, str(error)) from error
        if content.state["data_hash"] != data_hash:
            raise CheckpointError(
                "the training rows are not those that the run was started with",
                limit="a resumed run continues to the bit, so its data cannot change",
                hint="restore the data file, or start a new run with `output.name=...`",
            )
        return Restored(
            scaling=scaling,
            tensors=content.tensors,
            optimizer=content.optimizer,
        )

    def trained(self, step: int) -> Mapping[str, torch.Tensor]:
        """Return what a checkpoint's run has trained, by name; each tensor is read when asked for.

        Raises:
            CheckpointError: It is damaged.
        """
        self.require_whole(step)
        try:
            tensors = _Stored(self.trained_file(step))
            for name in tensors:
                _check_finite(f"{name} in {_TRAINED}", tensors[name])
        except (OSError, SafetensorError, _DamagedError) as error:
            raise self._damaged(step, str(error)) from error
        return tensors

    def _damage(self, step: int) -> str | None:
        """Return what is wrong with a checkpoint's files, as far as is known without a model."""
        folder = self.folder(step)
        found = damage(folder, needs=_FILES)
        if found is not None:
            return found
        written = json.loads((folder / _STATE).read_text())["step"]
        return None if written == step else f"{_STATE} is of step {written}, the folder of {step}"

    def _damaged(self, step: int, what: str) -> CheckpointError:
        """Return the error for a damaged checkpoint, with the newest whole one before it."""
        bad, older = [step], None
        for before in reversed([other for other in self.steps() if other < step]):
            if self._damage(before) is None:
                older = before
                break
            bad.append(before)
        removed = " ".join(str(self.folder(other)) for other in bad)
        then = (
            f"`--resume` then continues from {self.folder(older)}, after step {older}"
            if older is not None
            else "there is no older one that is whole: `--resume` then begins with step 1 again"
        )
        return CheckpointError(
            f"{self.folder(step)} is damaged: {what}",
            limit="a checkpoint is whole when it is written, so something changed it since",
            hint=f"`rm -r {removed}`; {then}",
        )


# ----------------------------------------------------------------------------------------- writing


def _save_optimizer(optimizer: Stateful, file: Path) -> None:
    """Write an optimizer's states.

    Raises:
        OSError: The file cannot be written; torch wraps this in a RuntimeError about positions.
    """
    with naming(file), file.open("wb") as stream:
        try:
            torch.save(optimizer.state_dict(), stream)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


# ----------------------------------------------------------------------------------------- reading


class _Stored(Mapping[str, torch.Tensor]):
    """The tensors of a file, each read when it is asked for: all may take most of the RAM."""

    def __init__(self, file: Path) -> None:
        stored: Any = safe_open(file, framework="pt")
        self._file = stored
        self._names = dict.fromkeys(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _read(folder: Path) -> _Content:
    return _Content(
        state=json.loads((folder / _STATE).read_text()),
        tensors=_Stored(folder / _TRAINED),
        optimizer=torch.load(folder / _OPTIMIZER, weights_only=True, map_location="cpu"),
    )


def _check_tensors(
    tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Check that these are the run's tensors, and finite."""
    odd = sorted(set(tensors) ^ set(parameters))
    if odd:
        where = "lacks" if odd[0] in parameters else "holds, and the run does not train,"
        raise _DamagedError(f"{_TRAINED} {where} {odd[0]}")
    for name, parameter in parameters.items():
        tensor = tensors[name]
        if (tensor.shape, tensor.dtype) != (parameter.shape, parameter.dtype):
            raise _DamagedError(
                f"{name} in {_TRAINED} is {tuple(tensor.shape)} of {tensor.dtype}, the run's is"
                f" {tuple(parameter.shape)} of {parameter.dtype}"
            )
        _check_finite(f"{name} in {_TRAINED}", tensor)


def _check_states(optimizer: dict[str, Any], form: StateForm) -> None:
    """Check that an optimizer's states are finite, and of the kind that the run's makes.

    A parameter without a gradient so far has none.
    """
    expected = {path.rpartition("/")[2] for path in form}
    found = set()
    for path, tensor in _tensors_in(optimizer):
        _check_finite(f"{path} in {_OPTIMIZER}", tensor)
        if form.get(path, (tensor.shape, tensor.dtype)) != (tensor.shape, tensor.dtype):
            raise _DamagedError(f"{path} in {_OPTIMIZER} is {tuple(tensor.shape)}, {tensor.dtype}")
        found.add(path.rpartition("/")[2])
    if found != expected:
        odd = ", ".join(sorted(found ^ expected))
        raise _DamagedError(f"{_OPTIMIZER} has the states of another optimizer: {odd}")


def state_form(optimizer: Stateful) -> StateForm:
    """Return the shape and the type of each state that an optimizer has, by its path."""
    return {path: (t.shape, t.dtype) for path, t in _tensors_in(optimizer.state_dict())}


def _tensors_in(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, part in tree.items():
            yield from _tensors_in(part, f"{path}/{key}" if path else str(key))


def _check_finite(what: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and tensor.numel():
        least, most = torch.aminmax(tensor)  # one pass, no copy; NaN if any value is
        if not torch.isfinite(least) or not torch.isfinite(most):
            raise _DamagedError(f"{what} has values that are not finite")
