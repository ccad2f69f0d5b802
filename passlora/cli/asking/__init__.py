"""Commands that change nothing: predict, eval, robustness, info."""
