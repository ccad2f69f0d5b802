"""Commands that change nothing: check, predict, eval, robustness, info."""
