"""What a model knows, changed without images: classes forgotten, renamed, or taken over from another model.

Each change is one more task of the model's history, whole as any other, so that it can be gone back from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from passlora.config import FIELDS
from passlora.data.class_names import check_class_name
from passlora.errors import PassloraError, nearest
from passlora.folder.manifest import Manifest, TaskEntry, now, settings_of
from passlora.folder.tasks import check_state
from passlora.training.learner import Learner, TaskState

ON_CLASH = ("error", "join", "rename")


def forget(learner: Learner, known: Sequence[str], names: Sequence[str]) -> TaskEntry:
    """Without `names`, of the classes that are known."""
    for name in names:
        check_known(name, known)
    gone = set(names)
    if gone == set(known):
        raise PassloraError("these are all the classes that the model knows: delete the model instead")
    learner.keep(torch.tensor([i for i, name in enumerate(known) if name not in gone]))
    return TaskEntry([], now(), forgotten=sorted(gone))


def what_remains(learner: Learner, model: Manifest, names: Sequence[str]) -> str:
    """Of classes that are about to be forgotten, in words; empty if nothing does."""
    parts = [learner.network.classifier.remains()]
    adapted = learner.config.method.adapt_tasks
    if adapted == "first" and set(names) & set(model.classes_by_task[0]):
        parts.append("what their images taught the network in the first task")
    elif adapted == "all" and not learner.network.classifier.trained:
        parts.append("what their images taught the network")
    return "; ".join(part for part in parts if part)


def rename(learner: Learner, known: Sequence[str], old: str, new: str) -> TaskEntry:
    check_known(old, known)
    check_class_name(new)
    if new in known:
        raise PassloraError(f"the model knows a class {new!r} already")
    learner.task += 1
    return TaskEntry([], now(), renamed={old: new})


def combine(
    learner: Learner, known: Sequence[str], other: Learner, others: Sequence[str], on_clash: str
) -> tuple[TaskEntry, dict[str, str]]:
    """With the classes `others` of another model; what became of names that both have (`on_clash`)."""
    if on_clash not in ON_CLASH:
        raise PassloraError(f"on_clash must be {', '.join(ON_CLASH)}, got {on_clash!r}")
    check_same_kind(learner, other)
    both = [name for name in others if name in known]
    if both and on_clash == "error":
        raise PassloraError(
            f"both models know {', '.join(both[:10])}: --on_clash join takes each for one class, rename for two"
        )
    taken, names = {*known, *others}, {name: name for name in others}
    if on_clash == "rename":
        for name in both:
            names[name] = next(free for n in range(2, len(taken) + 3) if (free := f"{name} ({n})") not in taken)
            taken.add(names[name])
    new = [names[name] for name in others if names[name] not in known]
    index = {name: i for i, name in enumerate([*known, *new])}
    learner.join(other, torch.tensor([index[names[name]] for name in others]))
    joined = [] if on_clash == "rename" else both
    return TaskEntry(new, now(), extended=joined), {name: names[name] for name in both}


def check_known(name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise PassloraError(f"the model knows no class {name!r}{nearest(name, known)}")


def check_same_kind(learner: Learner, other: Learner) -> None:
    """Features and classifier mean the same in both."""
    if not learner.network.classifier.joins:
        raise PassloraError(
            f"models of the classifier {learner.config.method.classifier} cannot be combined: what it knows is "
            "trained, or fitted to all of its classes at once"
        )
    mine, theirs = settings_of(learner.config), settings_of(other.config)
    for name, value in mine.items():
        if FIELDS[name].group in ("model", "method") and name != "preset" and value != theirs[name]:
            raise PassloraError(f"the models differ in {name} ({value} and {theirs[name]}): they cannot be combined")


def state_of(learner: Learner, tasks: list[TaskEntry]) -> TaskState:
    """What is to be kept of a change; by the reader's own checks."""
    from passlora.folder import manifest

    manifest.check(manifest.to_json(Manifest(settings_of(learner.config), tasks)))
    state = learner.state()
    check_state(state)
    state.settings = settings_of(learner.config)
    return state
