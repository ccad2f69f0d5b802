"""A model down from the Hugging Face Hub: its files into the client's cache, or into a folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passlora import files
from passlora.config import hub_id
from passlora.errors import PassloraError
from passlora.folder import format1, saving
from passlora.folder.history import check_no_rollback
from passlora.folder.layout import CARD, MANIFEST, PROTOTYPES, task_folder
from passlora.folder.lock import lock
from passlora.folder.manifest import MAX_BYTES, Manifest, read_manifest, write_manifest
from passlora.folder.tasks import MARKS, check_digests
from passlora.hub.card import render
from passlora.hub.names import check_repo_id, is_ours, model_files, talking_about, task_files


@dataclass
class Source:
    """Where a model lies: a folder, or what the client's cache has of a repository."""

    folder: Path
    root: Path  # no file of the model may lead out of here
    repo_id: str | None = None
    commit: str | None = None

    def fetch(self, names: list[str] | None = None) -> None:
        """Have these files here (none: every file of the model); what is missing there is told when it is read."""
        if self.repo_id is None:
            return
        with talking_about(self.repo_id):
            there = sizes(self.repo_id, self.commit)
            for name in model_files(read_manifest(self.folder)) if names is None else names:
                if there is None or name in there:
                    download(self.repo_id, name, self.commit)


def locate(name: str | Path, task: int | None = None, revision: str | None = None) -> Source:
    """A local folder as it is; of a repository, the files of `task` (none: the last) are fetched into the cache."""
    repo_id, folder = hub_id(str(name)), Path(name)
    if repo_id is None:
        if revision is not None:
            raise PassloraError(f"revision goes with a model on the Hub, and {name} is a folder")
        return Source(folder, folder)
    check_repo_id(repo_id)
    source = locate_remote(repo_id, revision)
    manifest = read_manifest(source.folder)
    last = len(manifest.tasks) - 1
    if task is None or 0 <= task <= last:
        shared = [PROTOTYPES] if manifest.format_version == 1 else []
        source.fetch([*shared, *task_files(manifest, last if task is None else task)])
    return source


def sizes(repo_id: str, revision: str | None) -> dict[str, int] | None:
    """Bytes of each file of ours in a repository; None without network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found = HfApi().model_info(repo_id, revision=revision, files_metadata=True).siblings or []
    except HfHubHTTPError:
        raise
    except Exception:  # the network libraries' own
        return None
    return {file.rfilename: file.size or 0 for file in found if is_ours(file.rfilename)}


def describe_remote(repo_id: str, revision: str | None = None) -> dict[str, Any]:
    """What `saving.describe` tells of a folder; no weights are fetched."""
    check_repo_id(repo_id)
    source = locate_remote(repo_id, revision)
    about = saving.describe(source.folder)
    with talking_about(repo_id):
        there = sizes(repo_id, source.commit)
    if there is not None:
        about["bytes"] = sum(there.values())
        for i, task in enumerate(about["tasks"]):
            task["bytes"] = sum(n for name, n in there.items() if name.startswith(task_folder(i) + "/"))
    return about


def download(repo_id: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo_id, name, revision=revision))


def pull(repo_id: str, folder: Path, revision: str | None = None) -> Manifest:
    """A repository's model into a folder, which may hold an earlier state of it."""
    check_repo_id(repo_id)
    source = locate_remote(repo_id, revision)
    manifest = read_manifest(source.folder)
    with lock(folder):
        mine = read_manifest(folder) if (folder / MANIFEST).is_file() else None
        if mine is not None:
            check_continues(folder, manifest, repo_id)
        else:
            saving.check_new_model(folder)
        source.fetch()
        check_digests(source.folder, manifest)
        names = [name for name in model_files(manifest) if (source.folder / name).is_file()]
        cards = [folder / CARD, source.folder / CARD]
        card = render(folder, manifest, folder.resolve().name, cards) if CARD in names else None
        # A task's mark first, the manifest last: it names the others.
        for name in sorted(names, key=lambda name: (name == MANIFEST, Path(name).name not in MARKS)):
            if name == CARD:
                files.write_text(folder / name, str(card))
            else:
                copy_file(source, name, folder / name)
        format1.convert(folder)  # what passlora 0.1 had pushed, or pulled here before
        return keep_earlier_tasks(folder, mine)


def keep_earlier_tasks(folder: Path, before: Manifest | None) -> Manifest:
    """Tasks that lie here already stay restorable, also where the repository keeps the last one alone."""
    manifest = read_manifest(folder)
    kept = [(entry, mine) for entry, mine in zip(manifest.tasks, before.tasks if before else [], strict=False)]
    lost = [(entry, mine) for entry, mine in kept if mine.files and not entry.files]
    for entry, mine in lost:
        entry.files = mine.files
    if lost:
        write_manifest(folder, manifest)
    return manifest


def locate_remote(repo_id: str, revision: str | None) -> Source:
    """The manifest of a repository; further files come from the same commit, which the cache names its folder by."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    with talking_about(repo_id):
        try:
            size = get_hf_file_metadata(hf_hub_url(repo_id, MANIFEST, revision=revision)).size or 0
        except Exception:  # the download will say what is wrong, or find it in the cache
            size = 0
        if size > MAX_BYTES:
            raise PassloraError(f"{repo_id}: {MANIFEST} is larger than any manifest")
        folder = download(repo_id, MANIFEST, revision).parent
        return Source(folder, folder.parent.parent, repo_id, folder.name)


def check_continues(folder: Path, manifest: Manifest, repo_id: str) -> None:
    check_no_rollback(folder)
    if not manifest.starts_with(read_manifest(folder)):
        raise PassloraError(f"{folder} has learnt other tasks than {repo_id}: pull into another folder")


def copy_file(source: Source, name: str, target: Path) -> None:
    path = source.folder / name
    if not path.resolve().is_relative_to(source.root.resolve()):
        raise PassloraError(f"{path} leads out of the model's folder")

    def save(temporary: Path) -> None:
        shutil.copyfile(path, temporary)

    files.write(target, save)
