"""From values to tables, drawings and JSON; it computes nothing that a run depends on."""
