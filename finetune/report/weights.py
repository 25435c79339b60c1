"""The table of the model's weights and how they are stored, shown before the first step."""

from rich.console import Group, RenderableType
from rich.text import Text

from finetune.report.format import shown_count, shown_mib, table_of
from offload.plan.facts.weights import WeightInventory


def inventory_table(stock: WeightInventory) -> RenderableType:
    """Return a line for each class of weights in each form, and what share of them is encoded."""
    table = table_of("Weights", "class", "form", "parameters", "share", "decoded", "as stored")
    keys = dict.fromkeys((row.kind, row.codec) for row in stock.rows)
    for kind, codec in keys:
        rows = [row for row in stock.rows if (row.kind, row.codec) == (kind, codec)]
        num_parameters = sum(row.num_parameters for row in rows)
        table.add_row(
            kind,
            codec,
            shown_count(num_parameters),
            f"{num_parameters / stock.num_parameters:.1%}",
            shown_mib(sum(row.decoded_bytes for row in rows)),
            shown_mib(sum(row.encoded_bytes for row in rows)),
        )
    table.add_section()
    table.add_row(
        "all",
        "",
        shown_count(stock.num_parameters),
        "100.0%",
        shown_mib(stock.decoded_bytes),
        shown_mib(stock.encoded_bytes),
        style="bold",
    )
    return Group(
        table,
        Text(
            f"{stock.encoded_frac:.1%} of all parameters are stored encoded,"
            f" {stock.layers_encoded_frac:.1%} of the decoder layers' bytes"
        ),
    )
