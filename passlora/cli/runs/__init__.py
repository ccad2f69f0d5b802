"""Commands on runs: train, validate, reproduce, report, env."""
