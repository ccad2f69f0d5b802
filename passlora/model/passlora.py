"""What a user holds: a model that lives in a folder, is taught, asked, restored and passed on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passlora.config import Config, for_learning
from passlora.data.batches import Images
from passlora.data.corruptions import CORRUPTIONS, check, corrupted
from passlora.data.pictures import pictures
from passlora.data.rows import Split
from passlora.data.scenario import Scenario
from passlora.errors import PassloraError
from passlora.folder import history, manifest, saving
from passlora.folder.lock import lock
from passlora.folder.manifest import Manifest, TaskEntry, read_manifest, settings_of
from passlora.hub import pull, push
from passlora.hub.card import write_card
from passlora.model import changing, export
from passlora.model.keeping import save
from passlora.model.lesson import (
    Lesson,
    LoadedData,
    check_seed,
    data_config,
    load_data,
    read_test_split,
    rows_of,
    take_settings,
)
from passlora.model.predictions import Prediction, image_features, inference_mode, predictions
from passlora.model.teaching import Request, teach
from passlora.training.accelerator import make_accelerator
from passlora.training.callbacks import Callback, telling
from passlora.training.evaluation import Evaluation
from passlora.training.learner import Learner, TaskState
from passlora.training.steps import Hooks

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from passlora.config import LessonSettings, NewModelSettings, ReadingSettings
    from passlora.data.pictures import Picture


class PassLora:
    """A model: `PassLora.create(...)` or `PassLora.from_pretrained(folder)`, then learn, predict, save_pretrained."""

    def __init__(self, learner: Learner, tasks: list[TaskEntry], source: pull.Source | None = None) -> None:
        self.learner, self.tasks = learner, tasks
        self.source = source  # where the tasks that were not learnt here can be copied from
        self.unsaved: dict[int, TaskState] = {}

    @classmethod
    def create(cls, **settings: Unpack[NewModelSettings]) -> PassLora:
        """A model that knows no class yet; `settings` are the keys of docs/configuration.md."""
        return cls.from_config(Config.make(**{**for_learning(settings), "num_tasks": 1, "task_sizes": None}))

    @classmethod
    def from_config(cls, config: Config, accelerator: Any = None) -> PassLora:
        """A model that knows no class yet, of a whole configuration."""
        manifest.check_settings(manifest.differing(settings_of(config)))  # what will be written is what can be read
        return cls(Learner(config, accelerator or make_accelerator(config.training)), [])

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        task: int | None = None,
        revision: str | None = None,
        accelerator: Any = None,
        asking: bool = False,
        **settings: Unpack[LessonSettings],
    ) -> PassLora:
        """The model of a folder, or of user/name on the Hub, as it is, or as it was after `task` (0 is the first).

        With `asking` it can be asked, tested and merged, not taught, and is there in half the time: peft stays out.
        `settings` change what the next task is learnt with; `model_name_or_path` says where a backbone lies that came
        from a local weights file. `revision` is a branch, tag or commit on the Hub.
        """
        source = pull.locate(name, task, revision)
        found = read_manifest(source.folder)
        count = len(found.tasks)
        if task is not None and not 0 <= task < count:
            raise PassloraError(f"{name} has the tasks 0 to {count - 1}, not {task}")
        learnt = count if task is None else task + 1
        known = Manifest(history.settings_after(source.folder, found, learnt - 1, source.root), found.tasks[:learnt])
        check_seed(known.config(), dict(settings))
        config = known.config(**settings)
        learner = Learner(config, accelerator or make_accelerator(config.training), asking)
        history.restore(source.folder, learner, found, learnt, source.root)
        return cls(learner, known.tasks, source)

    @property
    def classes(self) -> list[str]:
        """In the order of learning."""
        return Manifest({}, self.tasks).classes

    @property
    def scenario(self) -> Scenario:
        """Which classes came with which task."""
        sizes = tuple(len(names) for names in Manifest({}, self.tasks).classes_by_task)
        return Scenario(tuple(range(sum(sizes))), sizes)

    def __repr__(self) -> str:
        model = self.learner.config.model.model_name_or_path
        return f"PassLora({len(self.classes)} classes in {len(self.tasks)} tasks, on {model})"

    # --- teaching ----------------------------------------------------------------------------------------------

    def learn(
        self,
        data: Any,
        *,
        classes: Sequence[str] | None = None,
        on_known: str = "error",
        folder: str | Path | None = None,
        test_before: bool = True,
        hooks: Hooks | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[LessonSettings],
    ) -> Lesson:
        """Learn the new classes of a dataset as one more task; no image of an old class is needed.

        `data` is a path or a name (docs/data.md), a dataset of `datasets` or torch, a DataLoader, or a list of (image,
        label); splits come as a mapping, such as {"train": ..., "test": ...}.

        `classes` names those to learn, in order; otherwise all of the dataset's. A class that is known already is an
        error, with `on_known="skip"` left out, with "extend" learnt from more images of it. A test split may hold old
        classes too: accuracies are then measured after, and with `test_before` also before. With `save_steps` or
        `save_epochs` the state inside the task is kept in `folder`, and continued from there. `callbacks` are told how
        it goes. `settings` are keys of the data and training groups; the latter stay with the model.
        """
        self._check_whole(changing=True)
        place, before = None if folder is None else Path(folder), self.learner.config
        try:
            self.learner.config, reading = take_settings(before, dict(settings))
            with nullcontext() if place is None else self._locked(place):
                if place is not None:
                    history.check_no_rollback(place)
                loaded = data if isinstance(data, LoadedData) else self._load(data, reading)
                told = telling(hooks or Hooks(), callbacks, self)
                request = Request(loaded, classes, on_known, place, reading, test_before, told)
                lesson, entry, state = teach(self.learner, self.tasks, request)
        except BaseException:
            if not self.learner.is_half_taught:  # refused before anything was learnt: its settings are not the model's
                self.learner.config = before
            raise
        self._take(entry, state)
        for callback in callbacks:
            callback.on_task_end(self, len(self.tasks) - 1, lesson)
        return lesson

    def _take(self, entry: TaskEntry, state: TaskState | None = None) -> None:
        """One more task, or change of what is known."""
        tasks = [*self.tasks, entry]
        self.unsaved[len(self.tasks)] = changing.state_of(self.learner, tasks) if state is None else state
        self.tasks = tasks

    def forget(self, classes: Sequence[str]) -> str:
        """Remove classes; returns what remains of them in words, empty if nothing does. `save_pretrained` keeps it."""
        self._check_whole(changing=True)
        remains = changing.what_remains(self.learner, Manifest({}, self.tasks), classes)
        self._take(changing.forget(self.learner, self.classes, classes))
        return remains

    def rename(self, old: str, new: str) -> None:
        """Give a class another name. `save_pretrained` keeps it."""
        self._check_whole(changing=True)
        self._take(changing.rename(self.learner, self.classes, old, new))

    def combine(self, other: PassLora, on_clash: str = "error") -> dict[str, str]:
        """Learn all that another model of the same backbone knows, without any image.

        Classes of one name are an error, one class (`on_clash="join"`), or two (`"rename"`); returns their new names.
        """
        self._check_whole(changing=True)
        other._check_whole(changing=True)
        entry, names = changing.combine(self.learner, self.classes, other.learner, other.classes, on_clash)
        self._take(entry)
        return names

    def _check_whole(self, changing: bool = False) -> None:
        if changing and self.learner.asking:
            raise PassloraError("the model was loaded to be asked: load it without asking=True to change it")
        if self.learner.is_half_taught or self.learner.network.num_classes != len(self.classes):
            raise PassloraError("a lesson was interrupted and left the model half taught: load it again")

    def _locked(self, folder: Path) -> AbstractContextManager[None]:
        return lock(folder) if self.learner.accelerator.is_main_process else nullcontext()

    def _load(self, data: Any, reading: dict[str, Any]) -> LoadedData:
        config = self.learner.config
        size = self.learner.network.backbone.image_size
        seed = config.training.seed
        return load_data(data, data_config(config, data, reading), size, self.classes, config.data, seed)

    # --- asking ------------------------------------------------------------------------------------------------

    def predict(
        self, images: Picture | Iterable[Picture], top_k: int = 5, views: int | None = None, batch_size: int = 64
    ) -> Iterator[list[Prediction]]:
        """The likeliest classes of each image, best first; a batch at a time, as they are asked for.

        An image is a picture of Pillow, an array or tensor of its pixels, or the path of a file. `views` is 1 (the
        image as it is) or 4 (the ensemble of rotations); by default as the model was evaluated.
        """
        if top_k < 1:
            raise PassloraError(f"top_k must be at least 1, got {top_k}")
        if not self.classes:
            raise PassloraError("the model has learnt nothing yet")
        self._check_whole()
        mode = inference_mode(self.learner, views)
        return predictions(self.learner, self.classes, pictures(images), top_k, mode, batch_size)

    def features(self, images: Picture | Iterable[Picture], batch_size: int = 64) -> Tensor:
        """What the network makes of images, upright: a row each, on the CPU; what `predict` takes, no class needed."""
        self._check_whole()
        return image_features(self.learner, pictures(images), batch_size)

    def evaluate(self, data: Any, **settings: Unpack[ReadingSettings]) -> Evaluation:
        """Counts over a dataset's test split, or all of it if it has none; every class must be known."""
        return self._evaluate(*read_test_split(self.learner.config, data, dict(settings), self.classes))

    def robustness(
        self,
        data: Any,
        severity: int = 1,
        corruptions: Iterable[str] = CORRUPTIONS,
        **settings: Unpack[ReadingSettings],
    ) -> Iterator[tuple[str, Evaluation]]:
        """As `evaluate`: first on the images as they are ("clean"), then under each corruption (docs/analysis.md)."""
        names = tuple(corruptions)
        check(names, severity)
        split, classes = read_test_split(self.learner.config, data, dict(settings), self.classes)
        yield "clean", self._evaluate(split, classes)
        for name in names:
            yield name, self._evaluate(corrupted(split, name, severity), classes)

    def _evaluate(self, split: Split, names: list[str]) -> Evaluation:
        size, mode = self.learner.network.backbone.image_size, self.learner.config.method.inference
        images = Images(split, size, self.learner.config.data, "test images")
        index = {name: i for i, name in enumerate(self.classes)}
        return self.learner.evaluate(rows_of(images, names, index), [mode])[mode]

    # --- keeping -----------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model's folder (docs/model-format.md); earlier tasks are copied from where it was loaded."""
        folder = Path(folder)
        if not self.tasks:
            raise PassloraError("the model has learnt nothing yet")
        if self.learner.accelerator.is_main_process:
            with lock(folder):
                whole = Manifest(settings_of(self.learner.config), self.tasks)
                save(folder, whole, self.unsaved, self.source)
        self.learner.accelerator.wait_for_everyone()
        self.source, self.unsaved = pull.Source(folder, folder), {}

    def push_to_hub(
        self,
        repo_id: str,
        private: bool = False,
        revision: str | None = None,
        create_pr: bool = False,
        force: bool = False,
    ) -> str:
        """Upload the folder that the model was saved to, from the first process; returns the address there."""
        folder, url = self._own_folder(), ""
        if self.learner.accelerator.is_main_process:
            with lock(folder):
                url = push.push(folder, repo_id, private, revision, create_pr, force).url
        self.learner.accelerator.wait_for_everyone()
        return url

    def rollback(self, to_task: int) -> None:
        """Become what it was after `to_task`, here and in the folder; nothing is deleted (see docs/lifecycle.md)."""
        folder = self._own_folder()
        if self.learner.accelerator.is_main_process:
            with lock(folder):
                write_card(folder, history.rollback(folder, to_task))
        self.learner.accelerator.wait_for_everyone()
        backbone = self.learner.config.model.model_name_or_path
        model = PassLora.from_pretrained(folder, accelerator=self.learner.accelerator, model_name_or_path=backbone)
        self.learner, self.tasks = model.learner, model.tasks

    def prune(self) -> list[str]:
        """Confirm a rollback: delete what it left behind; returns the names of what went."""
        folder, gone = self._own_folder(), []
        if self.learner.accelerator.is_main_process:
            with lock(folder):
                gone = history.prune(folder)
        self.learner.accelerator.wait_for_everyone()
        return gone

    def info(self) -> dict[str, Any]:
        """What `passlora info` shows: settings, classes, tasks with dates, accuracies and bytes."""
        return saving.describe(self._own_folder())

    def _own_folder(self) -> Path:
        """The folder on disk that holds exactly this model."""
        folder = None if self.source is None or self.source.repo_id is not None else self.source.folder
        if folder is None or self.unsaved or len(read_manifest(folder).tasks) != len(self.tasks):
            raise PassloraError("the model is not in a folder as it is now: save_pretrained it first")
        return folder

    def merge(self, out: str | Path, format: str = "timm") -> None:
        """The adapter folded into plain weights, for serving without peft, as a new folder.

        timm: `timm.create_model("local-dir:OUT", pretrained=True)` and stock transformers read it, without passlora; a
        logit a class, of the upright image. transformers: after `import passlora.serving`,
        `AutoModelForImageClassification` and `pipeline` read it; the ensemble of rotations is inside.
        """
        self._check_whole()
        export.merge(self.learner, self.classes, Path(out), format)
