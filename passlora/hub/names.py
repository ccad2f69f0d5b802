"""Which files of a repository are a model's, and what goes wrong on the way there, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from passlora.config import is_repo_id
from passlora.display.progress import is_silent
from passlora.errors import PassloraError, redact, redact_logs
from passlora.folder.layout import (
    ADAPTER,
    ADAPTER_CONFIG,
    BACKBONE,
    CARD,
    HEAD,
    IN_A_TASK,
    MANIFEST,
    MATRIX,
    PICTURE,
    PROTOTYPES,
    RESULTS,
    task_folder,
    task_number,
)
from passlora.folder.manifest import Manifest

ABOUT = (CARD, RESULTS, MATRIX, PICTURE)  # a model may lack these
PATIENCE = 60.0  # seconds that a server may be silent
IN_A_TASK_OF_FORMAT_1 = (ADAPTER, ADAPTER_CONFIG, BACKBONE, HEAD)


def is_ours(name: str) -> bool:
    """Whether a file of a repository is one that `push` writes, or that of passlora 0.1 wrote."""
    folder, _, file = name.rpartition("/")
    if not folder:
        return name in (MANIFEST, PROTOTYPES, *ABOUT)
    return task_number(folder) is not None and file in (*IN_A_TASK, HEAD)


def task_files(manifest: Manifest, task: int) -> list[str]:
    """Of one task, as paths in the model's folder."""
    names = IN_A_TASK_OF_FORMAT_1 if manifest.format_version == 1 else manifest.tasks[task].files
    return [f"{task_folder(task)}/{name}" for name in names]


def model_files(manifest: Manifest) -> list[str]:
    """Every name that a file of this model may have; by our own names, never by what a stranger lists."""
    shared = [PROTOTYPES] if manifest.format_version == 1 else []
    parts = [name for task in range(len(manifest.tasks)) for name in task_files(manifest, task)]
    return [MANIFEST, *shared, *ABOUT, *parts]


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
