"""Commands of a model's life: learn, predict, eval, robustness, info, rollback, merge, push, pull."""
