"""Errors that a user or a machine can cause, each with its limit and its fix.

SluiceError                 what is wrong, the limit, and a hint with the exact setting
  OffloadError              raised by this package
    DoesNotFitError         a plan needs more than a budget holds
    TransferError           a copy, a page lock or a lane failed
    UnsupportedModelError   a model whose gradients could not be guaranteed
    MachineError            a machine that is not known or cannot be read
    StoreError              a store file that is absent, damaged, or of other weights
    CodecError              weights that cannot be written in the requested form
  FinetuneError             raised by the program above it (see finetune/errors.py)
"""


class SluiceError(Exception):
    """An error: what was seen and where, the limit if there is one, and the fix.

    Args:
        what: What is wrong, with the value seen and where it came from.
        limit: What would have been valid, where `what` does not make it plain.
        hint: The setting or command that fixes it, spelled out.
    """

    def __init__(self, what: str, *, limit: str = "", hint: str) -> None:
        super().__init__(what, limit, hint)
        self.what = what
        self.limit = limit
        self.hint = hint

    def __str__(self) -> str:
        return f"{'; '.join(filter(None, (self.what, self.limit)))}\n\nhint: {self.hint}"


class OffloadError(SluiceError):
    """The base of what `offload` raises."""


class DoesNotFitError(OffloadError):
    """A plan needs more memory than a budget holds."""


class TransferError(OffloadError):
    """A copy, a page lock or a lane failed."""


class UnsupportedModelError(OffloadError):
    """A model whose streamed gradients could not be guaranteed to be right."""


class MachineError(OffloadError):
    """A machine that is not known, or a machine file that cannot be read."""


class StoreError(OffloadError):
    """A store file that is absent, damaged, or of other weights: it has to be built again."""


class CodecError(OffloadError):
    """Weights that cannot be written in the requested form."""
