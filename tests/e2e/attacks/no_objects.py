"""The program in a process in which torch unpickles nothing that another process has sent."""

from collections.abc import Sequence
from typing import NoReturn

from torch.distributed import distributed_c10d

from finetune import app


def refuse(*_: object) -> NoReturn:
    """Fail where torch would pickle or unpickle an object."""
    raise AssertionError("a pickled object of another process")


def main(argv: Sequence[str]) -> None:
    """Run the program."""
    for name in ("_tensor_to_object", "_object_to_tensor"):
        assert name in vars(distributed_c10d)
        vars(distributed_c10d)[name] = refuse
    app.main(argv)
