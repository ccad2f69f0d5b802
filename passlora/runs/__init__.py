"""`passlora train`: a dataset cut into tasks, learnt one after another, with its numbers."""
