"""A model that is loaded, changed and saved, while nobody else changes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from passlora import files
from passlora.folder import history
from passlora.folder.lock import lock
from passlora.folder.manifest import read_manifest


@contextmanager
def changed(arguments: argparse.Namespace) -> Iterator[Any]:
    """The PassLora of MODEL; saved when the block is done, as it was if anything goes wrong."""
    folder, path = Path(arguments.model), arguments.model_name_or_path
    read_manifest(folder)  # refuse before the seconds that torch takes
    with lock(folder):
        history.check_no_rollback(folder)
        files.tidy(folder)
        from passlora.model.passlora import PassLora

        model = PassLora.from_pretrained(folder, **({"model_name_or_path": path} if path else {}))
        yield model
        model.save_pretrained(folder)
