"""What the model will see of the data as one HTML file, without anything from elsewhere."""

from html import escape

from finetune.report.data_view import DataView, SeenRow, figures, printable

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #59636e; --line: #d1d9e0;
  --loss: #0a5c2b; --wash: #d9f2e1; --bar: #2f7d4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9198a1;
  --line: #3d444d; --loss: #9be9b4; --wash: #12321f; --bar: #3fb968; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line); }
td.figure, th.figure { text-align: right; font-variant-numeric: tabular-nums; }
.bar { background: var(--bar); height: .8rem; min-width: 1px; }
.wide { width: 20rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: 6px; padding: .8rem; }
mark { background: var(--wash); color: var(--loss); font-weight: 600; }
h3 { font-size: 1rem; color: var(--soft); margin-bottom: 0; overflow-wrap: anywhere; }
"""


def data_html(view: DataView) -> str:
    """Return the view as a page; every text of the rows is escaped."""
    title = escape(f"Data of {view.recipe}")
    heads = ("rows", "per epoch", "tokens", "with loss")
    head = "".join(f'<th class="figure">{name}</th>' for name in heads)
    sources = "".join(
        f"<tr><td>{escape(one.path)}</td>"
        + "".join(
            f'<td class="figure">{number:,}</td>'
            for number in (one.num_rows, one.epoch_rows, one.epoch_tokens, one.epoch_loss_tokens)
        )
        + "</tr>\n"
        for one in view.sources
    )
    totals = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>\n"
        for name, value in figures(view)
    )
    notes = "".join(f"<li>{escape(printable(note))}</li>\n" for note in view.notes)
    rows = "\n".join(_row(row) for source in view.sources for row in source.rows)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<table>
<tr><th>source</th>{head}</tr>
{sources}</table>
<h2>An epoch</h2>
<table>
{totals}</table>
<h2>Rows by length, in tokens</h2>
<table>
{_lengths(view)}</table>
{f"<h2>Left out, cut, and noted</h2><ul>{notes}</ul>" if notes else ""}
<h2>Rows as the model sees them</h2>
<p>Tokens with a loss are <mark>marked</mark>.</p>
{rows}
</body>
</html>
"""


def _lengths(view: DataView) -> str:
    most = max((one.num_rows for one in view.lengths), default=1)
    return "".join(
        f'<tr><td class="figure">{one.first:,} - {one.last:,}</td>'
        f'<td class="figure">{one.num_rows:,}</td><td class="wide">'
        f'<div class="bar" style="width: {100 * one.num_rows / most:.1f}%"></div></td></tr>\n'
        for one in view.lengths
    )


def _row(row: SeenRow) -> str:
    pieces = "".join(
        f"<mark>{escape(printable(piece.text))}</mark>"
        if piece.has_loss
        else escape(printable(piece.text))
        for piece in row.pieces
    )
    counts = f"{row.num_tokens:,} tokens, {row.num_loss_tokens:,} with a loss"
    return f"<h3>{escape(row.source)}: {counts}</h3>\n<pre>{pieces}</pre>"
