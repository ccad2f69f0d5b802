"""A model's folder on disk: written so that nothing is lost, read so that nobody is harmed."""
