"""What lies where in the folder of a model, or of a run."""

from __future__ import annotations

MANIFEST = "passlora.json"
CONFIG, RESULTS, LOG, MATRIX = "config.yaml", "results.json", "training_log.jsonl", "accuracy_matrix.csv"
PROTOTYPES, HEAD, CARD, PICTURE = "prototypes.safetensors", "head.safetensors", "README.md", "accuracy.png"
NOTES = "<!-- Your own notes: what stands below this line is kept. -->"  # the card's last line of ours
BACKUP, CHECKPOINT, LOCK = "passlora.backup.json", "checkpoint.safetensors", ".lock"
CONFUSION = "confusion_matrix.csv"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
BACKBONE = "backbone.safetensors"


def task_folder(task: int) -> str:
    return f"task_{task:02d}"
