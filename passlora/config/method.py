"""Knobs of the method, and which of them go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict

from passlora.config.presets import DEFAULT_PRESET, Preset
from passlora.config.registry import Classifier
from passlora.config.values import above, at_least, between, knob
from passlora.errors import PassloraError

Inference = Literal["multiview", "single", "vanilla", "nearest_prototype"]
ROTATED_INFERENCE = ("multiview", "vanilla")
NUM_ROTATIONS = 4
# Classifiers of passlora's own whose knowledge cannot be moved when the network has changed.
STAYING = ("ridge", "fecam", "fetril", "anacp", "rgda", "probe")


@dataclass
class MethodConfig:
    """PASS++ and its switches; docs/method.md has the equations."""

    preset: Preset = knob(
        DEFAULT_PRESET,
        "starting point of the switches below: pass++, pass, passlora (docs/beyond.md), or a baseline: finetune, "
        "lwf-kd (KD only), lwf, lwf-mc, slca++, ssiat, sldc; on features ncm, slda, simplecil, fetril, fecam, acil, "
        "ranpac, klda, layup, anacp, rgda; all classes at once, as a bound: joint, joint-probe (docs/baselines.md)",
    )
    sst: bool = knob(True, "self-supervised transformation in training: four rotations, 4k classes (Eq. 3)")
    temperature: float = knob(1.0, "divides the logits in training, never at inference")
    proto_aug: Literal["explicit", "implicit", "none"] = knob(
        "explicit", "prototype augmentation: sampled (Eq. 5), its upper bound (Eq. 10), or none"
    )
    proto_aug_weight: float = knob(10.0, "alpha, the weight of the loss on old classes (Eq. 12)")
    prototype_draws: int = knob(1, "old nodes drawn a step, times the images of a batch")
    prototype_views: Literal[1, 4] = knob(4, "prototypes a class: 1 (0 degrees only) or 4 (one per rotation)")
    prototype_augmented: bool = knob(False, "average over train-augmented images instead of plain ones")
    radius: Literal["first", "running"] = knob("first", "radius from the first task (Eq. 7) or updated (Eq. 6)")
    covariance: Literal["radius", "diag", "full"] = knob("radius", "spread kept: one radius, variances, or matrices")
    gamma: float = knob(1.0, "implicit: scale of the covariance (Eq. 10)")
    hardness: bool = knob(True, "hardness-aware prototypes: mix with the nearest new feature (Eq. 11)")
    hard_mixing: float = knob(0.7, "share of the prototype in a hard feature")
    hard_label: Literal["hard", "soft"] = knob("hard", "label of a hard feature: the old class, or mixed")
    kd_weight: float = knob(10.0, "beta, the weight of the distillation (Eq. 12); 0: none")
    kd_on: Literal["features", "logits"] = knob(
        "features", "what the teacher is followed in: features, or the old nodes' outputs (LwF, LwF-MC)"
    )
    new_loss: Literal["softmax", "new_classes", "binary"] = knob(
        "softmax",
        "loss on new data: cross entropy over all nodes, over the nodes of the task's own classes alone (SLCA++), or a "
        "binary one on each new node (LwF-MC)",
    )
    drift: Literal["none", "linear", "sdc"] = knob(
        "none",
        "after a task that trained the network, move what is kept of old classes as the new images' features moved: by "
        "a linear map (SLDC), or by the features around each mean (semantic drift compensation)",
    )
    alignment: bool = knob(
        False, "after each task, train the head on Gaussian samples of all classes (classifier alignment, SLCA)"
    )
    classifier: Classifier = knob(
        "head", "what reads the features: the trained head, or one that is fitted on features as they are"
    )
    ncm_metric: Literal["cosine", "euclidean"] = knob("cosine", "distance of the classifier ncm (nearest class mean)")
    classifier_views: Literal[1, 4] = knob(
        1, "rotations of an image whose features a fitted classifier reads, side by side: 1 (the image as it is) or 4"
    )
    lift: Literal["none", "relu", "fourier"] = knob(
        "none",
        "random features in front of the classifiers slda and ridge: none, relu (RanPAC), fourier (a Gaussian kernel)",
    )
    lift_width: int = knob(2000, "how many random features")
    shrinkage: Literal["oas", "error"] = knob(
        "oas",
        "classifier slda, how much the covariance is regularised: oas (oracle approximating shrinkage), or error (the "
        "smallest expected error, computed from the same sums), which also fits a temperature",
    )
    exact_forgetting: bool = knob(
        False,
        "classifiers slda and ridge: keep the products of each class's features apart, so that a class can be "
        "forgotten without a trace in them; as much for every class as for all of them together otherwise",
    )
    adapt_tasks: Literal["all", "first", "none", "auto"] = knob(
        "all",
        "tasks that the network is trained on; first or none leave frozen features to the classifier, auto is one of "
        "these two, decided by classes of the first task that are held out",
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
        between("lift_width", self.lift_width, 1, 20_000)
        between("prototype_draws", self.prototype_draws, 1, 1000)

    def check(self) -> None:
        """Refuse switches that contradict each other."""
        for is_so, sentence in CONTRADICTIONS:
            if is_so(self):
                raise PassloraError(sentence.format(self))

    def idle(self) -> dict[str, str]:
        """The switches that have no effect beside the others, each with what it needs."""
        return {name: needs for names, works, needs in NEEDS if not works(self) for name in names}

    @property
    def num_views(self) -> int:
        return NUM_ROTATIONS if self.sst else 1

    @property
    def inference_modes(self) -> list[str]:
        """The main mode first, then the requested further ones."""
        return list(dict.fromkeys([self.inference, *self.extra_inference]))

    @property
    def rotated_modes(self) -> list[str]:
        return [mode for mode in self.inference_modes if mode in ROTATED_INFERENCE]

    @property
    def maps_features(self) -> bool:
        """Whether the classifier reads what a map makes of the features (passlora.method.feature_map)."""
        return self.classifier not in ("head", "ncm", "fecam", "fetril", "rgda", "probe", "anacp")

    @property
    def uses_prototypes(self) -> bool:
        """Whether old classes are rehearsed from their prototypes."""
        return self.adapt_tasks == "all" and self.proto_aug != "none"

    @property
    def keeps_classes(self) -> bool:
        """Whether a trained head learns from what is kept of old classes."""
        return self.uses_prototypes or (self.alignment and self.classifier == "head")

    @property
    def uses_teacher(self) -> bool:
        """Whether the network is held to what it was before the task."""
        return self.adapt_tasks == "all" and self.kd_weight > 0


# Switches that cannot be together: when it is so, and the sentence, in which {0} is the MethodConfig.
CONTRADICTIONS: list[tuple[Callable[[MethodConfig], bool], str]] = [
    (
        lambda m: m.hardness and m.proto_aug == "none",
        "hardness needs prototypes: set --hardness false, or a --proto_aug",
    ),
    (
        lambda m: not m.sst and bool(m.rotated_modes),
        "inference {0.rotated_modes[0]} needs rotations: set --inference single, or --sst true",
    ),
    (
        lambda m: not m.sst and m.prototype_views != 1,
        "prototype_views 4 needs rotations: set --prototype_views 1, or --sst true",
    ),
    (
        lambda m: m.exact_forgetting and m.drift != "none",
        "exact_forgetting keeps sums that cannot be moved: set --drift none",
    ),
    (
        lambda m: m.classifier == "head" and m.adapt_tasks != "all",
        "a trained head goes with --adapt_tasks all",
    ),
    (
        lambda m: m.adapt_tasks == "all" and (m.classifier in STAYING or (m.maps_features and m.lift != "none")),
        "what the classifier {0.classifier} keeps cannot follow a network that every task trains: set --adapt_tasks "
        "first, none or auto",
    ),
    (
        lambda m: m.classifier != "head" and m.uses_prototypes,
        "the classifier {0.classifier} is fitted, and rehearses no prototypes: start from its --preset, or set "
        "--proto_aug none",
    ),
    (
        lambda m: m.alignment and m.sst and m.prototype_views == 1 and bool(m.rotated_modes),
        "alignment needs samples of every rotation: set --prototype_views 4, or --sst false",
    ),
    (
        lambda m: m.classifier != "head" and m.uses_teacher and m.kd_on == "logits",
        "kd_on logits distils a trained head: set --kd_on features, or --classifier head",
    ),
    (
        lambda m: m.classifier != "head" and m.inference_modes != ["single"],
        "classifier {0.classifier} has one way to answer: set --inference single",
    ),
    (
        lambda m: m.new_loss == "binary" and m.proto_aug != "none",
        "new_loss binary has no form for prototypes of old classes: set --proto_aug none --hardness false",
    ),
    (
        lambda m: m.new_loss == "binary" and m.uses_teacher and m.kd_on == "features",
        "new_loss binary goes with distilled outputs: set --kd_on logits, or --kd_weight 0",
    ),
]

# Switches that need others to have an effect: which, whether that is so (or the switch is off), and what they need.
NEEDS: list[tuple[tuple[str, ...], Callable[[MethodConfig], bool], str]] = [
    (("sst",), lambda m: m.adapt_tasks != "none" or not m.sst, "--adapt_tasks all, first or auto"),
    (("new_loss",), lambda m: m.adapt_tasks != "none", "--adapt_tasks all, first or auto"),
    (
        ("new_loss",),
        lambda m: m.classifier == "head" or m.new_loss != "new_classes",
        "--classifier head: any other is adapted by a head of the task's own classes",
    ),
    (
        ("temperature",),
        lambda m: m.adapt_tasks != "none" and m.new_loss != "binary",
        "--adapt_tasks all, first or auto, and --new_loss softmax or new_classes",
    ),
    (
        ("exact_forgetting",),
        lambda m: not m.exact_forgetting or m.classifier in ("slda", "ridge"),
        "--classifier slda or ridge",
    ),
    (
        ("drift",),
        lambda m: m.drift == "none" or (m.adapt_tasks == "all" and (m.classifier != "head" or m.keeps_classes)),
        "--adapt_tasks all and, with a trained head, --alignment true or a --proto_aug",
    ),
    (("alignment",), lambda m: m.classifier == "head" or not m.alignment, "--classifier head"),
    (("proto_aug",), lambda m: m.adapt_tasks == "all" or m.proto_aug == "none", "--adapt_tasks all"),
    (("kd_weight",), lambda m: m.adapt_tasks == "all" or m.kd_weight == 0, "--adapt_tasks all"),
    (
        ("proto_aug_weight", "prototype_draws"),
        lambda m: m.uses_prototypes,
        "--proto_aug explicit or implicit",
    ),
    (
        ("radius", "covariance"),
        lambda m: m.keeps_classes,
        "--proto_aug explicit or implicit, or --alignment true",
    ),
    (
        ("hardness",),
        lambda m: m.uses_prototypes or not m.hardness,
        "--proto_aug explicit or implicit",
    ),
    (
        ("prototype_views",),
        lambda m: m.keeps_classes or m.prototype_views == 1,
        "--proto_aug explicit or implicit, or --alignment true",
    ),
    (("gamma",), lambda m: m.uses_prototypes and m.proto_aug == "implicit", "--proto_aug implicit"),
    (("hard_mixing", "hard_label"), lambda m: m.uses_prototypes and m.hardness, "--hardness true"),
    (("kd_on",), lambda m: m.uses_teacher, "a --kd_weight above 0"),
    (
        ("kd_reduction",),
        lambda m: m.uses_teacher and m.kd_on == "features",
        "--kd_on features and a --kd_weight above 0",
    ),
    (("prototype_augmented",), lambda m: m.classifier == "head", "--classifier head, which keeps prototypes"),
    (("ncm_metric",), lambda m: m.classifier == "ncm", "--classifier ncm"),
    (("shrinkage",), lambda m: m.classifier == "slda", "--classifier slda"),
    (
        ("classifier_views", "lift"),
        lambda m: m.maps_features or (m.classifier_views == 1 and m.lift == "none"),
        "a --classifier that is fitted on sums, such as slda or ridge",
    ),
    (
        ("lift_width",),
        lambda m: m.classifier == "anacp" or (m.maps_features and m.lift != "none"),
        "a --lift, or --classifier anacp",
    ),
]


class MethodSettings(TypedDict, total=False):
    """The knobs above as keyword arguments that an editor can complete."""

    preset: Preset
    sst: bool
    temperature: float
    proto_aug: Literal["explicit", "implicit", "none"]
    proto_aug_weight: float
    prototype_draws: int
    prototype_views: Literal[1, 4]
    prototype_augmented: bool
    radius: Literal["first", "running"]
    covariance: Literal["radius", "diag", "full"]
    gamma: float
    hardness: bool
    hard_mixing: float
    hard_label: Literal["hard", "soft"]
    kd_weight: float
    kd_on: Literal["features", "logits"]
    new_loss: Literal["softmax", "new_classes", "binary"]
    drift: Literal["none", "linear", "sdc"]
    alignment: bool
    classifier: Classifier
    ncm_metric: Literal["cosine", "euclidean"]
    classifier_views: Literal[1, 4]
    lift: Literal["none", "relu", "fourier"]
    lift_width: int
    shrinkage: Literal["oas", "error"]
    exact_forgetting: bool
    adapt_tasks: Literal["all", "first", "none", "auto"]
    kd_reduction: Literal["mean", "batch"]
    inference: Inference
    extra_inference: list[Inference]
