"""Forms of rows: a module for each `data.format`, with its columns and what reads a row."""
