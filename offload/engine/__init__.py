"""Effects: lanes, host memory, slots and the executor that runs a plan."""
