"""Checkpoints of a run: a kill at any moment cannot tear them, and damage is detected.

Data order, learning rate and dropout are pure functions of the recipe and the step, so weights,
optimizer state, the step's number, the version of dropout's seeds and, in float16, the factor of
the loss are all that has to be kept.
Older checkpoints are removed only once the new one is whole and on the disk.

Before anything is loaded, the files are checked against their manifest. Because checkpoints of
older versions have none, it is also checked that the step is the folder's, that names, shapes and
dtypes of all tensors are those of the run, and that all values are finite.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from finetune.errors import CheckpointError
from finetune.files.atomic import PARTIAL, naming, remove
from finetune.files.manifest import clear_partial, damage, has_manifest, whole_folder
from offload.engine.seeding import NEWEST, Seeding

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
    """The factor of a step, and how it came about.

    Attributes:
        factor: Of the loss.
        num_good: Steps without an overflow since the factor has changed.
        num_skipped: Steps of the run that were skipped.
        num_in_a_row: Of these, the newest ones in a row.
    """

    factor: float = FIRST
    num_good: int = 0
    num_skipped: int = 0
    num_in_a_row: int = 0

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
_FORMAT = 2  # of those with a manifest; the first had none
_PREFIX = "step-"
_NAME = re.compile(_PREFIX + r"[0-9]{7,}")

StateForm = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Tensors of an optimizer's states: where in its `state_dict` each is -> its shape and type."""


