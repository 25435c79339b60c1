"""Several clients of one base at once: each trains and samples with an adapter of its own."""
