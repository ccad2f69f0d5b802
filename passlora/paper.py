"""What the paper runs and reports, as data: protocols, rows of switches, and published figures (percent).

Figures are those of F. Zhu et al., PASS++, by table; where the paper only draws a curve there is nothing to quote.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Settings = dict[str, Any]
Figures = dict[str, dict[str, float]]  # column -> metric -> value


@dataclass(frozen=True)
class Row:
    """A method: its switches, or an inference mode of another row's run."""

    name: str
    settings: Settings = field(default_factory=dict)
    paper: Figures = field(default_factory=dict)
    mode: str | None = None  # read this inference mode of ...
    source: str = ""  # ... the row of this name

    @property
    def folder(self) -> str:
        return "".join(c if c.isalnum() or c in "+-." else "_" for c in self.name)


@dataclass(frozen=True)
class Experiment:
    title: str
    about: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    metrics: tuple[str, ...] = ("last", "avg")
    plot: Literal["bars", "curves"] = "bars"

    @property
    def mini_column(self) -> str:
        """The protocol of the paper that the small one stands for."""
        return next((column for column in self.columns if column.endswith("T=10")), self.columns[0])


# --- protocols ---------------------------------------------------------------------------------------------------

MINI: Settings = {
    "model_name_or_path": "passlora/vit-mini",
    "dataset_name": "uoft-cs/cifar100",
    "max_train_per_class": 50,
    "max_test_per_class": 50,
    "num_tasks": 10,
    "num_train_epochs": 5,
    "lr_milestones": [3],
    "per_device_train_batch_size": 8,
    "learning_rate": 0.005,
}
DEIT: Settings = {
    "model_name_or_path": "deit_small_patch16_224.fb_in1k",
    "num_train_epochs": 10,
    "lr_milestones": [6],
    "per_device_train_batch_size": 64,
    "learning_rate": 0.005,
}
RESNET: Settings = {
    "model_name_or_path": "passlora/resnet18",
    "pretrained": False,
    "lora_r": 0,
    "class_order_seed": 1993,
    "kd_reduction": "batch",
    "num_train_epochs": 100,
    "lr_milestones": [45, 90],
    "per_device_train_batch_size": 64,
    "learning_rate": 0.001,
    "weight_decay": 0.0002,
}
DATASETS: dict[str, Settings] = {
    "CIFAR-100": {"dataset_name": "uoft-cs/cifar100", "image_size": 32, "temperature": 0.1},
    "TinyImageNet": {"dataset_name": "zh-plus/tiny-imagenet", "image_size": 64, "temperature": 0.1},
    "ImageNet-Subset": {"dataset_name": "clane9/imagenet-100", "image_size": 224},
    "ImageNet-Full": {"dataset_name": "ILSVRC/imagenet-1k", "image_size": 224},
}


def scratch(dataset: str, tasks: int) -> Settings:
    """ResNet-18: half of the classes first; T = 20 on 100 classes starts with 40."""
    base = {"base_classes": 40} if tasks == 20 and dataset in ("CIFAR-100", "ImageNet-Subset") else {}
    return {**RESNET, **DATASETS[dataset], "protocol": "half-base", "num_tasks": tasks, **base}


COLUMNS: dict[str, Settings] = {
    **{
        f"{dataset} T={tasks}": scratch(dataset, tasks)
        for dataset in ("CIFAR-100", "TinyImageNet", "ImageNet-Subset")
        for tasks in (5, 10, 20, 25)
    },
    **{f"ImageNet-Full T={tasks}": scratch("ImageNet-Full", tasks) for tasks in (10, 25)},
    **{
        f"{dataset} equal T=5": {**RESNET, **DATASETS[dataset], "protocol": "equal", "num_tasks": 5}
        for dataset in ("CIFAR-100", "TinyImageNet", "ImageNet-Subset")
    },
    "DeiT CIFAR-100 T=10": {**DEIT, "dataset_name": "uoft-cs/cifar100", "num_tasks": 10},
    "DeiT TinyImageNet T=5": {**DEIT, "dataset_name": "zh-plus/tiny-imagenet", "num_tasks": 5},
    "DeiT TinyImageNet T=10": {**DEIT, "dataset_name": "zh-plus/tiny-imagenet", "num_tasks": 10},
}


