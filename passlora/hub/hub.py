"""The Hugging Face Hub: a model's folder up, and down again. Tokens are the client's business: none is read here."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passlora import files
from passlora.config import hub_id, is_repo_id
from passlora.display.progress import is_silent
from passlora.errors import PassloraError, redact, redact_logs
from passlora.folder import layout, store
from passlora.folder.manifest import MANIFEST, MAX_BYTES, Manifest, read_manifest
from passlora.hub.card import render

ABOUT = (layout.CARD, layout.RESULTS, layout.MATRIX, layout.PICTURE)  # a model may lack these
PATIENCE = 60.0  # seconds that a server may be silent
IN_A_TASK = (layout.ADAPTER, layout.ADAPTER_CONFIG, layout.BACKBONE, layout.HEAD)


def is_ours(name: str) -> bool:
    """Whether a file of a repository is one that `push` writes."""
    folder, _, file = name.rpartition("/")
    if not folder:
        return name in (MANIFEST, layout.PROTOTYPES, *ABOUT)
    return re.fullmatch(r"task_\d{2,}", folder) is not None and file in IN_A_TASK


# --- up --------------------------------------------------------------------------------------------------------


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
    manifest = read_manifest(folder)
    store.check_no_rollback(folder)
    store.check_links(folder)
    with talking_about(repo_id):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api, last = HfApi(), len(manifest.tasks) - 1
        if not create_pr:
            api.create_repo(repo_id, private=private, exist_ok=True)
        if revision not in (None, "main"):
            api.create_branch(repo_id, branch=str(revision), exist_ok=True)
        before = api.model_info(repo_id, revision=revision)
        if private and not before.private:
            raise PassloraError(f"{repo_id} exists, and is public: make it private on its page, or choose another name")
        files: dict[str, Any] = {name: folder / name for name in model_files(manifest) if (folder / name).is_file()}
        remote = {sibling.rfilename for sibling in before.siblings or []}
        if MANIFEST in remote and not force and not create_pr:
            check_goes_on(manifest, download(repo_id, MANIFEST, before.sha).parent, repo_id)
        cards = [folder / layout.CARD]
        if layout.CARD in remote:
            cards.append(download(repo_id, layout.CARD, before.sha))
        files[layout.CARD] = render(folder, manifest, repo_id, cards).encode()
        gone = sorted(name for name in remote if is_ours(name) and name not in files)
        operations: list[Any] = [CommitOperationAdd(name, content) for name, content in files.items()]
        operations += [CommitOperationDelete(name) for name in gone]
        tag = f"task-{last:02d}"
        message = f"Task {last}: {len(manifest.classes)} classes"
        commit = api.create_commit(
            repo_id,
            operations,
            commit_message=message,
            revision=revision,
            create_pr=create_pr,
            parent_commit=before.sha,  # refused if someone else was faster
        )
        if create_pr:
            return Pushed(str(commit.pr_url), True, None)
        changed = commit.oid != before.sha
        if revision in (None, "main"):
            move_tag(api, repo_id, tag, commit.oid, changed)
        return Pushed(str(commit.repo_url), changed, tag if revision in (None, "main") else None)


def check_goes_on(manifest: Manifest, there: Path, repo_id: str) -> None:
    """Nobody's model, and no later task of this one, is replaced by accident."""
    theirs = [(task.classes, task.learnt) for task in read_manifest(there).tasks]
    mine = [(task.classes, task.learnt) for task in manifest.tasks]
    if mine[: len(theirs)] != theirs:
        what = "later tasks of this model" if theirs[: len(mine)] == mine else "another model"
        raise PassloraError(f"{repo_id} holds {what}: choose another name, or replace it with passlora push --force")


def move_tag(api: Any, repo_id: str, tag: str, commit: str, changed: bool) -> None:
    """The tag of a task names the newest commit that ends with it."""
    there = {ref.name for ref in api.list_repo_refs(repo_id).tags}
    if tag in there and changed:
        api.delete_tag(repo_id, tag=tag)
    if tag not in there or changed:
        api.create_tag(repo_id, tag=tag, revision=commit)


def model_files(manifest: Manifest) -> list[str]:
    """Every name that a file of this model may have; from its number of tasks, never from what a stranger lists."""
    parts = [f"{layout.task_folder(task)}/{name}" for task in range(len(manifest.tasks)) for name in IN_A_TASK]
    return [MANIFEST, layout.PROTOTYPES, *ABOUT, *parts]


class Uploads:
    """Pushes after each task of a training. A failure is told, not raised, and made up for by the next push."""

    def __init__(self, folder: Path, repo_id: str, private: bool, say: Callable[[str], None]) -> None:
        self.folder, self.repo_id, self.private, self.say = folder, repo_id, private, say
        self.is_due = (folder / MANIFEST).is_file()  # what an earlier start of this training could not upload

    def push(self) -> None:
        self.is_due = True
        try:
            done = push(self.folder, self.repo_id, self.private)
        except Exception as error:  # whatever goes wrong on the way up, training goes on
            reason = error if isinstance(error, PassloraError) else redact(f"{type(error).__name__}: {error}")
            self.say(f"upload to {self.repo_id} failed: {reason}")
            return
        self.is_due = False
        self.say(f"uploaded to {done.url}" + (f", tag {done.tag}" if done.tag else ""))

    def finish(self) -> None:
        if self.is_due:
            self.push()
        if self.is_due:
            command = ["passlora", "push", str(self.folder), self.repo_id, *(["--private"] if self.private else [])]
            self.say(f"the upload is not complete; finish it with: {shlex.join(command)}")


