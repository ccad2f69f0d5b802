"""Every knob of passlora, with its help text, its default and its checks.

Keys are flat in YAML and on the command line; here they are grouped by concern. Nothing heavy is imported, so a
wrong recipe is refused at once. Precedence: defaults < preset < recipe < command line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from passlora.config.values import above, at_least, between, coerce
from passlora.errors import PassloraError, nearest

Preset = Literal["pass++", "pass", "lwf-kd", "finetune", "lwf", "lwf-mc", "ncm", "slda", "simplecil", "fetril"]
Inference = Literal["multiview", "single", "vanilla", "nearest_prototype"]
ROTATED_INFERENCE = ("multiview", "vanilla")
NUM_ROTATIONS = 4
LOCAL_DATA = "local:"  # how a saved configuration names data that lay on the machine it ran on

# A preset is a configuration, never a subclass. PASS++ is what the defaults spell.
_PLAIN: dict[str, Any] = {
    "sst": False,
    "proto_aug": "none",
    "hardness": False,
    "prototype_views": 1,
    "inference": "single",
}
_FROZEN: dict[str, Any] = {**_PLAIN, "kd_weight": 0.0, "adapt_tasks": "none"}
PRESETS: dict[str, dict[str, Any]] = {
    "pass++": {},
    "pass": {"hardness": False, "prototype_views": 1, "inference": "single"},
    "lwf-kd": _PLAIN,
    "finetune": {**_PLAIN, "kd_weight": 0.0},
    "lwf": {**_PLAIN, "kd_on": "logits", "kd_weight": 1.0},
    "lwf-mc": {**_PLAIN, "kd_on": "logits", "kd_weight": 1.0, "new_loss": "binary"},
    "ncm": {**_FROZEN, "classifier": "ncm"},
    "slda": {**_FROZEN, "classifier": "slda"},
    "simplecil": {**_FROZEN, "classifier": "ncm", "adapt_tasks": "first"},
    "fetril": {**_FROZEN, "classifier": "fetril", "adapt_tasks": "first"},
}

# What `passlora train` runs when it is given neither a recipe nor a dataset. recipes/mini/digits.yaml says the same.
DEFAULT_RECIPE: dict[str, Any] = {
    "model_name_or_path": "passlora/vit-mini",
    "dataset_name": "digits",
    "task_sizes": [4, 2, 2, 2],
    "crop_padding": 0,
    "horizontal_flip": False,
    "brightness": 0.0,
    "num_train_epochs": 4,
    "lr_milestones": [3],
    "per_device_train_batch_size": 8,
    "compare": ["finetune"],
    "output_dir": "runs/digits",
}


def is_repo_id(name: str) -> bool:
    """user/name, as the Hub spells it."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", name) is not None and ".." not in name


def hub_id(name: str) -> str | None:
    """The repository that a model's name means: user/name if no folder `user` is here, hf-hub:user/name always."""
    if name.startswith("hf-hub:"):
        return name.removeprefix("hf-hub:")
    return name if is_repo_id(name) and not Path(name).parent.is_dir() else None


