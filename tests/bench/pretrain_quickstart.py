"""Make everything in recipes/quickstart: the tokenizer, the small model and its instruction rows.

The model first learns eight *skills* on short strings (reverse, sort, add, ...) in a terse notebook
notation that no user would type::

    rev 'tolmak' = kamlot<|im_end|>

It never sees an English instruction or a chat turn. The instruction rows then ask for the same
skills in English. So fine-tuning has one thing to teach, the mapping from a request to a skill,
and exact match measures whether it was taught: the untouched model cannot guess what is wanted.

Three choices make the skills learnable in minutes on one core:

* One token per byte, so that "the third letter" is a position and not the inside of a token.
* The loss counts the answers only. Operands are random: their loss is noise without a lesson.
* *Scribbles*, random words that grow more frequent over the run, stand around operation and
  operand. They teach the model to look for both wherever they are, as English will require.

Run it from the repository root (one core, 17 minutes)::

    taskset -c 0 python tests/bench/pretrain_quickstart.py
"""

import argparse
import json
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

LOG = logging.getLogger("pretrain_quickstart")

SEED = 20
# The run stops at step 2000 of a schedule for 3000. The last third brings the skills from 98.3 to
# 99.7 % of the notes, but then 60 steps of LoRA teach the instructions to 70 % instead of 95 %.
SCHEDULE_STEPS = 3000
QUICKSTART_DIR = Path(__file__).parents[2] / "recipes" / "quickstart"

# ---------------------------------------------------------------------------------------------
# Skills


@dataclass(frozen=True, kw_only=True, slots=True)
class Skill:
    """Something to do to a word of 3 to ``max_letters`` letters."""

    solve: Callable[[str], str]
    max_letters: int


def next_letter(letter: str) -> str:
    """Return the letter after ``letter``, and ``a`` after ``z``."""
    return "a" if letter == "z" else chr(ord(letter) + 1)


SKILLS = {
    "rev": Skill(solve=lambda word: word[::-1], max_letters=6),
    "fst": Skill(solve=lambda word: word[0], max_letters=6),
    "lst": Skill(solve=lambda word: word[-1], max_letters=6),
    "dbl": Skill(solve=lambda word: "".join(2 * letter for letter in word), max_letters=5),
    "upr": Skill(solve=str.upper, max_letters=6),
    "nxt": Skill(solve=lambda word: "".join(map(next_letter, word)), max_letters=5),
    "srt": Skill(solve=lambda word: "".join(sorted(word)), max_letters=4),
    "len": Skill(solve=lambda word: str(len(word)), max_letters=8),
}

# One sentence per slash; the last of each skill is kept for held-out rows.
PHRASINGS = {
    "rev": "Please spell {} backwards. / Reverse the word {}. / Please reverse {}. /"
    " Write {} in reverse. / How does {} read backwards? / Write {} backwards.",
    "fst": "What is the first letter of {}? / Give the first letter of {}. /"
    " Which letter comes first in {}? / With which letter does {} begin? /"
    " First letter of {}, please. / Tell me the first letter of {}.",
    "lst": "What is the last letter of {}? / Give the last letter of {}. /"
    " Which letter comes last in {}? / With which letter does {} end? /"
    " Last letter of {}, please. / Tell me the last letter of {}.",
    "dbl": "Double each letter of {}. / Write every letter of {} twice. /"
    " Please double the letters of {}. / Spell {} with each letter twice. /"
    " Type each letter of {} two times. / Please double every letter of {}.",
    "upr": "Write {} in capitals. / Put {} in capital letters. / Please type {} in upper case. /"
    " Change {} to upper case. / Use capital letters for {}. / Write {} in upper case.",
    "nxt": "Shift each letter of {} by one. / Shift {} one letter forward. /"
    " Please shift {} by one letter. / Move {} one letter on in the alphabet. /"
    " Replace each letter of {} by the next. / Shift all letters of {} by one.",
    "srt": "Sort the letters of {}. / Put the letters of {} in order. /"
    " Please sort {} by letter. / Order the letters of {} from a to z. /"
    " Which letters has {}, sorted? / Please sort the letters of {}.",
    "len": "How many letters has {}? / Count the letters of {}. / How long is {}? /"
    " How many letters are in {}? / Give the length of {}. / How many letters are there in {}?",
}

VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_word(rng: random.Random, *, max_letters: int) -> str:
    """Draw a pronounceable word of 3 to ``max_letters`` letters: consonants and vowels in turn."""
    num_letters = rng.randint(3, max_letters)
    kinds = (CONSONANTS, VOWELS) if rng.random() < 0.5 else (VOWELS, CONSONANTS)
    return "".join(rng.choice(kinds[i % 2]) for i in range(num_letters))


# ---------------------------------------------------------------------------------------------
# Instruction rows


