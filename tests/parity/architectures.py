"""Which architectures the engine trains exactly, found by comparing, and the table that says so.

    python -m tests.parity.architectures --write docs/architectures.md
    python -m tests.parity.architectures llama qwen3_moe

Each type of transformers' causal language models, and each further one of its models for images and
text, is built tiny and random, gets adapters, and runs
one step of three micro-batches of unequal width with padding: streamed through two slots, resident
(grade MOVE, to the bit), and by plain transformers, peft and autograd (grade REORDER, against a
float64 truth where a type can compute one); the loss is also that of the model itself. A type is
exact, or refused with the engine's reason; anything else is a failure of the engine.

Each exact type also trains rows of unequal length packed into two sequences, and must have the loss
and gradients that plain transformers gives for each row alone, within `PACKED` in float32; where it
is beyond that, within `PACKED_FP64` in float64.
"""

import argparse
import copy
import math
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import offload
from finetune.adapter.linear_lora import compute_in_base_dtype
from finetune.images.front import EXACT_TYPES
from finetune.model.facts import facts_of
from offload.engine.batch import Batch
from offload.engine.model.layers import LayeredModel
from tests.parity.tiny_models import SETTINGS, VOCABULARY, tiny_model, with_adapters

SLACK = 1.05  # of the plain library's error, the limit of grade REORDER
SEEDS = range(12)  # for one model the ratio of two roundings is 1 +- 0.1, so a miss is pooled
CLOSE = 1e-5  # relative, to the plain library in float32, whatever the truth says
TRUTHLESS = 2e-6  # the same where no float64 truth can be computed
PACKED = 1e-6  # the same for packed rows, against each alone
PACKED_FP64 = 2e-7  # the same in float64, with norms, routers and the loss in float32
DRAWS = 2  # how much further from float64 one draw of rounding may be than another
ROW_LENS = ((12, 5, 17), (3, 12))  # of two packed sequences; windows and chunks are shorter
LIMIT_S = 60  # of processor time, for one type

Gradients = Mapping[str, torch.Tensor]


class InexactError(Exception):
    """The engine accepted a model and its step is not the plain library's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was found of one model type."""

    model_type: str
    is_exact: bool
    reason: str = ""
    packs: str = ""


