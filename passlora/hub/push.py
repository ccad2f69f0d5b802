"""A model's folder up to the Hugging Face Hub. Tokens are the client's business: none is read here."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passlora.errors import PassloraError, redact
from passlora.folder import format1
from passlora.folder.history import check_no_rollback
from passlora.folder.layout import CARD, MANIFEST
from passlora.folder.lock import check_links
from passlora.folder.manifest import Manifest, read_manifest
from passlora.folder.tasks import check_digests
from passlora.hub.card import is_only_metadata, render
from passlora.hub.names import check_repo_id, is_ours, model_files, talking_about
from passlora.hub.pull import download

log = logging.getLogger(__name__)


@dataclass
class Pushed:
    """What a push did."""

    url: str
    changed: bool  # whether a commit was made
    tag: str | None


def push(
    folder: Path,
    repo_id: str,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    force: bool = False,
) -> Pushed:
    """One commit that makes the repository the folder's model, and a tag that names its last task.

    The client uploads only what changed. What is there must be an earlier state of the same model, unless `force`: then
    files of tasks that are gone here go there too. Files that are not a model's stay.
    """
    check_repo_id(repo_id)
    if create_pr and revision is not None:
        raise PassloraError("a pull request goes to the main branch: leave out the revision")
    manifest = ready_to_send(folder)
    with talking_about(repo_id):
        from huggingface_hub import HfApi

        api, last = HfApi(), len(manifest.tasks) - 1
        if not create_pr:
            api.create_repo(repo_id, private=private, exist_ok=True)
        if revision not in (None, "main"):
            api.create_branch(repo_id, branch=str(revision), exist_ok=True)
        before = api.model_info(repo_id, revision=revision)
        if private and not before.private:
            raise PassloraError(f"{repo_id} exists, and is public: make it private on its page, or choose another name")
        remote = {sibling.rfilename for sibling in before.siblings or []}
        if not force and not create_pr:
            check_may_replace(manifest, repo_id, remote, before.sha)
        commit = api.create_commit(
            repo_id,
            changes(folder, manifest, repo_id, remote, before.sha),
            commit_message=f"Task {last}: {len(manifest.classes)} classes",
            revision=revision,
            create_pr=create_pr,
            parent_commit=before.sha,  # refused if someone else was faster
        )
        if create_pr:
            return Pushed(str(commit.pr_url), True, None)
        changed, tag = commit.oid != before.sha, f"task-{last:02d}" if revision in (None, "main") else None
        if tag is not None:
            move_tag(api, repo_id, tag, commit.oid, changed)
        return Pushed(str(commit.repo_url), changed, tag)


def ready_to_send(folder: Path) -> Manifest:
    """The manifest of a folder that is in order, in today's format."""
    read_manifest(folder)
    check_no_rollback(folder)
    check_links(folder)
    format1.convert(folder)
    manifest = read_manifest(folder)
    check_digests(folder, manifest)
    last = max((i for i, task in enumerate(manifest.tasks) if task.forgotten), default=0)
    if any(task.files for task in manifest.tasks[:last]):
        log.warning(
            f"earlier tasks still hold classes that were forgotten: passlora forget {folder} --prune deletes them"
        )
    return manifest


def changes(folder: Path, manifest: Manifest, repo_id: str, remote: set[str], commit: str | None) -> list[Any]:
    """What makes a repository with the files `remote` this model; those of tasks that are gone here go there too."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    files: dict[str, Any] = {name: folder / name for name in model_files(manifest) if (folder / name).is_file()}
    cards = [folder / CARD, *([download(repo_id, CARD, commit)] if CARD in remote else [])]
    files[CARD] = render(folder, manifest, repo_id, cards).encode()
    gone = sorted(name for name in remote if is_ours(name) and name not in files)
    added = [CommitOperationAdd(name, content) for name, content in files.items()]
    return [*added, *(CommitOperationDelete(name) for name in gone)]


def check_may_replace(manifest: Manifest, repo_id: str, remote: set[str], commit: str | None) -> None:
    """Nobody's files, and no later task of this model, are replaced by accident."""
    if MANIFEST not in remote:
        theirs = sorted(name for name in remote if is_ours(name))
        if theirs == [CARD] and is_only_metadata(download(repo_id, CARD, commit)):
            return  # a repository that was just made on the website
        if theirs:
            raise PassloraError(
                f"{repo_id} holds something else than a passlora model, with a {theirs[0]} that would be replaced: "
                "choose another name, or replace it with passlora push --force"
            )
        return
    there = read_manifest(download(repo_id, MANIFEST, commit).parent)
    if not manifest.starts_with(there):
        what = "later tasks of this model" if there.starts_with(manifest) else "another model"
        raise PassloraError(f"{repo_id} holds {what}: choose another name, or replace it with passlora push --force")


def move_tag(api: Any, repo_id: str, tag: str, commit: str, changed: bool) -> None:
    """The tag of a task names the newest commit that ends with it."""
    there = {ref.name for ref in api.list_repo_refs(repo_id).tags}
    if tag in there and changed:
        api.delete_tag(repo_id, tag=tag)
    if tag not in there or changed:
        api.create_tag(repo_id, tag=tag, revision=commit)


class Uploads:
    """Pushes after each task of a training. A failure is told, not raised, and made up for by the next push."""

    def __init__(self, folder: Path, repo_id: str, private: bool) -> None:
        self.folder, self.repo_id, self.private = folder, repo_id, private
        self.is_due = (folder / MANIFEST).is_file()  # what an earlier start of this training could not upload

    def push(self) -> None:
        self.is_due = True
        try:
            done = push(self.folder, self.repo_id, self.private)
        except Exception as error:  # whatever goes wrong on the way up, training goes on
            reason = error if isinstance(error, PassloraError) else redact(f"{type(error).__name__}: {error}")
            log.info(f"upload to {self.repo_id} failed: {reason}")
            return
        self.is_due = False
        log.info(f"uploaded to {done.url}" + (f", tag {done.tag}" if done.tag else ""))

    def finish(self) -> None:
        if self.is_due:
            self.push()
        if self.is_due:
            command = ["passlora", "push", str(self.folder), self.repo_id, *(["--private"] if self.private else [])]
            log.info(f"the upload is not complete; finish it with: {shlex.join(command)}")
