"""The Hugging Face Hub: a model's folder up, and down again; the model card."""
