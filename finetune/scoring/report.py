"""What contenders give some rows: loss, perplexity, accuracy; as a table, as JSON and by row."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.report.rows import Table
from finetune.scoring.rows import LineScore, RowsToScore, ScoredRow


@dataclass(frozen=True, kw_only=True, slots=True)
class RowScore:
    """What a contender gives a row: each choice's log-likelihood, tokens, and if it is greedy."""

    row: ScoredRow
    choices: tuple[LineScore, ...]

    @property
    def right(self) -> LineScore:
        """The score of the right choice, or of the row where it is no question."""
        return self.choices[self.row.answer or 0]

    @property
    def chosen(self) -> int:
        """The most probable choice."""
        logps = [one.logp for one in self.choices]
        return logps.index(max(logps))

    @property
    def chosen_by_byte(self) -> int:
        """The choice with the highest log-likelihood per byte of its text."""
        sizes = self.row.choice_bytes
        logps = [one.logp / size for one, size in zip(self.choices, sizes, strict=True)]
        return logps.index(max(logps))

    def to_json(self) -> dict[str, Any]:
        """Return it as a line of a file."""
        right = self.right
        found = {"logp": right.logp, "tokens": right.num_tokens, "is_greedy": right.is_greedy}
        if self.row.answer is None:
            return {"row": self.row.source, **found}
        return {
            "row": self.row.source,
            **found,
            "answer": self.row.answer,
            "chosen": self.chosen,
            "chosen_by_byte": self.chosen_by_byte,
            "choice_logps": [one.logp for one in self.choices],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ContenderScore:
    """What a contender gives all rows."""

    name: str
    rows: tuple[RowScore, ...]

    @classmethod
    def of(cls, name: str, rows: RowsToScore, lines: Sequence[LineScore]) -> "ContenderScore":
        """Put the scores of lines back together.

        Args:
            name: The contender's.
            rows: The rows.
            lines: Of `rows.lines`, in their order.
        """
        left = iter(lines)
        return cls(
            name=name,
            rows=tuple(
                RowScore(
                    row=row,
                    choices=tuple(_sum([next(left) for _ in choice]) for choice in row.choices),
                )
                for row in rows.rows
            ),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that the loss is the mean of: of questions those of the right choices."""
        return sum(one.right.num_tokens for one in self.rows)

    @property
    def logp(self) -> float:
        """The log-likelihood of all these tokens, in nats."""
        return math.fsum(one.right.logp for one in self.rows)

    @property
    def loss(self) -> float:
        """The mean negative log-probability of a token."""
        return -self.logp / self.num_tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if self.loss < math.log(1e300) else math.inf

    @property
    def accuracy(self) -> float:
        """Part of the questions whose right choice is the most probable."""
        return sum(one.chosen == one.row.answer for one in self.rows) / len(self.rows)

    @property
    def accuracy_by_byte(self) -> float:
        """The same by log-likelihood per byte of a choice, as `acc_norm` of lm_eval."""
        return sum(one.chosen_by_byte == one.row.answer for one in self.rows) / len(self.rows)

    @property
    def greedy_frac(self) -> float:
        """Part of the rows whose tokens are all the most probable ones."""
        return sum(one.right.is_greedy for one in self.rows) / len(self.rows)

    def to_json(self, *, are_questions: bool) -> dict[str, Any]:
        """Return the figures."""
        found = {
            "name": self.name,
            "loss": self.loss,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "log_likelihood": self.logp,
            "num_tokens": self.num_tokens,
            "num_rows": len(self.rows),
            "greedy_frac": self.greedy_frac,
        }
        if are_questions:
            found |= {"accuracy": self.accuracy, "accuracy_by_byte": self.accuracy_by_byte}
        return found


def _sum(lines: Sequence[LineScore]) -> LineScore:
    return LineScore(
        logp=math.fsum(line.logp for line in lines),
        num_tokens=sum(line.num_tokens for line in lines),
        is_greedy=all(line.is_greedy for line in lines),
    )


def ranked(scores: Sequence[ContenderScore]) -> list[ContenderScore]:
    """Return the scores, lowest loss first; a loss that is no number comes last."""
    return sorted(scores, key=lambda one: (math.isnan(one.loss), one.loss))


def scores_table(scores: Sequence[ContenderScore], rows: RowsToScore) -> Table:
    """Return the table, lowest loss first."""
    title = f"{len(rows.rows):,} rows, {scores[0].num_tokens:,} tokens scored"
    columns: list[str] = ["", "loss|loss", "perplexity|loss"]
    lines = [[one.name, one.loss, f"{one.perplexity:,.3f}"] for one in ranked(scores)]
    if rows.are_questions:
        title += " (of the right choices); accuracy by log-likelihood, and by that per byte"
        columns += ["accuracy|loss", "by byte|loss"]
        lines = [
            [*line, one.accuracy, one.accuracy_by_byte]
            for line, one in zip(lines, ranked(scores), strict=True)
        ]
    return Table(title, columns, lines)


def scores_json(
    scores: Sequence[ContenderScore], rows: RowsToScore, *, run: Mapping[str, Any]
) -> str:
    """Return the figures for programs, lowest loss first.

    Args:
        scores: Of all contenders.
        rows: The rows.
        run: What was predicted and measured.
    """
    own = [one.to_json(are_questions=rows.are_questions) for one in ranked(scores)]
    return json.dumps({"scores": own, "notes": rows.notes, **run}, indent=2)


def row_lines(scores: Sequence[ContenderScore]) -> Iterator[str]:
    """Give a line of JSON for each contender and row."""
    for one in scores:
        for row in one.rows:
            yield json.dumps({"name": one.name, **row.to_json()}) + "\n"
