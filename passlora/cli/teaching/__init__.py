"""Commands that change what a model knows: learn, forget, rename, combine, rollback."""
