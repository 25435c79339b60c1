"""From a recipe, a model and a machine to the plan of a step, or the nearest that fits."""