def write_row(skill: Skill, *, word: str, phrasing: str) -> str:
    """Return one chat row as a JSON line."""
    messages = [
        {"role": "user", "content": phrasing.format(f"'{word}'")},
        {"role": "assistant", "content": skill.solve(word)},
    ]
    return json.dumps({"messages": messages}) + "\n"


def make_rows(*, seed: int, num_train: int, num_heldout: int) -> tuple[str, str]:
    """Make the text of train.jsonl and heldout.jsonl.

    No word occurs twice, so no held-out word is in the training rows. Skills take turns. Every
    fourth round of held-out rows uses a phrasing that the training rows do not have.

    Returns:
        Training rows and held-out rows.
    """
    rng = random.Random(seed)
    used: set[str] = set()
    lines: list[str] = []
    names = list(SKILLS)
    for i in range(num_heldout + num_train):
        name = names[i % len(names)]
        skill = SKILLS[name]
        word = draw_word(rng, max_letters=skill.max_letters)
        while word in used:
            word = draw_word(rng, max_letters=skill.max_letters)
        used.add(word)
        *phrasings, unseen = PHRASINGS[name].split(" / ")
        phrasing = rng.choice(phrasings)
        if i < num_heldout and i // len(names) % 4 == 3:
            phrasing = unseen
        lines.append(write_row(skill, word=word, phrasing=phrasing))
    heldout, train = lines[:num_heldout], lines[num_heldout:]
    rng.shuffle(heldout)
    rng.shuffle(train)
    return "".join(train), "".join(heldout)


def make_preferences(rows: str, *, num: int) -> str:
    """Make pairs of answers to the first rows that have letters: capitals are preferred.

    Args:
        rows: Of train.jsonl or heldout.jsonl.
        num: Pairs to make.
    """
    lines: list[str] = []
    for line in rows.splitlines():
        question, answer = (turn["content"] for turn in json.loads(line)["messages"])
        if answer.upper() != answer.lower() and len(lines) < num:
            pair = {"prompt": question, "chosen": answer.upper(), "rejected": answer.lower()}
            lines.append(json.dumps(pair) + "\n")
    return "".join(lines)


def make_prompts(rows: str) -> str:
    """Make prompts of the rows that ask for a first letter, each with its answer for rewards."""
    lines: list[str] = []
    for line in rows.splitlines():
        question, answer = (turn["content"] for turn in json.loads(line)["messages"])
        if "first" in question or "begin" in question:
            lines.append(json.dumps({"prompt": question, "answer": answer}) + "\n")
    return "".join(lines)


# ---------------------------------------------------------------------------------------------
# Tokenizer

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = (
    "{% for turn in messages %}"
    "{{ '<|im_start|>' ~ turn['role'] ~ '\\n' ~ turn['content'] ~ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer(*, max_seq_len: int, **markers: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte, three markers and the three role names.

    A byte-level BPE without merges knows every text and loses none of it.

    Args:
        max_seq_len: Longest sequence of the model.
        **markers: More markers, by their names as attributes of the tokenizer.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(marker, special=True) for marker in (PAD, START, END)])
    core.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        model_max_length=max_seq_len,
        clean_up_tokenization_spaces=False,
        **markers,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# ---------------------------------------------------------------------------------------------
# Notebook


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """One notebook line: ``question`` ends with the equals sign, ``answer`` follows it."""

    skill: str
    question: str
    answer: str


def scribble(rng: random.Random, *, max_words: int) -> list[str]:
    """Draw zero to ``max_words`` words of random letters, some with a capital or a stop."""
    words = []
    for _ in range(rng.randint(0, max_words)):
        word = "".join(rng.choices(LETTERS, k=rng.randint(1, 8)))
        word = word.capitalize() if rng.random() < 0.15 else word
        words.append(word + rng.choice(",.?:") if rng.random() < 0.15 else word)
    return words