def knob(default: Any, help: str) -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class ModelConfig:
    """The backbone f and its adapter."""

    model_name_or_path: str = knob(
        "passlora/vit-mini",
        "passlora/vit-mini (bundled, 64 px), passlora/resnet18 (from scratch), any timm model name, a Hub id "
        "such as hf-hub:timm/deit_small_patch16_224.fb_in1k, or a local .safetensors/.pth checkpoint",
    )
    model_architecture: str | None = knob(
        None, "timm architecture of a local checkpoint, such as deit_small_patch16_224"
    )
    pretrained: bool = knob(True, "load pretrained weights (false: random weights, to train from scratch)")
    image_size: int | None = knob(None, "side of the square input in pixels (none: the backbone's own)")
    feature_dim: int | None = knob(
        None,
        "project the features to so many dimensions, by a layer that is trained too: 2 to draw them (needs lora_r 0)",
    )
    lora_r: int = knob(4, "rank of the LoRA adapters; 0 trains the whole backbone instead")
    lora_alpha: float | None = knob(None, "LoRA scale times lora_r (none: lora_r, so that the scale is 1)")
    lora_target_modules: str = knob(
        "qkv",
        "layers to adapt: qkv, attn (qkv and proj), attn+mlp (all of a block's linear layers), or a regex that "
        "matches timm's whole module names",
    )

    def __post_init__(self) -> None:
        between("lora_r", self.lora_r, 0, 1024)
        if self.lora_alpha is not None:
            above("lora_alpha", self.lora_alpha, 0)
        if self.feature_dim is not None:
            between("feature_dim", self.feature_dim, 1, 4096)
            if self.lora_r > 0:
                raise PassloraError("feature_dim adds a layer to the backbone, which must be trained: set --lora_r 0")
        if self.image_size is not None:
            between("image_size", self.image_size, 8, 4096)
        try:
            re.compile(self.lora_target_modules)
        except re.error as error:
            raise PassloraError(
                f"lora_target_modules: {self.lora_target_modules!r} is not a valid regex ({error})"
            ) from None
        # A model may come from a stranger: no pattern that takes for ever to fail.
        if len(re.findall(r"[*+{]", self.lora_target_modules)) > 4 or re.search(r"\)[*+{]", self.lora_target_modules):
            raise PassloraError(
                f"lora_target_modules: {self.lora_target_modules[:80]!r} is too complicated; use at most four of "
                "* + {, and none of them after a group"
            )