def causal_types() -> list[str]:
    """Return the model types of the installed transformers' causal language models."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_text_types() -> list[str]:
    """Return the types that transformers has a model for images and text of, and no causal one."""
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return [name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name not in causal]


# --------------------------------------------------------------------------------------- comparing


def micro_batches() -> list[dict[str, torch.Tensor]]:
    """Return three micro-batches of unequal width, the second row of each padded."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number in range(3):
        width = 12 + 2 * number
        input_ids = torch.randint(3, VOCABULARY, (2, width), generator=generator)
        attention_mask = torch.ones_like(input_ids)
        attention_mask[1, width - 3 :] = 0
        labels = input_ids.clone()
        labels[:, :4] = -100
        labels[attention_mask == 0] = -100
        batches.append({"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask})
    return batches


def gradients(model: nn.Module) -> Gradients:
    """Return the gradient of each trainable parameter, zero where none was computed."""
    trainable = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trainable}


def streamed(
    model: nn.Module, batches: Sequence[Batch], *, num_slots: int, device: str = "cpu"
) -> tuple[float, Gradients]:
    """Return loss and gradients of one step of the engine, towers left out as a run leaves them."""
    model = copy.deepcopy(model)
    for tower in LayeredModel(model).towers:
        tower.to("meta")
    engine = offload.attach(model, num_slots=num_slots, device=device, head_chunk_tokens=7)
    try:
        loss = engine.forward_backward(batches, dropout_seed=0).loss
        return loss, gradients(model)
    finally:
        engine.detach()


def plain(
    model: nn.Module, batches: Sequence[Batch], *, loss_dtype: torch.dtype = torch.float32
) -> tuple[float, Gradients]:
    """Return loss and gradients of ordinary accumulation, normalised over the whole step.

    Transformers computes the loss in float32, of float64 too.
    """
    model = copy.deepcopy(model)
    num_label_tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    loss = 0.0
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits_BTV = model(**inputs, use_cache=False).logits.to(loss_dtype)
        part = nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        part = part / num_label_tokens
        part.backward()
        loss += part.item()
    return loss, gradients(model)


def own_loss(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Return the loss of the same step as the model itself computes it."""
    model = copy.deepcopy(model)
    numbers = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    with torch.no_grad():
        parts = (float(model(**batch, use_cache=False).loss) for batch in batches)
        return sum(p * n for p, n in zip(parts, numbers, strict=True)) / sum(numbers)


def truth(model: nn.Module, batches: Sequence[Batch]) -> Gradients | None:
    """Return the plain gradients in float64, or None for types that mix in other dtypes."""
    try:
        return plain(in_float64(model), batches, loss_dtype=torch.float64)[1]
    except (RuntimeError, TypeError):
        return None


def in_float64(model: nn.Module) -> nn.Module:
    """Return a copy in float64, whose experts are computed one by one."""
    model = copy.deepcopy(model).double()
    config: Any = model.config
    config._experts_implementation = "eager"  # grouped products know no float64
    return model


def rel_error(ours: Gradients, true: Gradients) -> float:
    """Return the norm of the difference of all gradients over the norm of the true ones."""
    difference = sum(float((ours[n].double() - true[n]).square().sum()) for n in true)
    return math.sqrt(difference / sum(float(t.double().square().sum()) for t in true.values()))


def verdict_of(model_type: str) -> Verdict:
    """Compare one type.

    Raises:
        InexactError: It was not refused and is not exact.
    """
    squares = {"ours": 0.0, "plain": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for seed in SEEDS:
                ours, reference = _errors_of(model_type, seed)
                squares["ours"] += ours**2
                squares["plain"] += reference**2
                if seed == SEEDS[0] and ours <= SLACK * reference:
                    break
        except offload.UnsupportedModelError as error:
            return Verdict(model_type=model_type, is_exact=False, reason=reason_of(error))
        except ImportError as error:  # its tower's, which transformers builds by another library
            missing = re.findall(r"requires the (\w+) library", str(error))
            reason = f"{LACKS} {', '.join(missing)}"
            return Verdict(model_type=model_type, is_exact=False, reason=reason)
    if squares["ours"] > SLACK**2 * squares["plain"]:
        raise InexactError(f"{model_type}: squared errors {squares}, the limit is {SLACK} in error")
    return Verdict(
        model_type=model_type,
        is_exact=True,
        reason=_refused_by_plan(model_type),
        packs=packs_of(model_type)[0],
    )


IN_LIBRARY = "in the library alone; `plan` and `finetune` refuse it: "


def _refused_by_plan(model_type: str) -> str:
    """Return why a plan refuses a type that the engine trains; nothing if it does not."""
    try:
        facts_of(tiny_model(model_type))
    except offload.UnsupportedModelError as error:
        return IN_LIBRARY + reason_of(error)
    return ""


def packs_of(model_type: str) -> tuple[str, float]:
    """Return how a type packs rows, and the error of its gradients against rows alone.

    Raises:
        InexactError: The step of packed rows is not that of the rows alone.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = tiny_model(model_type)
        layers = LayeredModel(base).layers
        model = with_adapters(base, layers)
        alone, packed = rows_alone_and_packed()
        expected_loss, expected = plain(model, alone)
        loss, found, num_together = _packed(copy.deepcopy(model), packed)
        error, suffix = rel_error(found, expected), ""
        if error > PACKED and is_rounding(model, alone, packed):
            suffix = ROUNDED
    if not (error <= PACKED or suffix) or not math.isclose(loss, expected_loss, rel_tol=PACKED):
        raise InexactError(f"{model_type}: packed {loss}, alone {expected_loss}, error {error}")
    if not num_together:
        return BY_ROW + suffix, error
    return (TOGETHER if num_together == len(layers) else PARTLY) + suffix, error


LACKS = "is not built by transformers where it does not find"
TOGETHER, PARTLY, BY_ROW = "together", "partly together", "row by row"
ROUNDED = ", within rounding"


def is_rounding(model: nn.Module, alone: Sequence[Batch], packed: Sequence[Batch]) -> bool:
    """Return whether packed rows are apart from rows alone by no more than rounding.

    In float64 they must be together, with as many layers that compute all rows at once, and in
    float32 about as near to that as the plain library is.
    """
    double = in_float64(model)
    true = plain(double, alone)[1]
    _, found, num_together = _packed(copy.deepcopy(model), packed)
    _, found_in_float64, num_in_float64 = _packed(double, packed)
    return (
        num_in_float64 == num_together
        and rel_error(found_in_float64, true) <= PACKED_FP64
        and rel_error(found, true) <= DRAWS * rel_error(plain(model, alone)[1], true)
    )


def _packed(model: nn.Module, packed: Sequence[Batch]) -> tuple[float, Gradients, int]:
    """Return loss and gradients of a step, and how many layers compute all rows at once."""
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    try:
        loss = engine.forward_backward(packed, dropout_seed=0).loss
        return loss, gradients(model), len(engine.rows_together)
    finally:
        engine.detach()


def rows_alone_and_packed() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Return rows of unequal length, each a micro-batch, and the same ones packed into two."""
    generator = torch.Generator().manual_seed(2)
    alone, packed = [], []
    for lens in ROW_LENS:
        rows = [torch.randint(3, VOCABULARY, (1, n), generator=generator) for n in lens]
        alone += [{"input_ids": row, "labels": row.clone()} for row in rows]
        ids = torch.cat(rows, dim=1)
        packed.append({"input_ids": ids, "labels": ids.clone(), "row_lens": torch.tensor(lens)})
    return alone, packed


def _errors_of(model_type: str, seed: int) -> tuple[float, float]:
    """Return the errors of the engine and of the plain library for one random model."""
    base = tiny_model(model_type, seed=seed)
    layered = LayeredModel(base)
    layers = layered.layers
    for tower in layered.towers:
        for module in tower.modules():
            module.register_forward_pre_hook(_never)
    model = with_adapters(base, layers, seed=seed)
    batches = micro_batches()
    loss, ours = streamed(model, batches, num_slots=2)
    resident_loss, resident = streamed(model, batches, num_slots=len(layers))
    if loss != resident_loss or not all(torch.equal(ours[n], resident[n]) for n in ours):
        raise InexactError(f"{model_type}: streamed and resident differ")
    plain_loss, reference = plain(model, batches)
    _require_close(model_type, ours, reference)
    if seed == SEEDS[0]:
        grouped = copy.deepcopy(model)
        compute_in_base_dtype(grouped)
        _require_close(model_type, streamed(grouped, batches, num_slots=2)[1], reference)
    if not math.isclose(loss, plain_loss, rel_tol=CLOSE):
        raise InexactError(f"{model_type}: loss {loss}, plain {plain_loss}")
    own = own_loss(model, batches)
    if not math.isclose(loss, own, rel_tol=CLOSE):
        raise InexactError(f"{model_type}: loss {loss}, its own {own}")
    true = truth(model, batches)
    if true is not None:
        return rel_error(ours, true), rel_error(reference, true)
    return rel_error(ours, reference), TRUTHLESS / SLACK


def _never(module: nn.Module, _inputs: object) -> None:
    raise InexactError(f"text passes through a {type(module).__name__}, which is left on the host")


def _require_close(model_type: str, ours: Gradients, reference: Gradients) -> None:
    """Check every tensor, for a small one drowns in the norm of all."""
    total = math.sqrt(sum(float(t.square().sum()) for t in reference.values()))
    if not total > 0:
        raise InexactError(f"{model_type}: no gradients to compare")
    for name, tensor in reference.items():
        difference = float((ours[name] - tensor).norm())
        if not difference <= CLOSE * (float(tensor.norm()) * 10 + total * 0.01):
            raise InexactError(f"{model_type}: {name} differs by {difference}")


def reason_of(error: offload.UnsupportedModelError) -> str:
    """Return what was seen and the limit, without the name of the class."""
    what = re.sub(r"^[A-Z]\w+ (?=[a-z])", "", error.what)
    return f"{what}; {error.limit}"


# ------------------------------------------------------------------------------------------- table


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The committed verdicts and the versions that they were found with."""

    transformers: str
    torch: str
    verdicts: Mapping[str, Verdict]  # those of causal language models
    images: Mapping[str, Verdict]  # those of models for images and text alone


def write_table(verdicts: Sequence[Verdict], images: Sequence[Verdict] = ()) -> str:
    """Return the tables of causal language models and of models for images and text."""
    types = [verdict for verdict in verdicts if verdict.model_type not in SETTINGS]
    num_exact = sum(verdict.is_exact for verdict in types)
    num_packed = {
        way: sum(v.packs.startswith(way) for v in verdicts) for way in (TOGETHER, PARTLY, BY_ROW)
    }
    lines = [
        "# Architectures",
        "",
        "Written by `python -m tests.parity.architectures --write docs/architectures.md`"
        f" with transformers {transformers.__version__} and torch {_torch_version()}.",
        "",
        f"Of {len(types)} causal language model types {num_exact} are exact and"
        f" {len(types) - num_exact} are refused.",
        "",
        "*Exact*: a step streamed through two slots has the loss and gradients of the resident step"
        " to the bit, and those of plain transformers, peft and autograd within rounding; the"
        " loss is the model's own.",
        "*Refused*: `offload.UnsupportedModelError` is raised, with this reason, at `attach` or"
        " before the first step's gradients.",
        "",
        "*Settings*: where published models of a type have settings with another verdict, those"
        " are a row of their own. Rope types that transformers allows for an exact type, LongRoPE"
        " and dynamic NTK too, are exact as for each row alone, and so are embeddings that are tied"
        " or not, as the checkpoint has them.",
        "",
        "*Packs*: rows of several lengths packed into one sequence have the loss and gradients of"
        f" each row alone in plain transformers, within {PACKED:g} relative in float32; *within"
        " rounding*, they were further apart on the processor that wrote the table:"
        f" in float64 they are within {PACKED_FP64:g}, and in float32 no more than {DRAWS} times as"
        " far from that as plain transformers itself. *Together*:"
        f" all layers compute all rows at once, but for attention ({num_packed[TOGETHER]} types);"
        f" *partly together*: some of its layers do, the others take one row after the other"
        f" ({num_packed[PARTLY]}); *row by row*: none does ({num_packed[BY_ROW]}). No exact type is"
        " refused.",
        "",
        "*Methods*: LoRA holds on every exact type. DoRA and other methods of "
        "`adapter.method` are for plain linear layers: a target of another class, or one that"
        " peft adapts as a parameter (fused experts, and the gates next to them), is refused "
        "by name. `train.what: [biases]` and `[norms]` are for types that have such weights."
        " `objective.method: classify` and `reward` are for "
        "types with a sequence classifier in transformers, `classify_tokens` for those with a token"
        " classifier. `train.what: head` is for the same types. `adapter.method: prompt` and"
        " `p_tuning` put virtual tokens in front of each row, at the embedding, which every exact"
        " type has. `adapter.method: prefix` is for types whose layers all keep plain keys and"
        " values, as many as peft counts, which are those without latent attention, recurrences"
        " or layers of different heads; the others are refused by name. Bottleneck adapters are"
        " not there. `offload.embeddings: host` and `offload.head: host` give every exact type the"
        " bits of `device`; if its head has the embedding's weight, both together do.",
        "",
        *_rows(verdicts),
        "",
        IMAGES,
        "",
        f"Of {len(images)} more types, which transformers builds as models for images and text"
        f" alone, {sum(v.is_exact for v in images)} are exact for text and"
        f" {sum(not v.is_exact for v in images)} are refused. Text does not pass through their"
        " towers, which take no memory and stay in a merged model as they were published.",
        "",
        seeing_types(),
        "",
        *_rows(images),
    ]
    return "\n".join(lines) + "\n"


IMAGES = "## Models for images and text"


def seeing_types() -> str:
    """Return which types learn from images, those that build a text model for text among them."""
    names = ", ".join(sorted(EXACT_TYPES))
    return (
        f"{len(EXACT_TYPES)} types learn from images as plain transformers does from pixels, by"
        f" `tests/parity/test_images.py`: {names}. Rows with images are refused for all others."
    )


def _rows(verdicts: Sequence[Verdict]) -> list[str]:
    lines = ["| model type | verdict | packs | reason |", "|---|---|---|---|"]
    for verdict in sorted(verdicts, key=lambda v: v.model_type):
        word = "exact" if verdict.is_exact else "refused"
        reason = verdict.reason.replace("|", "\\|")
        lines.append(f"| {verdict.model_type} | {word} | {verdict.packs} | {reason} |")
    return lines


def read_table(path: Path) -> Table:
    """Read what `write_table` wrote."""
    text = path.read_text()
    versions = re.search(r"with transformers (\S+) and torch (\S+)\.$", text, re.MULTILINE)
    assert versions is not None
    causal, images = (_read_rows(part) for part in text.split(IMAGES))
    return Table(transformers=versions[1], torch=versions[2], verdicts=causal, images=images)


def exact_types(*, images: bool = False) -> list[str]:
    """Return the types that are exact by the committed table, of those that this version has."""
    table = read_table(Path(__file__).parents[2] / "docs" / "architectures.md")
    every = {**table.verdicts, **(table.images if images else {})}
    return [
        name
        for name, one in every.items()
        if one.is_exact and name.partition(",")[0] in CONFIG_MAPPING
    ]


def _read_rows(text: str) -> dict[str, Verdict]:
    rows = re.findall(r"^\| ([^|]+) \| (exact|refused) \| (.*?) \| (.*) \|$", text, re.MULTILINE)
    return {
        name: Verdict(
            model_type=name,
            is_exact=word == "exact",
            reason=reason.replace("\\|", "|"),
            packs=packs,
        )
        for name, word, packs, reason in rows
    }


def _torch_version() -> str:
    return torch.__version__.split("+")[0]


# -------------------------------------------------------------------------------------------- main


def _verdict_in_child(model_type: str) -> Verdict | None:
    """Find a verdict in a process of its own, in bounded time; None where there is none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            verdict = verdict_of(model_type)
            words = (str(int(verdict.is_exact)), verdict.packs, verdict.reason)
            os.write(writer, "\n".join(words).encode())
        except BaseException:  # noqa: BLE001 - the child's last words, whatever they are
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        return None
    is_exact, packs, reason = answer.split("\n", 2)
    return Verdict(model_type=model_type, is_exact=is_exact == "1", packs=packs, reason=reason)


def main() -> int:
    """Print the verdicts and write them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all if none is given")
    parser.add_argument("--write", type=Path, help="the table's file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    found, missing, images = [], [], image_text_types()
    for model_type in arguments.types or [*causal_types(), *SETTINGS, *images]:
        verdict = _verdict_in_child(model_type)
        if verdict is None:
            missing.append(model_type)
            print(f"{model_type}: NEITHER EXACT NOR REFUSED", flush=True)  # noqa: T201
            continue
        found.append(verdict)
        print(f"{model_type}: {verdict.reason or f'exact, packs {verdict.packs}'}", flush=True)  # noqa: T201
    if arguments.write and not missing:
        arguments.write.parent.mkdir(exist_ok=True)
        apart = [verdict for verdict in found if verdict.model_type in images]
        causal = [verdict for verdict in found if verdict not in apart]
        arguments.write.write_text(write_table(causal, apart))
    return len(missing)


if __name__ == "__main__":
    sys.exit(main())