# --- down ------------------------------------------------------------------------------------------------------


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
            for name in names or model_files(read_manifest(self.folder)):
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
        weights = layout.ADAPTER if manifest.settings["lora_r"] else layout.BACKBONE
        part = layout.task_folder(last if task is None else task)
        source.fetch([layout.PROTOTYPES, f"{part}/{weights}", f"{part}/{layout.HEAD}"])
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
    """What `store.describe` tells of a folder; no weights are fetched."""
    check_repo_id(repo_id)
    source = locate_remote(repo_id, revision)
    about = store.describe(source.folder)
    with talking_about(repo_id):
        there = sizes(repo_id, source.commit)
    if there is not None:
        about["bytes"] = sum(there.values())
        for i, task in enumerate(about["tasks"]):
            task["bytes"] = sum(n for name, n in there.items() if name.startswith(layout.task_folder(i) + "/"))
    return about


def download(repo_id: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo_id, name, revision=revision))


def pull(repo_id: str, folder: Path, revision: str | None = None) -> Manifest:
    """A repository's model into a folder, which may hold an earlier state of it."""
    check_repo_id(repo_id)
    source = locate_remote(repo_id, revision)
    manifest = read_manifest(source.folder)
    with store.lock(folder):
        if (folder / MANIFEST).is_file():
            check_continues(folder, manifest, repo_id)
        else:
            store.check_new_model(folder)
        source.fetch()
        names = [name for name in model_files(manifest) if (source.folder / name).is_file()]
        cards = [folder / layout.CARD, source.folder / layout.CARD]
        card = render(folder, manifest, folder.resolve().name, cards) if layout.CARD in names else None
        for name in sorted(names, key=lambda name: name == MANIFEST):  # the manifest last: it names the others
            if name == layout.CARD:
                files.write_text(folder / name, str(card))
            else:
                copy_file(source, name, folder / name)
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
    store.check_no_rollback(folder)
    mine = [(task.classes, task.learnt) for task in read_manifest(folder).tasks]
    theirs = [(task.classes, task.learnt) for task in manifest.tasks]
    if theirs[: len(mine)] != mine:
        raise PassloraError(f"{folder} has learnt other tasks than {repo_id}: pull into another folder")


def copy_file(source: Source, name: str, target: Path) -> None:
    path = source.folder / name
    if not path.resolve().is_relative_to(source.root.resolve()):
        raise PassloraError(f"{path} leads out of the model's folder")

    def save(temporary: Path) -> None:
        shutil.copyfile(path, temporary)

    files.write(target, save)


# --- what goes wrong -------------------------------------------------------------------------------------------


def check_repo_id(repo_id: str) -> None:
    if not is_repo_id(repo_id):
        raise PassloraError(f"a model on the Hub is called user/name, not {repo_id!r}")


@contextmanager
def talking_about(repo_id: str) -> Iterator[None]:
    """The client's bars only on a terminal; whatever it raises or logs, without secrets, errors in one sentence."""
    from huggingface_hub import errors as kinds
    from huggingface_hub import get_session
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    redact_logs()
    client = get_session()
    patience, client.timeout = client.timeout, PATIENCE
    hide_bars = is_silent() and not are_progress_bars_disabled()
    if hide_bars:
        disable_progress_bars()
    try:
        yield
    except PassloraError:
        raise
    except kinds.GatedRepoError:
        raise PassloraError(f"{repo_id} is gated: ask for access on its page, and log in with: hf auth login") from None
    except kinds.RevisionNotFoundError:
        raise PassloraError(f"{repo_id} has no such revision") from None
    except kinds.EntryNotFoundError as error:
        offline = isinstance(error, kinds.LocalEntryNotFoundError)
        what = (
            "is no folder here, and cannot be reached on the Hub nor found in its cache"
            if offline
            else f"has no {MANIFEST}: it is no passlora model"
        )
        raise PassloraError(f"{repo_id} {what}") from None
    except kinds.LocalTokenNotFoundError:
        raise PassloraError("no token for the Hub: log in with hf auth login, or set HF_TOKEN") from None
    except kinds.HfHubHTTPError as error:
        raise PassloraError(describe(error, repo_id)) from None
    except (kinds.HFValidationError, ValueError) as error:
        raise PassloraError(f"{repo_id}: {redact(str(error))}") from None
    except Exception as error:
        cause = (
            error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        )  # of one file among many
        if isinstance(cause, kinds.HfHubHTTPError):
            raise PassloraError(describe(cause, repo_id)) from None
        raise PassloraError(f"the Hub cannot be reached ({redact(f'{type(cause).__name__}: {cause}')})") from None
    finally:
        client.timeout = patience
        if hide_bars:
            enable_progress_bars()


def describe(error: Any, repo_id: str) -> str:
    status, said = error.response.status_code, redact(error.server_message or "")
    detail = f": {said}" if said else ""
    if "RepositoryNotFound" in type(error).__name__:
        return f"{repo_id} is neither a folder here nor a model on the Hub that your token may see"
    if status == 401:
        return f"the Hub refuses the token (401{detail}): log in with hf auth login, or set HF_TOKEN"
    if status == 403:
        return f"the token does not permit this on {repo_id} (403{detail})"
    return f"the Hub answers {status}{detail}"
