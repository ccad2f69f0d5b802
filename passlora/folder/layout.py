"""What lies where in the folder of a model, or of a run; by these exact names passlora knows what it wrote."""

from __future__ import annotations

import re

MANIFEST, BACKUP = "passlora.json", "passlora.backup.json"
CHECKPOINT, LOCK = "checkpoint.safetensors", ".lock"
CARD, PICTURE = "README.md", "accuracy.png"
NOTES = "<!-- Your own notes: what stands below this line is kept. -->"  # the card's last line of ours
# in a task's folder
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
BACKBONE = "backbone.safetensors"
CLASSIFIER, MEMORY, SETTINGS = "classifier.safetensors", "memory.safetensors", "settings.json"
IN_A_TASK = (ADAPTER, ADAPTER_CONFIG, BACKBONE, CLASSIFIER, MEMORY, SETTINGS)
# of a run
CONFIG, RESULTS, LOG = "config.yaml", "results.json", "training_log.jsonl"
MATRIX, CONFUSION, MATRIX_PICTURE = "accuracy_matrix.csv", "confusion_matrix.csv", "accuracy_matrix.png"
# of format 1, which passlora 0.1 wrote
PROTOTYPES, HEAD = "prototypes.safetensors", "head.safetensors"


def task_folder(task: int) -> str:
    return f"task_{task:02d}"


def task_number(name: str) -> int | None:
    """The task whose folder is called so; None for any other name."""
    found = re.fullmatch(r"task_(\d{2,})", name)
    return int(found.group(1)) if found and task_folder(int(found.group(1))) == name else None
