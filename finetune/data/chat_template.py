"""Render messages by a tokenizer's chat template, within limits.

A template is a program that came with the model. One that loops or grows without end is stopped by
time and size, and whatever it raises is an error that names the row.

The time limit counts the process's CPU time (SIGVTALRM), so load on the machine does not matter.
The memory limit is on the address space and is lifted after rendering. Both need the main thread,
where rows are tokenised, here and in worker processes.
"""

import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

from finetune.data.turns import Message
from finetune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a row's renderings; a typical one takes less than a millisecond and a megabyte.

    Attributes:
        cpu_s: Processor time.
        memory_bytes: Address space in addition to what the process has.
        num_chars: Length of the rendered text.
    """

    cpu_s: float = 20.0
    memory_bytes: int = 2**30
    num_chars: int = 2**26


LIMITS = Limits()
NO_SETTINGS: Mapping[str, bool] = MappingProxyType({})
_STATM, _PAGE_BYTES = Path("/proc/self/statm"), resource.getpagesize()


class _OutOfTimeError(BaseException):
    """A rendering has used up its time; no `except Exception` of a filter may swallow this."""


def render(
    messages: Sequence[Message],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    source: str,
    tools: Sequence[Mapping[str, Any]] = (),
    is_prompt: bool = False,
    settings: Mapping[str, bool] = NO_SETTINGS,
    limits: Limits = LIMITS,
) -> str:
    """Return the text of messages.

    Args:
        messages: At least one.
        tokenizer: With a template.
        source: Of the row, for errors.
        tools: Definitions of tools.
        is_prompt: Whether the text includes the generation prompt.
        settings: Values of the template's own variables.
        limits: Its limits.

    Raises:
        DataError: The template fails or exceeds a limit.
    """
    turns = [message.to_json() for message in messages]
    variables: dict[str, Any] = dict(settings)
    with limited(source, limits):
        try:
            text = tokenizer.apply_chat_template(
                turns,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=is_prompt,
                **variables,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise refused(f"cannot render the row: {reason}", source=source) from error
    assert isinstance(text, str)
    if len(text) > limits.num_chars:
        raise _endless(f"writes {len(text)} characters", limits, source)
    return text


def refused(what: str, *, source: str) -> DataError:
    """Return the error for a template in whose text the answers of a row cannot be found."""
    return DataError(
        f"the chat template {what} ({source})",
        limit="each answer must follow its generation prompt and end with a special token",
        hint="set `model.tokenizer` to a tokenizer with another template, or fix the row",
    )


def _endless(what: str, limits: Limits, source: str) -> DataError:
    return DataError(
        f"the chat template {what} for one row ({source})",
        limit=f"a row may take {limits.cpu_s:g} s and {limits.num_chars} characters",
        hint="set `model.tokenizer` to a tokenizer with another template, or shorten the row",
    )


_is_limited: list[bool] = []
"""Not empty within a block of `limited`."""


@contextmanager
def limited(source: str, limits: Limits = LIMITS) -> Iterator[None]:
    """Limit time and memory within the block, all renderings in it together.

    A block within another one changes nothing: to set the limits takes as long as to render.

    Args:
        source: Of the row, for errors.
        limits: The limits.

    Raises:
        DataError: A limit was exceeded.
    """
    if _is_limited:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most_bytes = _address_space_bytes() + limits.memory_bytes
    bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    before = signal.signal(signal.SIGVTALRM, _out_of_time)
    _is_limited.append(True)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, limits.cpu_s)
        resource.setrlimit(resource.RLIMIT_AS, (min([most_bytes, *bounds]), hard))
        yield
    except _OutOfTimeError as error:
        raise _endless(f"computes for more than {limits.cpu_s:g} s", limits, source) from error
    except MemoryError as error:
        raise _endless(f"takes more than {limits.memory_bytes} bytes", limits, source) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
        _is_limited.clear()


def _out_of_time(_number: int, _frame: FrameType | None) -> None:
    raise _OutOfTimeError


def _address_space_bytes() -> int:
    with _STATM.open("rb", buffering=0) as file:  # for each row: half the time of read_bytes
        return int(file.read(32).split()[0]) * _PAGE_BYTES
