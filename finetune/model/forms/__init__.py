"""Forms in which quantised weights are published, a module for each `quant_method`."""