def published(columns: tuple[str, ...], metrics: tuple[str, ...], *values: float) -> Figures:
    """A row of one of the paper's tables: all metrics of the first column, then of the next."""
    pairs = iter(values)
    return {column: {metric: next(pairs) for metric in metrics} for column in columns}


# --- tables ------------------------------------------------------------------------------------------------------

TABLE_2 = tuple(f"{d} T={t}" for d in ("CIFAR-100", "TinyImageNet", "ImageNet-Subset") for t in (5, 10, 20))
TABLE_3 = tuple(f"{d} T={t}" for d in ("CIFAR-100", "ImageNet-Subset") for t in (5, 10, 25))
TABLE_4 = tuple(f"{d} T={t}" for d in ("CIFAR-100", "TinyImageNet") for t in (5, 10, 25))
TABLE_5 = ("ImageNet-Full T=10", "ImageNet-Full T=25")
TABLE_6 = ("DeiT CIFAR-100 T=10", "DeiT TinyImageNet T=5", "DeiT TinyImageNet T=10")
TABLE_7 = tuple(f"{d} T={t}" for d in ("CIFAR-100", "TinyImageNet") for t in (5, 10, 20))
TABLE_8 = tuple(f"{d} equal T=5" for d in ("CIFAR-100", "TinyImageNet", "ImageNet-Subset"))
CIFAR = ("CIFAR-100 T=10",)
AVG_LAST, LAST_AVG = ("avg", "last"), ("last", "avg")


def ablation(name: str, settings: Settings, last: tuple[float, ...], forgetting: tuple[float, ...] | None) -> Row:
    figures = {column: {"last": value} for column, value in zip(TABLE_7, last, strict=True)}
    for column, value in zip(TABLE_7, forgetting or (), strict=False):
        figures[column]["forgetting"] = value
    return Row(name, settings, figures)