def draw_note(rng: random.Random, *, max_scribbles: int) -> Note:
    """Draw a note: skill and word in either order, scribbles before, between and after them."""
    name = rng.choice(list(SKILLS))
    skill = SKILLS[name]
    word = draw_word(rng, max_letters=skill.max_letters)
    if rng.random() < 0.5:
        word = "".join(rng.choices(LETTERS, k=len(word)))
    stop = rng.choice(",.?:") if max_scribbles and rng.random() < 0.3 else ""
    pair = [name, f"'{word}'{stop}"]
    rng.shuffle(pair)
    parts: list[str] = []
    for part in pair:
        parts += [*scribble(rng, max_words=max_scribbles), part]
    parts += scribble(rng, max_words=max_scribbles)
    return Note(skill=name, question=" ".join(parts) + " = ", answer=skill.solve(word))


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Packed notes. ``spans`` are (skill, row, start, stop) of the answers, for scoring."""

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    spans: list[tuple[str, int, int, int]]


def draw_batch(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    *,
    micro_batch_size: int,
    seq_len: int,
    max_scribbles: int,
) -> Batch:
    """Pack whole notes into rows of ``seq_len`` tokens; what is left of a row is padding."""
    tokens_BT = torch.full((micro_batch_size, seq_len), tokenizer.pad_token_id)
    labels_BT = torch.full((micro_batch_size, seq_len), -100)
    spans = []
    for row in range(micro_batch_size):
        end = 0
        while True:
            note = draw_note(rng, max_scribbles=max_scribbles)
            question = tokenizer.encode(note.question)
            answer = [*tokenizer.encode(note.answer), tokenizer.eos_token_id]
            start, stop = end + len(question), end + len(question) + len(answer)
            if stop > seq_len:
                break
            tokens_BT[row, end:stop] = torch.tensor(question + answer)
            labels_BT[row, start:stop] = torch.tensor(answer)
            spans.append((note.skill, row, start, stop))
            end = stop
    return Batch(tokens_BT=tokens_BT, labels_BT=labels_BT, spans=spans)


# ---------------------------------------------------------------------------------------------
# Model


def build_model(tokenizer: PreTrainedTokenizerFast, *, max_seq_len: int) -> Qwen3MoeForCausalLM:
    """Build the model with random weights: 6 layers of 8 experts, two of them active per token."""
    config = Qwen3MoeConfig(
        vocab_size=math.ceil(len(tokenizer) / 8) * 8,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        intermediate_size=192,
        moe_intermediate_size=192,
        max_position_embeddings=max_seq_len,
        initializer_range=0.05,
        tie_word_embeddings=False,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.head_dim = 32
    # The loop over experts beats the grouped kernel on a CPU.
    config._experts_implementation = "eager"
    return Qwen3MoeForCausalLM(config)


def score(batch: Batch, logits_BTV: torch.Tensor) -> Iterator[tuple[str, bool]]:
    """Yield for each answer its skill and whether greedy decoding would give it exactly."""
    is_right_BT = logits_BTV[:, :-1].argmax(dim=-1) == batch.labels_BT[:, 1:]
    for skill, row, start, stop in batch.spans:
        yield skill, bool(is_right_BT[row, start - 1 : stop - 1].all())


def pretrain(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    rng: random.Random,
    steps: int,
    lr: float,
) -> None:
    """Train ``model`` on fresh notes, and log the exact match of each skill on the way.

    Every note is new, so the scores of the training batches are scores on unseen notes.

    Args:
        model: Trained in place, in float32.
        tokenizer: The tokenizer of the notes.
        rng: Draws the notes.
        steps: Optimizer steps to take, of a schedule for ``SCHEDULE_STEPS``.
        lr: Peak of the learning rate.
    """
    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 100) * max(0.02, 1 - step / SCHEDULE_STEPS)
    )
    hits: dict[str, list[bool]] = {name: [] for name in SKILLS}
    start_s = time.perf_counter()
    for step in range(1, steps + 1):
        batch = draw_batch(
            rng,
            tokenizer,
            micro_batch_size=32,
            seq_len=96,
            max_scribbles=min(3, 8 * step // SCHEDULE_STEPS),
        )
        output = model(input_ids=batch.tokens_BT, labels=batch.labels_BT, use_cache=False)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        for skill, is_right in score(batch, output.logits):
            hits[skill].append(is_right)
        if step % 100 == 0:
            rates = " ".join(f"{k} {sum(v) / len(v):.3f}" for k, v in hits.items())
            elapsed_s = time.perf_counter() - start_s
            LOG.info("step %d %.0f s loss %.4f  %s", step, elapsed_s, output.loss.item(), rates)
            hits = {name: [] for name in SKILLS}


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model in bf16, its configurations and its tokenizer to ``out``."""
    model.config.output_router_logits = False
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig.from_dict({**ids, "do_sample": False})
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Write the rows, then pretrain and write the model."""
    parser = argparse.ArgumentParser(description="Make everything in recipes/quickstart.")
    parser.add_argument("--out", type=Path, default=QUICKSTART_DIR)
    parser.add_argument("--steps", type=int, default=2000, help="0 writes the rows only")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train, heldout = make_rows(seed=SEED, num_train=2000, num_heldout=200)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train.jsonl").write_text(train, encoding="ascii")
    (args.out / "heldout.jsonl").write_text(heldout, encoding="ascii")
    for name, rows, num in (("preferences", train, 600), ("preferences_heldout", heldout, 120)):
        pairs = make_preferences(rows, num=num)
        (args.out / f"{name}.jsonl").write_text(pairs, encoding="ascii")
    for name, rows in (("prompts", train), ("prompts_heldout", heldout)):
        (args.out / f"{name}.jsonl").write_text(make_prompts(rows), encoding="ascii")
    if args.steps == 0:
        return

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(max_seq_len=256)
    model = build_model(tokenizer, max_seq_len=256)
    pretrain(model, tokenizer, rng=random.Random(SEED), steps=args.steps, lr=3e-3)
    save(model, tokenizer, args.out / "model")


if __name__ == "__main__":
    main()
