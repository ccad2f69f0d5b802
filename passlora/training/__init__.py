"""One task: train, remember, fit, test. Knows accelerate, knows no files."""
