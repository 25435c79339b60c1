"""What a run learns from its rows: a module or folder for each `objective.method`, pure.

The settings say what it reads, costs and reports; the loss in the next module needs torch.
"""
