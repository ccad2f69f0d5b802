"""Text tables, pictures and progress bars."""
