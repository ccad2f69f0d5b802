"""Rivals of the preset passlora, as data: the methods of the comparison, and the settings they are compared in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from passlora.analysis.paper import DATASETS, DEIT, MINI, RESNET, Row, Settings

ORDERS = (0, 1, 2, 3, 4)
OURS = "passlora"
TUNED = "PASS++, tuned"  # the best of six settings on held-out training images: docs/results.md


def frozen(preset: str, **settings: Any) -> Settings:
    return {"preset": preset, "adapt_tasks": "none", **settings}


def moving_slda(kd_weight: float, drift: str | None) -> Settings:
    """Discriminant analysis on a network that every task trains; its sums moved after each, or not."""
    kind = {None: "none", "linear map": "linear", "SDC": "sdc"}[drift]
    return {"preset": "slda", "adapt_tasks": "all", "kd_weight": kd_weight, "drift": kind}


# On features as they are, the network never trained.
FROZEN = (
    Row("nearest mean", frozen("ncm")),
    Row("SLDA", frozen("slda")),
    Row("FeCAM", frozen("fecam")),
    Row("low-rank RGDA", frozen("rgda")),
    Row("ACIL (ridge on a ReLU lift)", frozen("acil")),
    Row("KLDA", frozen("klda")),
    Row("LayUP, frozen", frozen("layup")),
    Row("AnaCP, frozen", frozen("anacp")),
    Row("passlora, never adapted", frozen(OURS)),
)
# The network is trained on the first task, or on every task.
TRAINED = (
    Row("fine-tuning", {"preset": "finetune"}),
    Row("PASS++", {"preset": "pass++"}),
    Row(TUNED, {"preset": "pass++", "prototype_draws": 4, "proto_aug_weight": 1.0}),
    Row("SLCA++", {"preset": "slca++"}),
    Row("SSIAT", {"preset": "ssiat"}),
    Row("SLDC", {"preset": "sldc"}),
    Row("SimpleCIL, first task adapted", {"preset": "simplecil"}),
    Row("SLDA, first task adapted", {"preset": "slda", "adapt_tasks": "first"}),
    Row("RanPAC", {"preset": "ranpac"}),
    Row("AnaCP", {"preset": "anacp"}),
    Row("SLDA, every task, drift map", {"preset": "slda", "adapt_tasks": "all", "drift": "linear"}),
    Row("passlora", {"preset": OURS}),
)
# The preset without one of its parts.
PARTS = (
    Row("passlora, one view", {"preset": OURS, "classifier_views": 1}),
    Row("passlora, no lift", {"preset": OURS, "lift": "none"}),
    Row("passlora, lambda by OAS", {"preset": OURS, "shrinkage": "oas"}),
    Row("passlora, adapted without rotations", {"preset": OURS, "sst": False}),
)
# A network whose features move a lot, since it is trained whole, and held to what it was weakly or not at all.
MOVING = (
    Row("PASS++, its head", {"preset": "pass++", "kd_reduction": "batch"}),
    Row("KD, its head", {"preset": "lwf-kd", "kd_reduction": "batch"}),
    Row("SLDA, first task trained", {"preset": "slda", "adapt_tasks": "first"}),
    *(
        Row(f"SLDA, {told}, {drift or 'stale sums'}", moving_slda(weight, drift))
        for told, weight in (("no KD", 0.0), ("weak KD", 1.0))
        for drift in (None, "linear map", "SDC")
    ),
)
BOUNDS = (Row("joint linear probe", {"preset": "joint-probe"}), Row("joint LoRA", {"preset": "joint"}))
ROWS = {row.name: row for row in (*FROZEN, *TRAINED, *PARTS, *MOVING, *BOUNDS)}
SOME = ("nearest mean", "SLDA", "ACIL (ridge on a ReLU lift)", "KLDA", "passlora, never adapted")


@dataclass(frozen=True)
class Column:
    about: str
    settings: Settings
    rows: tuple[str, ...]
    orders: tuple[int, ...] = ORDERS
    reference: str = OURS  # the row that the others are held against


ALL_FROZEN = tuple(row.name for row in FROZEN)
EVERY = tuple(row.name for row in (*FROZEN, *TRAINED, *PARTS, *BOUNDS))
# Where the network stays as it is, how it would be adapted makes no difference.
FEW = (*ALL_FROZEN, TUNED, OURS, *(row.name for row in PARTS[:-1]))
CIFAR_MINI = {**MINI, "max_classes": 100, "max_test_per_class": None, "num_tasks": 10, "measure_drift": False}
GRAY = {**MINI, "max_classes": 10, "max_test_per_class": None, "num_tasks": 5, "measure_drift": False}
GRAY |= {"crop_padding": 0, "horizontal_flip": False}
UNADAPTED, NEVER = "passlora, never adapted", "the network is never adapted"


def cifar(
    images: int,
    rows: tuple[str, ...],
    about: str,
    orders: tuple[int, ...] = ORDERS,
    reference: str = OURS,
    **changes: Any,
) -> Column:
    text = f"CIFAR-100 on passlora/vit-mini, {images} images a class, {about}"
    return Column(text, {**CIFAR_MINI, "max_train_per_class": images, **changes}, rows, orders, reference)


HALF: Settings = {"max_classes": 50, "num_tasks": 5}
MINI_COLUMNS: dict[str, Column] = {
    "20-images": cifar(20, (*FEW, *(row.name for row in BOUNDS)), "ten tasks"),
    "50-images": cifar(50, EVERY, "ten tasks"),
    "200-images": cifar(200, FEW, "50 classes in five tasks", **HALF),
    # Every image there is: an order changes neither the images nor, for sums, what is learnt in the end.
    "500-images": cifar(500, ALL_FROZEN, f"ten tasks; {NEVER}", (0, 1), UNADAPTED),
    "20-tasks": cifar(50, ALL_FROZEN, f"20 tasks; {NEVER}", (0, 1), UNADAPTED, num_tasks=20),
    "100-tasks": cifar(50, SOME, f"100 tasks of one class; {NEVER}", (0,), UNADAPTED, num_tasks=100),
    "digits": Column(
        "scikit-learn's digits on passlora/vit-mini, five tasks",
        {**GRAY, "dataset_name": "digits", "max_train_per_class": None},
        (*ALL_FROZEN, TUNED, OURS),
    ),
    "fashion": Column(
        "Fashion-MNIST on passlora/vit-mini, 200 images a class, five tasks",
        {
            **GRAY,
            "dataset_name": "zalando-datasets/fashion_mnist",
            "max_train_per_class": 200,
            "max_test_per_class": 200,
        },
        (*ALL_FROZEN, TUNED, OURS),
    ),
    "vit-s": Column(
        "20 classes of CIFAR-100, 50 images a class, four tasks, on a ViT-S at 112 px "
        "(--model_name_or_path FILE --model_architecture NAME)",
        {
            **MINI,
            "model_name_or_path": "vit_small_patch14_reg4_dinov2.lvd142m",
            "image_size": 112,
            "max_classes": 20,
            "max_test_per_class": 40,
            "num_tasks": 4,
            "learning_rate": 0.002,
            "measure_drift": False,
        },
        EVERY,
        (0, 1, 2),
    ),
}
MINI_COLUMNS["resnet18"] = Column(
    "10 classes of CIFAR-100 in 4 + 2 + 2 + 2, 100 images a class, ResNet-18 from scratch, six epochs a task",
    {
        **RESNET,
        **DATASETS["CIFAR-100"],
        "max_classes": 10,
        "max_train_per_class": 100,
        "task_sizes": [4, 2, 2, 2],
        "num_train_epochs": 6,
        "lr_milestones": [4],
        "per_device_train_batch_size": 32,
    },
    tuple(row.name for row in MOVING),
    (0, 1, 2),
    "SLDA, first task trained",
)
FULL_COLUMNS: dict[str, Column] = {
    f"{name}-t{tasks}": Column(
        f"{dataset} on DeiT-S/16, {tasks} tasks",
        {**DEIT, "dataset_name": dataset, "num_tasks": tasks, **split},
        EVERY,
    )
    for name, dataset, split in (
        ("cifar100", "uoft-cs/cifar100", {}),
        ("tinyimagenet", "zh-plus/tiny-imagenet", {"dataset_test_split": "valid"}),
    )
    for tasks in (10, 20)
}
COLUMNS = {"mini": MINI_COLUMNS, "full": FULL_COLUMNS}