class NamedTensors(Protocol):
    """Tensors that are read when they are asked for."""

    def __getitem__(self, name: str, /) -> torch.Tensor:
        """Return the tensor with this name."""


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
    """What a run goes on with after a checkpoint.

    Attributes:
        seeding: How the run's dropout is seeded.
        scaling: How its loss is scaled; None if it is not.
        tensors: Name -> what trains; all of it may be more than a process has room for.
        optimizer: Its states.
    """

    seeding: Seeding
    scaling: LossScale | None
    tensors: NamedTensors
    optimizer: dict[str, Any]

    def put_into(self, parameters: Mapping[str, torch.Tensor], optimizer: Resumable) -> None:
        """Copy the tensors into the parameters, and let the optimizer take its states."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.tensors[name])
        optimizer.load_state_dict(self.optimizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a checkpoint is made of.

    Attributes:
        weights: What is updated, by name, each tensor whole; none on a rank that writes nothing and
            has only a part of it.
        optimizer: With the states of these.
    """

    weights: Mapping[str, torch.Tensor]
    optimizer: Stateful


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
        for torn in self.path.glob(f"{PARTIAL}{_PREFIX}*"):  # as older versions named them
            if _NAME.fullmatch(torn.name.removeprefix(PARTIAL)):
                remove(torn)

    def save(
        self,
        step: int,
        parameters: Mapping[str, torch.Tensor],
        optimizer: Stateful,
        *,
        data_hash: str,
        seeding: Seeding,
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
            state = {"format": _FORMAT, "step": step, "data_hash": data_hash, "seeding": seeding}
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

    def require_whole(self, step: int) -> str | None:
        """Check that a checkpoint's files are what was written, before a model is loaded.

        Returns:
            What the user should know: that an older version wrote it, and it cannot be verified.

        Raises:
            CheckpointError: It is damaged; the newest earlier one that is whole is suggested. Or
                its dropout is seeded in a way that only a later version knows.
        """
        found = self._damage(step)
        if found is not None:
            raise self._damaged(step, found)
        folder = self.folder(step)
        _seeding_of(_read_state(folder / _STATE))
        if has_manifest(folder):
            return None
        return f"{folder} cannot be verified: an older version wrote it, without checksums"

    def read(
        self,
        step: int,
        parameters: Mapping[str, torch.Tensor],
        optimizer: Resumable,
        *,
        form: StateForm,
        data_hash: str,
        is_scaled: bool = False,
    ) -> Restored:
        """Return what a checkpoint holds, if it is what these parameters and optimizer need.

        Args:
            step: Of the checkpoint.
            parameters: Name -> what trains; all of it is in the checkpoint, and nothing else.
            optimizer: Of these parameters, without states.
            form: The states that it makes of them.
            data_hash: Of the training rows.
            is_scaled: Whether the run scales its loss.

        Raises:
            CheckpointError: The training rows are not those that the run was started with, the
                checkpoint is damaged, or its optimizer is that of an older version.
        """
        self.require_whole(step)
        try:
            content = _read(self.folder(step))
            _check_tensors(content.tensors, parameters)
            scaling = _scaling_of(content.state) if is_scaled else None
            num_updates = step if scaling is None else step - scaling.num_skipped
            _check_optimizer(
                content.optimizer,
                optimizer,
                form if num_updates else {},
                step=num_updates,
                is_complete=not has_manifest(self.folder(step)),
            )
        except _DamagedError as error:
            raise self._damaged(step, str(error)) from error
        if content.state["data_hash"] != data_hash:
            raise CheckpointError(
                "the training rows are not those that the run was started with",
                limit="a resumed run continues to the bit, so its data cannot change",
                hint="restore the data file, or start a new run with `output.name=...`",
            )
        return Restored(
            seeding=_seeding_of(content.state),
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
        if has_manifest(folder):
            found = damage(folder, needs=_FILES)
            if found is not None:
                return found
        try:
            state = _read_state(folder / _STATE)
        except _DamagedError as error:
            return str(error)
        if state["step"] != step:
            return f"{_STATE} is of step {state['step']}, the folder of step {step}"
        if not has_manifest(folder) and state.get("format", 1) != 1:
            return "its manifest is missing"
        return None

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
    try:
        return _Content(
            state=_read_state(folder / _STATE),
            tensors=_Stored(folder / _TRAINED),
            optimizer=torch.load(folder / _OPTIMIZER, weights_only=True, map_location="cpu"),
        )
    except (
        *(OSError, ValueError, RuntimeError, EOFError, LookupError, TypeError, AttributeError),
        *(SafetensorError, UnpicklingError),
    ) as error:
        raise _DamagedError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def _read_state(file: Path) -> Mapping[str, Any]:
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise _DamagedError(f"{file.name} cannot be read: {error}") from error
    if not isinstance(state, dict) or not {"step", "data_hash"} <= set(state):
        raise _DamagedError(f"{file.name} lacks `step` or `data_hash`")
    return state


def _seeding_of(state: Mapping[str, Any]) -> Seeding:
    """Return how dropout is seeded: the first way, if an older version wrote the checkpoint."""
    version = state.get("seeding", Seeding.TUPLE_HASH)
    try:
        return Seeding(version)
    except ValueError:
        raise CheckpointError(
            f"{_STATE} names version {version!r} of the seeds of dropout",
            limit=f"this version of Sluice knows 1 to {NEWEST:d}",
            hint="resume the run with the version of Sluice that it was begun with",
        ) from None


def _scaling_of(state: Mapping[str, Any]) -> LossScale:
    """Return how the loss of the next step is scaled; without it gradients would vanish."""
    try:
        found = LossScale(**state[_SCALING])
        if 0 < found.factor < math.inf and found.num_skipped >= found.num_in_a_row >= 0:
            return found
    except (KeyError, TypeError):
        pass  # it is not there, or it is something else
    raise _DamagedError(f"{_STATE} has no good `{_SCALING}`: {state.get(_SCALING)}")


def _check_tensors(
    tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Check that these are the run's tensors, and finite."""
    odd = sorted(set(tensors) ^ set(parameters))
    if odd:
        where = "lacks" if odd[0] in parameters else "holds, and the run does not train,"
        raise _DamagedError(f"{_TRAINED} {where} {odd[0]}")
    for name, parameter in parameters.items():
        _check_form(f"{name} in {_TRAINED}", tensors[name], (parameter.shape, parameter.dtype))
        _check_finite(f"{name} in {_TRAINED}", tensors[name])


def _check_optimizer(
    content: Any,
    optimizer: Resumable,
    form: StateForm,
    *,
    step: int,
    is_complete: bool,
) -> None:
    """Check that these are states of this optimizer after `step` updates, and finite.

    Args:
        content: Of the file.
        optimizer: Of the run.
        form: The states that it makes.
        step: How many updates it has taken.
        is_complete: Whether each parameter must have its states; one that had no gradient so far,
            such as an expert that no token chose, has none.
    """
    if not isinstance(content, dict) or not {"state", "param_groups"} <= set(content):
        raise _DamagedError(f"{_OPTIMIZER} holds no optimizer")
    states, known = content["state"], {path.split("/")[0] for path in form}
    if not isinstance(states, dict) or not all(isinstance(s, dict) for s in states.values()):
        raise _DamagedError(f"{_OPTIMIZER} holds no states of parameters")
    _check_groups(content["param_groups"], optimizer.state_dict()["param_groups"])
    lacking = known - {str(index) for index in states}
    if lacking and (is_complete or not states):
        raise _DamagedError(f"{_OPTIMIZER} lacks the states of {len(lacking)} parameters")
    for path, tensor in _tensors_in(states):
        expected = form.get(path)
        if expected is None and path.split("/")[0] in known:
            raise _DamagedError(f"{_OPTIMIZER} holds {path}, which the optimizer does not have")
        if expected is not None:
            _check_form(f"{path} in {_OPTIMIZER}", tensor, expected)
        _check_finite(f"{path} in {_OPTIMIZER}", tensor)
    lost = {path for path in form if path.split("/")[0] not in lacking} - {
        path for path, _ in _tensors_in(states)
    }
    if lost:
        raise _DamagedError(f"{_OPTIMIZER} lacks {min(lost)}")
    taken = max((_num_updates(state) for state in states.values()), default=step)
    if taken != step:
        raise _DamagedError(f"{_OPTIMIZER} has taken {taken} updates after {step} steps")


def _check_groups(groups: Any, own: Sequence[Mapping[str, Any]]) -> None:
    """Check that an optimizer's parameters and settings are those of the run.

    Raises:
        CheckpointError: An older version wrote it, with other groups.
    """
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise _DamagedError(f"{_OPTIMIZER} holds no groups of parameters")
    found, expected = ([group.get("params", []) for group in each] for each in (groups, own))
    if len(found) != len(expected) and sorted(chain(*found)) == sorted(chain(*expected)):
        raise CheckpointError(
            f"{_OPTIMIZER} has its parameters in {len(found)} groups, this version in"
            f" {len(expected)}",
            limit="an older version wrote it, in which tensors of one dimension decayed as well",
            hint="finish the run with that version, or start a new run with `output.name=...`",
        )
    if found != expected:
        raise _DamagedError(f"{_OPTIMIZER} is of other parameters")
    for group, mine in zip(groups, own, strict=True):
        for name in sorted(set(group) & set(mine) - {"lr"}):  # set anew for each step
            if group[name] != mine[name]:
                raise _DamagedError(f"{_OPTIMIZER} has {name} {group[name]}, the run {mine[name]}")


def _num_updates(state: Any) -> int:
    try:
        return int(state["step"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _DamagedError(f"{_OPTIMIZER} has a state without a number of updates") from error


def state_form(optimizer: Resumable) -> StateForm:
    """Return the form of the states that an optimizer has."""
    states = optimizer.state_dict()["state"]
    return {path: (tensor.shape, tensor.dtype) for path, tensor in _tensors_in(states)}


def _tensors_in(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, part in tree.items():
            yield from _tensors_in(part, f"{path}/{key}" if path else str(key))


def _check_form(what: str, tensor: torch.Tensor, expected: tuple[torch.Size, torch.dtype]) -> None:
    if (tensor.shape, tensor.dtype) != expected:
        shape, dtype = expected
        raise _DamagedError(
            f"{what} is {tuple(tensor.shape)} of {tensor.dtype},"
            f" the run's is {tuple(shape)} of {dtype}"
        )


def _check_finite(what: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and tensor.numel():
        least, most = torch.aminmax(tensor)  # one pass, no copy; NaN if any value is
        if not torch.isfinite(least) or not torch.isfinite(most):
            raise _DamagedError(f"{what} has values that are not finite")
