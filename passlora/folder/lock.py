"""One process, and one thread of it, at a time in a folder; and no way out of it through a link."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from passlora.errors import PassloraError
from passlora.folder.layout import LOCK

HELD = threading.local()  # .folders: those that this thread has locked


def check_links(folder: Path, root: Path | None = None) -> None:
    """Refuse links that lead out of the folder (or of `root`): nothing is written, copied or sent through them."""
    inside = (root or folder).resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise PassloraError(f"{path} leads out of the model's folder")


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the folder; the system lets go of it when the process ends, however it ends. A thread may lock it again."""
    held: set[str] = HELD.__dict__.setdefault("folders", set())
    name, is_new = str(folder.resolve()), not folder.exists()
    if name in held:
        yield
        return
    file = FileLock(str(folder / LOCK), timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_links(folder)
        file.acquire()
    except Timeout:
        raise PassloraError(f"{folder} is in use by another process") from None
    except NotImplementedError:  # a file system without locks
        pass
    except OSError as error:
        raise PassloraError(f"{folder} cannot be written to: {error.strerror}") from None
    held.add(name)
    try:
        yield
    finally:
        held.remove(name)
        if is_new and folder.is_dir() and [path.name for path in folder.iterdir()] in ([], [LOCK]):
            shutil.rmtree(folder)  # nothing came of it
        file.release()
