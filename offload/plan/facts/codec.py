"""Codecs: the forms in which layers are stored, by name, and the size of a weight in each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.registry import Clash, Registry
from offload.tensors import Tensor

NATIVE = "native"  # what is not encoded
ALIGN_BYTES = 256  # of each part: enough for the widest load and for a view as any dtype
WORKSPACE_BYTES = 16 * 2**20  # of codecs that decode piece by piece
FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """A form of tensors: what it takes, how it is priced, and how it is written and read.

    Sizes do not depend on values because layers are laid out before any weight is read.
    """

    doc: str  # what it is, in a few words with a verb that follow its name in the reference
    # Function of the number of weights and of the bytes of one in the compute dtype, to the bytes
    # of each part that a tensor is stored as.
    sizes: Callable[[int, int], tuple[int, ...]]
    # Encodes values of any shape into the parts, uint8 tensors on the same device, of which it
    # writes all; raises a CodecError for values that cannot be in this form.
    write: Callable[[Tensor, Sequence[Tensor]], None]
    # Decodes the parts into weights on the current stream: contiguous, of the shape that was
    # encoded; the host does not wait.
    read: Callable[[Sequence[Tensor], Tensor], None]
    dtypes: tuple[str, ...] = FLOATS  # dtypes of weights that it takes; none for any
    # Its own name, if it keeps weights that were published in such a form to the bit; it takes no
    # others, and matrices that were not published so wait as they are.
    published: str = ""
    # Whether it can keep a matrix, or experts' matrices, of a shape, if they were published so.
    fits: Callable[[Sequence[int]], bool] = lambda _: True
    # Dtype whose weights it stores as they are, so that nothing is decoded.
    same_as: str | None = None
    is_exact: bool = False  # whether bfloat16 weights come back bit for bit
    # RMS error relative to the RMS of normally distributed weights, as bench_codecs measures it.
    rounding: float = 0.0
    # Peak device memory of decoding a tensor, in addition to its two forms.
    workspace_bytes: int = 0
    is_automatic: bool = False  # whether `offload.codec: auto` tries it, and a refusal names it
    # Whether a plan says what it would gain, and a refusal whether it would fit.
    is_suggested: bool = False
    # Its name and source among the ways that `plan` compares; None for none.
    option: tuple[str, str] | None = None
    aliases: tuple[str, ...] = ()  # settings of other trainers that mean it
    clashes: tuple[Clash, ...] = ()  # settings of a recipe that it does not go with


CODECS = Registry("codecs", "offload.codecs", Codec)


def codecs_that(holds: Callable[[Codec], object]) -> list[str]:
    """Return the names of codecs for which something holds, those that round least first."""
    return sorted((n for n in CODECS if holds(CODECS[n])), key=lambda name: CODECS[name].rounding)


def automatic_codecs(published: str) -> list[str]:
    """Return what `offload.codec: auto` tries of a model by the form of its published weights."""
    return codecs_that(lambda codec: codec.is_automatic and codec.published in ("", published))


def aligned(num_bytes: int) -> int:
    """Round a size up to the alignment of parts."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
