"""Commands that pass a model on: merge, push, pull."""