@dataclass
class DataConfig:
    """Where the images come from, and how they are augmented."""

    dataset_name: str = knob(
        "digits",
        "a Hub dataset id, a folder of images (train/<class>/*.jpg, or <class>/*.jpg), a folder or file of "
        "parquet/arrow, or digits (embedded)",
    )
    dataset_config: str | None = knob(None, "configuration name of a Hub dataset")
    dataset_train_split: str = knob("train", "name of the training split")
    dataset_test_split: str | None = knob(
        None, "name of the test split (none: test, validation, valid, val or dev, else a hold-out)"
    )
    image_column: str | None = knob(None, "column of the images (none: found by type and name)")
    label_column: str | None = knob(None, "column of the labels (none: found by type and name)")
    test_fraction: float = knob(0.2, "share of each class held out for testing when there is no test split")
    max_classes: int | None = knob(None, "use only the first so many classes of the dataset")
    max_train_per_class: int | None = knob(None, "use at most this many training images a class")
    max_test_per_class: int | None = knob(None, "use at most this many test images a class")
    crop_padding: int = knob(4, "small images: random crop after zero-padding by this many pixels (0: off)")
    horizontal_flip: bool = knob(True, "mirror half of the training images")
    brightness: float = knob(63 / 255, "random brightness factor in 1 +- this (0: off)")
    rrc_min_scale: float = knob(
        0.08, "large images: smallest area share of a RandomResizedCrop (0: centre crop instead)"
    )
    dataloader_num_workers: int = knob(2, "processes that decode large images (small ones need none)")

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise PassloraError(f"test_fraction must be between 0 and 1, got {self.test_fraction}")
        for name in ("max_classes", "max_train_per_class", "max_test_per_class"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        at_least("crop_padding", self.crop_padding, 0)
        at_least("dataloader_num_workers", self.dataloader_num_workers, 0)
        between("brightness", self.brightness, 0, 1)
        between("rrc_min_scale", self.rrc_min_scale, 0, 1)


@dataclass
class ScenarioConfig:
    """Which classes arrive when."""

    protocol: Literal["equal", "half-base"] = knob(
        "equal", "equal: num_tasks equal tasks; half-base: half the classes first, then num_tasks equal tasks"
    )
    num_tasks: int | None = knob(
        None, "number of tasks (half-base: of tasks after the first); needed unless task_sizes is given"
    )
    base_classes: int | None = knob(None, "half-base: classes of the first task (none: half of all)")
    task_sizes: list[int] | None = knob(None, "classes of each task, in order, instead of a protocol")
    class_order_seed: int | None = knob(
        None, "shuffle the classes by numpy's RandomState of this seed (none: natural order)"
    )
    class_order: list[int] | None = knob(None, "the class order itself, as a list of all labels")

    def __post_init__(self) -> None:
        for name in ("num_tasks", "base_classes"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.task_sizes is not None:
            if not self.task_sizes or min(self.task_sizes) < 1:
                raise PassloraError(f"task_sizes: each task needs at least one class, got {self.task_sizes}")
            if self.num_tasks is not None or self.base_classes is not None:
                raise PassloraError("task_sizes says it all: leave out num_tasks and base_classes")
        if self.base_classes is not None and self.protocol != "half-base":
            raise PassloraError("base_classes belongs to --protocol half-base")
        if self.class_order_seed is not None:
            between("class_order_seed", self.class_order_seed, 0, 2**32 - 1)
        if self.class_order is not None and self.class_order_seed is not None:
            raise PassloraError("give either class_order or class_order_seed, not both")


@dataclass
class MethodConfig:
    """PASS++ and its switches; docs/method.md has the equations."""

    preset: Preset = knob(
        "pass++",
        "starting point of the switches below: pass++, pass, or a baseline: finetune, lwf-kd (KD only), lwf, lwf-mc, "
        "and on frozen features ncm, slda, simplecil, fetril (docs/baselines.md)",
    )
    sst: bool = knob(True, "self-supervised transformation: four rotations, 4k classes (Eq. 3)")
    temperature: float = knob(1.0, "divides the logits in training, never at inference")
    proto_aug: Literal["explicit", "implicit", "none"] = knob(
        "explicit", "prototype augmentation: sampled (Eq. 5), its upper bound (Eq. 10), or none"
    )
    proto_aug_weight: float = knob(10.0, "alpha, the weight of the loss on old classes (Eq. 12)")
    prototype_views: Literal[1, 4] = knob(4, "prototypes a class: 1 (0 degrees only) or 4 (one per rotation)")
    prototype_augmented: bool = knob(False, "average over train-augmented images instead of plain ones")
    radius: Literal["first", "running"] = knob("first", "radius from the first task (Eq. 7) or updated (Eq. 6)")
    covariance: Literal["radius", "diag", "full"] = knob("radius", "spread kept: one radius, variances, or matrices")
    gamma: float = knob(1.0, "implicit: scale of the covariance (Eq. 10)")
    hardness: bool = knob(True, "hardness-aware prototypes: mix with the nearest new feature (Eq. 11)")
    hard_mixing: float = knob(0.7, "share of the prototype in a hard feature")
    hard_label: Literal["hard", "soft"] = knob("hard", "label of a hard feature: the old class, or mixed")
    kd_weight: float = knob(10.0, "beta, the weight of the feature distillation (Eq. 12)")
    kd_on: Literal["features", "logits"] = knob(
        "features", "what the teacher is followed in: features, or the old nodes' outputs (LwF, LwF-MC)"
    )
    new_loss: Literal["softmax", "binary"] = knob(
        "softmax", "loss on new data: cross entropy over all nodes, or a binary one on each new node (LwF-MC)"
    )
    classifier: Literal["head", "ncm", "slda", "fetril"] = knob(
        "head", "what reads the features: the trained head, or a baseline that is fitted on frozen ones"
    )
    adapt_tasks: Literal["all", "first", "none"] = knob(
        "all", "tasks that the network is trained on; first or none leave frozen features to the classifier"
    )
    kd_reduction: Literal["mean", "batch"] = knob(
        "mean", "distance to the teacher: mean of row norms, or one norm of the whole batch"
    )
    inference: Inference = knob(
        "multiview",
        "multiview (each rotation on its own nodes, Eq. 13), single (0 degrees), vanilla (rotations on the 0-degree "
        "nodes) or nearest_prototype (by Euclidean distance)",
    )
    extra_inference: list[Inference] = knob([], "further inference modes to report in the same pass")

    def __post_init__(self) -> None:
        above("temperature", self.temperature, 0)
        for name in ("proto_aug_weight", "kd_weight", "gamma"):
            at_least(name, getattr(self, name), 0)
        between("hard_mixing", self.hard_mixing, 0, 1)
        if self.proto_aug == "none" and self.hardness:
            raise PassloraError("hardness needs prototypes: set --hardness false, or a --proto_aug")
        if not self.sst:
            for mode in (self.inference, *self.extra_inference):
                if mode in ROTATED_INFERENCE:
                    raise PassloraError(f"inference {mode} needs rotations: set --inference single, or --sst true")
            if self.prototype_views != 1:
                raise PassloraError("prototype_views 4 needs rotations: set --prototype_views 1, or --sst true")
        if (self.classifier == "head") != (self.adapt_tasks == "all"):
            raise PassloraError(
                "a trained head goes with --adapt_tasks all, another --classifier with --adapt_tasks first or none"
            )
        if self.classifier != "head" and (self.sst or self.inference != "single" or self.extra_inference):
            raise PassloraError(
                f"classifier {self.classifier} reads plain features: set --sst false --inference single"
            )

    @property
    def num_views(self) -> int:
        return NUM_ROTATIONS if self.sst else 1

    @property
    def inference_modes(self) -> list[str]:
        """The main mode first, then the requested further ones."""
        return list(dict.fromkeys([self.inference, *self.extra_inference]))


@dataclass
class TrainingConfig:
    """The optimizer, the seeds and the output."""

    output_dir: str = knob("runs/passlora", "folder of the run: results, settings, pictures, an adapter a task")
    overwrite_output_dir: bool = knob(
        False, "start anew where output_dir holds a run (otherwise the same command continues it)"
    )
    num_train_epochs: int = knob(10, "epochs a task")
    per_device_train_batch_size: int = knob(64, "images a process and step (each in its four views)")
    per_device_eval_batch_size: int = knob(128, "images a process and step in evaluation")
    gradient_accumulation_steps: int = knob(1, "steps whose gradients are averaged into one update")
    learning_rate: float = knob(0.005, "Adam's learning rate, for adapter (or backbone) and head")
    weight_decay: float = knob(0.0, "Adam's L2 term")
    lr_scheduler_type: Literal["multistep", "cosine"] = knob("multistep", "multistep, or cosine down to 0")
    lr_milestones: list[int] = knob([6], "multistep: epochs after which the learning rate is multiplied by lr_decay")
    lr_decay: float = knob(0.1, "multistep: the factor")
    mixed_precision: Literal["no", "fp16", "bf16"] | None = knob(
        None, "precision of the forward pass (none: as accelerate is configured)"
    )
    gradient_checkpointing: bool = knob(
        False, "keep no activations inside the backbone's blocks and compute them again: less memory, more time"
    )
    torch_compile_backend: str | None = knob(
        None, "compile the backbone by torch.compile with this backend, such as inductor (none: do not)"
    )
    cache_teacher: bool = knob(
        False,
        "run the teacher once a task instead of once an epoch: needs an augmentation without chance, and keeps "
        "4 bytes for each feature of each view of the task's images",
    )
    save_epochs: int | None = knob(None, "also save inside a task, every so many epochs (none: after each task)")
    save_steps: int | None = knob(None, "also save inside a task, every so many steps")
    keep_tasks: Literal["all", "last"] = knob(
        "all", "weights to keep: of every task, so that each can be restored, or of the last one alone"
    )
    seed: int = knob(0, "seeds everything: weights, batches, augmentation, draws")
    seeds: list[int] | None = knob(None, "run once a seed and report mean and standard deviation")
    class_order_seeds: list[int] | None = knob(None, "run once a class order and report mean and deviation")
    compare: list[Preset] = knob([], "presets to run beside, with the same data, seed and budget (none: no)")
    measure_drift: bool = knob(
        False, "after each task, hold the stored prototypes against their classes' true means (reads the old images)"
    )
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = knob("none", "experiment tracker")
    push_to_hub: bool = knob(False, "upload the model to the Hugging Face Hub after each task: a commit and a tag")
    hub_model_id: str | None = knob(None, "where to: user/name (made if it does not exist)")
    hub_private_repo: bool = knob(False, "make the repository private, if it is made")

    def __post_init__(self) -> None:
        for name in (
            "num_train_epochs",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
        ):
            at_least(name, getattr(self, name), 1)
        for name in ("save_epochs", "save_steps"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        above("learning_rate", self.learning_rate, 0)
        at_least("weight_decay", self.weight_decay, 0)
        above("lr_decay", self.lr_decay, 0)
        for seed in (self.seed, *(self.seeds or []), *(self.class_order_seeds or [])):
            between("seed", seed, 0, 2**32 - 1)
        for name in ("seeds", "class_order_seeds", "compare"):
            given = getattr(self, name)
            if given is not None and len(set(given)) != len(given):
                raise PassloraError(f"{name}: each one once, got {' '.join(map(str, given))}")
        if self.seeds and self.class_order_seeds:
            raise PassloraError("give either seeds or class_order_seeds, not both")
        if self.push_to_hub and self.hub_model_id is None:
            raise PassloraError("push_to_hub: where to? give --hub_model_id user/name")
        if self.hub_model_id is not None and not is_repo_id(self.hub_model_id):
            raise PassloraError(f"hub_model_id must be user/name, got {self.hub_model_id!r}")
        if self.push_to_hub and (self.seeds or self.class_order_seeds):
            raise PassloraError("push_to_hub goes with one run, not several: push the best one with passlora push")


@dataclass
class Config:
    """The whole configuration. `Config.make(**flat_keys)` builds one, `flat()` writes it back."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    scenario: ScenarioConfig = field(default_factory=ScenarioConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    given: dict[str, Any] = field(default_factory=dict, repr=False)  # what was asked for, before defaults and preset

    @classmethod
    def make(cls, **given: Any) -> Config:
        for name in given:
            if name not in FIELDS:
                raise PassloraError(f"unknown key {name!r}{nearest(name, FIELDS)}")
        given = {name: coerce(name, value, FIELDS[name].type) for name, value in given.items()}
        flat = {**PRESETS[given.get("preset", "pass++")], **given}
        groups = {
            group: kind(**{f.name: flat[f.name] for f in dataclasses.fields(kind) if f.name in flat})
            for group, kind in GROUPS.items()
        }
        config = cls(**groups, given=given)
        config.check()
        return config

    def flat(self) -> dict[str, Any]:
        return {name: getattr(getattr(self, knob_.group), name) for name, knob_ in FIELDS.items()}

    def replace(self, **changes: Any) -> Config:
        """The same request with other values."""
        return Config.make(**{**self.given, **changes})

    def as_preset(self, preset: str) -> Config:
        """The same request under another preset."""
        return Config.make(**{**under_preset(self.given, preset), "compare": []})

    def check(self) -> None:
        """Combinations across groups that cannot work."""
        if self.scenario.task_sizes is None and self.scenario.num_tasks is None:
            raise PassloraError("how many tasks? give --num_tasks (with --protocol), or --task_sizes")
        orders = self.scenario.class_order or self.scenario.class_order_seed is not None
        if self.training.class_order_seeds and orders:
            raise PassloraError("class_order_seeds chooses the order: leave out class_order and class_order_seed")
        if self.model.model_name_or_path == "passlora/resnet18" and (self.model.lora_r > 0 or self.model.pretrained):
            raise PassloraError("passlora/resnet18 is trained from scratch: set --lora_r 0 and --pretrained false")
        is_file = self.model.model_name_or_path.endswith((".safetensors", ".pth", ".pt", ".bin"))
        if is_file and self.model.model_architecture is None:
            raise PassloraError(
                f"{self.model.model_name_or_path} is a checkpoint file: say which network it holds with "
                "--model_architecture, such as deit_small_patch16_224"
            )
        if self.model.model_architecture is not None and not is_file:
            raise PassloraError("model_architecture goes with a local checkpoint file as model_name_or_path")
        if self.method.classifier != "head" and self.training.push_to_hub:
            raise PassloraError(f"{self.method.preset} is a baseline: it leaves numbers, no model to push")
        if self.method.preset in self.training.compare:
            raise PassloraError(f"compare: {self.method.preset} is the run itself")


GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "scenario": ScenarioConfig,
    "method": MethodConfig,
    "training": TrainingConfig,
}


@dataclass(frozen=True)
class Knob:
    group: str
    type: Any
    default: Any
    help: str


def _fields() -> dict[str, Knob]:
    knobs = {}
    for group, kind in GROUPS.items():
        hints = typing.get_type_hints(kind)
        for f in dataclasses.fields(kind):
            default = f.default
            if f.default_factory is not dataclasses.MISSING:
                default = f.default_factory()
            knobs[f.name] = Knob(group, hints[f.name], default, f.metadata["help"])
    return knobs


FIELDS: dict[str, Knob] = _fields()


def is_local(dataset_name: str) -> bool:
    """Whether the data lies in a file or folder here, rather than on the Hub or in the package."""
    return dataset_name != "digits" and (dataset_name.startswith((".", "/", "~")) or Path(dataset_name).exists())


def without_data_path(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Settings fit to lie in a model's folder: of local data a fingerprint of its path, which tells that it changed."""
    name = flat["dataset_name"]
    if not is_local(name):
        return dict(flat)
    path = str(Path(name).expanduser().resolve())
    return {**flat, "dataset_name": f"{LOCAL_DATA}{hashlib.sha256(path.encode()).hexdigest()[:12]}"}


# --- reading ---------------------------------------------------------------------------------------------------


def load(path: str | None, overrides: Mapping[str, Any]) -> Config:
    """A recipe with the command line on top; without recipe and dataset, the embedded default run."""
    if path is not None:
        base = read_yaml(path)
        if "preset" in overrides:
            preset = coerce("preset", overrides["preset"], FIELDS["preset"].type)
            base = under_preset(base, preset)
    elif "dataset_name" in overrides:
        base = {}
    else:
        base = dict(DEFAULT_RECIPE)
        if "num_tasks" in overrides or "base_classes" in overrides:
            base.pop("task_sizes")  # the command line chose another split
        if overrides.get("preset") in base["compare"]:
            base.pop("compare")  # no run beside itself
    return Config.make(**{**base, **overrides})


def under_preset(given: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """A request moved to another preset: what either preset decides goes, what the user chose beside them stays.

    A resolved configuration names every switch; those with the old preset's own value were not a choice.
    """
    old = PRESETS.get(str(given.get("preset", "pass++")), {})
    new = PRESETS[preset]
    kept = {k: v for k, v in given.items() if k not in new and not (k in old and old[k] == v)}
    if "classifier" in new:
        kept.pop("extra_inference", None)
    elif "extra_inference" in kept and not new.get("sst", True):
        extra = coerce("extra_inference", kept["extra_inference"], FIELDS["extra_inference"].type)
        kept["extra_inference"] = [mode for mode in extra if mode not in ROTATED_INFERENCE]
    return {**kept, "preset": preset}


def read_yaml(path: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PassloraError(f"no recipe at {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PassloraError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise PassloraError(f"{path} must hold 'key: value' lines, such as 'dataset_name: digits'")
    return content