EXPERIMENTS: dict[str, Experiment] = {
    "table-2": Experiment(
        "Table 2: ResNet-18 from scratch",
        "Half of the classes first, then T equal tasks.",
        TABLE_2,
        (
            Row(
                "LwF-MC",
                {"preset": "lwf-mc"},
                published(
                    TABLE_2,
                    AVG_LAST,
                    33.38,
                    17.39,
                    26.01,
                    12.15,
                    19.70,
                    9.40,
                    34.91,
                    18.86,
                    21.38,
                    10.31,
                    13.68,
                    5.72,
                    51.41,
                    32.98,
                    35.79,
                    18.46,
                    19.61,
                    9.14,
                ),
            ),
            Row(
                "PASS",
                {"preset": "pass"},
                published(
                    TABLE_2,
                    AVG_LAST,
                    63.84,
                    55.67,
                    59.87,
                    49.03,
                    58.06,
                    48.48,
                    49.53,
                    41.58,
                    47.15,
                    39.28,
                    41.99,
                    32.78,
                    69.12,
                    56.02,
                    63.02,
                    47.68,
                    51.40,
                    30.30,
                ),
            ),
            Row(
                "PASS++",
                {},
                published(
                    TABLE_2,
                    AVG_LAST,
                    69.12,
                    59.87,
                    66.50,
                    57.69,
                    64.32,
                    53.43,
                    54.13,
                    46.93,
                    53.14,
                    46.66,
                    49.70,
                    40.53,
                    73.87,
                    63.66,
                    71.86,
                    60.90,
                    65.79,
                    49.38,
                ),
            ),
        ),
    ),
    "table-3": Experiment(
        "Table 3: average accuracy, against methods with exemplars",
        "passlora's row; the paper's others keep 20 images a class.",
        TABLE_3,
        (Row("PASS++", {}, published(TABLE_3, ("avg",), 69.12, 66.50, 60.63, 73.83, 71.86, 64.13)),),
        ("avg",),
    ),
    "table-4": Experiment(
        "Table 4: against methods that generate old images",
        "passlora's row.",
        TABLE_4,
        (
            Row(
                "PASS++",
                {},
                published(
                    TABLE_4,
                    AVG_LAST,
                    69.12,
                    59.87,
                    66.50,
                    57.69,
                    60.63,
                    48.70,
                    54.13,
                    46.93,
                    53.14,
                    46.66,
                    47.81,
                    37.86,
                ),
            ),
        ),
    ),
    "table-5": Experiment(
        "Table 5: ImageNet with 1,000 classes",
        "passlora's row.",
        TABLE_5,
        (Row("PASS++", {}, published(TABLE_5, AVG_LAST, 64.13, 56.37, 60.96, 49.64)),),
    ),
    "table-6": Experiment(
        "Table 6: pretrained DeiT-S/16 with LoRA",
        "Equal tasks. The paper's backbone has seen 611 ImageNet classes; give it with --model_name_or_path FILE "
        "--model_architecture deit_small_patch16_224. ADAM is the paper's name for what `simplecil` does.",
        TABLE_6,
        (
            Row("finetune", {"preset": "finetune"}),
            Row("KD only", {"preset": "lwf-kd"}),
            Row("LwF", {"preset": "lwf"}),
            Row("LwF-MC", {"preset": "lwf-mc"}),
            Row("NCM, frozen", {"preset": "ncm"}),
            Row(
                "SimpleCIL",
                {"preset": "simplecil"},
                published(TABLE_6, LAST_AVG, 61.21, 72.55, 50.11, 61.85, 49.68, 61.44),
            ),
            Row("FeTrIL", {"preset": "fetril"}),
            Row("SLDA", {"preset": "slda"}, published(TABLE_6, LAST_AVG, 67.82, 77.72, 57.93, 66.03, 57.93, 67.39)),
            Row("PASS", {"preset": "pass"}, published(TABLE_6, LAST_AVG, 68.90, 77.01, 61.03, 67.12, 58.34, 67.33)),
            Row("PASS++", {}, published(TABLE_6, LAST_AVG, 72.12, 82.14, 66.72, 75.61, 64.44, 74.84)),
            Row(
                "joint",
                {"preset": "finetune", "num_tasks": 1},
                published(TABLE_6, LAST_AVG, 82.76, 87.20, 72.52, 77.03, 72.52, 77.03),
            ),
        ),
    ),
    "table-7": Experiment(
        "Table 7: what each part adds",
        "Each row adds one part to the row above.",
        TABLE_7,
        (
            ablation("KD only", {"preset": "lwf-kd"}, (17.15, 8.46, 8.57, 9.71, 6.53, 6.60), None),
            ablation(
                "+ protoAug",
                {"preset": "lwf-kd", "proto_aug": "explicit"},
                (50.19, 39.80, 38.61, 33.11, 26.52, 20.97),
                (28.72, 35.70, 40.59, 20.96, 35.33, 43.91),
            ),
            ablation(
                "+ SST",
                {"preset": "pass", "prototype_views": 4},
                (55.67, 49.03, 48.48, 41.58, 39.28, 32.78),
                (25.20, 30.25, 30.61, 18.04, 23.12, 30.55),
            ),
            Row(
                "+ hardness",
                {},
                {
                    column: {"last": last, "forgetting": forgetting}
                    for column, last, forgetting in zip(
                        TABLE_7,
                        (56.61, 55.26, 51.30, 42.40, 43.20, 37.68),
                        (22.98, 21.94, 23.54, 19.76, 18.62, 11.89),
                        strict=True,
                    )
                },
                mode="single",
                source="+ ensemble",
            ),
            ablation(
                "+ ensemble",
                {"extra_inference": ["single"]},
                (59.87, 57.69, 53.43, 46.93, 46.66, 40.53),
                (23.98, 23.00, 25.42, 21.24, 21.02, 16.61),
            ),
        ),
        ("last", "forgetting"),
    ),
    "table-8": Experiment(
        "Table 8: classes divided equally over five tasks",
        "ResNet-18 from scratch.",
        TABLE_8,
        (Row("PASS++", {}, published(TABLE_8, LAST_AVG, 52.21, 65.15, 37.19, 49.32, 48.75, 63.95)),),
    ),
    "table-a2": Experiment(
        "Multi-view ensemble against vanilla ensemble",
        "One run, read in three ways: the upright view, every rotation on the upright nodes (vanilla), and every "
        "rotation on its own nodes.",
        CIFAR,
        (
            Row("one view", {}, {CIFAR[0]: {"last": 55.26}}, mode="single", source="multi-view ensemble"),
            Row("vanilla ensemble", {}, {CIFAR[0]: {"last": 44.69}}, mode="vanilla", source="multi-view ensemble"),
            Row("multi-view ensemble", {"extra_inference": ["single", "vanilla"]}, {CIFAR[0]: {"last": 57.69}}),
        ),
        plot="curves",
    ),
    "fig-8-alpha": Experiment(
        "Figure 8: weight of prototype augmentation",
        "alpha, with beta = 10.",
        CIFAR,
        tuple(Row(f"alpha = {a:g}", {"proto_aug_weight": a}) for a in (0.1, 1.0, 5.0, 10.0, 15.0, 20.0)),
        ("last", "forgetting"),
    ),
    "fig-8-beta": Experiment(
        "Figure 8: weight of distillation",
        "beta, with alpha = 10.",
        CIFAR,
        tuple(Row(f"beta = {b:g}", {"kd_weight": b}) for b in (0.1, 1.0, 5.0, 10.0, 15.0, 20.0)),
        ("last", "forgetting"),
    ),
    "fig-9": Experiment(
        "Figure 9: explicit against implicit augmentation",
        "Sampled features against the upper bound of infinitely many (Eq. 10).",
        CIFAR,
        (Row("explicit", {}), Row("implicit", {"proto_aug": "implicit"})),
        ("last", "avg", "forgetting"),
        plot="curves",
    ),
    "fig-100": Experiment(
        "Scale of the covariance in implicit augmentation",
        "gamma of Eq. 10.",
        CIFAR,
        tuple(Row(f"gamma = {g:g}", {"proto_aug": "implicit", "gamma": g}) for g in (0.1, 0.5, 1.0, 2.0, 5.0)),
        ("last", "forgetting"),
    ),
    "fig-10": Experiment(
        "Figure 10: hard against soft labels of hard features",
        "The label of a prototype mixed with a new feature: the old class, or both.",
        CIFAR,
        (Row("hard label", {}), Row("soft label", {"hard_label": "soft"})),
        ("last", "avg", "forgetting"),
        plot="curves",
    ),
    "fig-12": Experiment(
        "Figure 12: against nearest means on a frozen extractor",
        "NCM on features of the pretrained network, and of one adapted to the first task.",
        CIFAR,
        (
            Row("NCM, frozen", {"preset": "ncm"}),
            Row("NCM, first task", {"preset": "simplecil"}),
            Row("PASS++", {}),
        ),
        plot="curves",
    ),
    "fig-13": Experiment(
        "Figure 13: form of the covariance in implicit augmentation",
        "One radius, variances a class, or a full matrix a class.",
        CIFAR,
        tuple(Row(form, {"proto_aug": "implicit", "covariance": form}) for form in ("radius", "diag", "full")),
        ("last", "avg", "forgetting"),
        plot="curves",
    ),
}
