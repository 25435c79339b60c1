"""What a run learns from its rows: a module or folder for each `objective.method`, pure.

Its settings say what it reads, costs and reports; the loss beside them needs torch.
"""
