"""Images and labels, from a folder, tables, the Hub or the package, to batches; and which classes come when."""
