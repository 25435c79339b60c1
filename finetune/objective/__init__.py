"""What a run learns from: the losses of a step, by the rows that it has."""
