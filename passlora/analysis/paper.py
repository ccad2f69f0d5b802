"""What the paper runs and reports, as data: protocols, rows of switches, and published figures (percent).

Figures are those of F. Zhu et al., PASS++, by table; where the paper only draws a curve there is nothing to quote.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from passlora.data.corruptions import CORRUPTIONS

Settings = dict[str, Any]
Figures = dict[str, dict[str, float]]  # column -> metric -> value


@dataclass(frozen=True)
class Row:
    """A method: its switches, and the inference mode to read of its run (its own if none is named)."""

    name: str
    settings: Settings = field(default_factory=dict)
    paper: Figures = field(default_factory=dict)
    mode: str | None = None
    exemplars: int = 0  # images a class that a method keeps, for a row that only counts them

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
    plot: Literal["bars", "curves", "plane", "corruptions"] = "bars"
    measure: str = "results"  # where a cell's numbers come from: a function of measures.py
    mini: Settings = field(default_factory=dict)  # what `--scale mini` needs beside MINI

    @property
    def mini_column(self) -> str:
        """The protocol of the paper that the small one stands for."""
        return next((column for column in self.columns if column.endswith("T=10")), self.columns[0])


# --- protocols ---------------------------------------------------------------------------------------------------

MINI: Settings = {
    "model_name_or_path": "passlora/vit-mini",
    "dataset_name": "uoft-cs/cifar100",
    "max_classes": 50,
    "max_train_per_class": 50,
    "max_test_per_class": 20,
    "num_tasks": 5,
    "num_train_epochs": 3,
    "lr_milestones": [2],
    "per_device_train_batch_size": 8,
    "learning_rate": 0.005,
    "measure_drift": True,
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
    "CIFAR-10": {"dataset_name": "uoft-cs/cifar10", "image_size": 32, "temperature": 0.1},
    "CIFAR-100": {"dataset_name": "uoft-cs/cifar100", "image_size": 32, "temperature": 0.1},
    "TinyImageNet": {"dataset_name": "zh-plus/tiny-imagenet", "image_size": 64, "temperature": 0.1},
    "ImageNet-Subset": {"dataset_name": "clane9/imagenet-100", "image_size": 224},
    "ImageNet-Full": {"dataset_name": "ILSVRC/imagenet-1k", "image_size": 224, "dataset_test_split": "validation"},
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
    **{
        f"{name} base {base}": {
            **RESNET,
            **DATASETS[name],
            "num_tasks": 1,
            "max_classes": base,
            "class_order_seed": None,
        }
        for name, base in (("CIFAR-10", 4), ("CIFAR-100", 40))
    },
    **{name: {**RESNET, **settings, "num_tasks": 1} for name, settings in DATASETS.items() if name != "CIFAR-10"},
    "MNIST": {
        **RESNET,
        "dataset_name": "ylecun/mnist",
        "image_size": 32,
        "task_sizes": [4, 2, 2, 2],
        "feature_dim": 2,
        "class_order_seed": None,
        "horizontal_flip": False,
        "brightness": 0.0,
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
ZERO_COST = ("CIFAR-100 base 40", "CIFAR-10 base 4")
FIVE = ("old_all", "old_old", "new_all", "new_new", "all")
MEMORY = ("CIFAR-100", "TinyImageNet", "ImageNet-Subset", "ImageNet-Full")
TIMES = tuple(f"{d} T=10" for d in ("CIFAR-100", "TinyImageNet", "ImageNet-Subset"))
SECONDS = ("train_seconds", "test_seconds")
JOINT: Settings = {"preset": "finetune", "protocol": "equal", "num_tasks": 1}  # all classes at once: the upper bound
BEFORE_SST: Settings = {"preset": "lwf-kd", "proto_aug": "explicit"}
AVG_LAST, LAST_AVG = ("avg", "last"), ("last", "avg")


def ablation(name: str, settings: Settings, last: tuple[float, ...], forgetting: tuple[float, ...] | None) -> Row:
    figures = {column: {"last": value} for column, value in zip(TABLE_7, last, strict=True)}
    for column, value in zip(TABLE_7, forgetting or (), strict=False):
        figures[column]["forgetting"] = value
    return Row(name, settings, figures)


CURVES = (Row("LwF-MC", {"preset": "lwf-mc"}), Row("PASS", {"preset": "pass"}), Row("PASS++"))

EXPERIMENTS: dict[str, Experiment] = {
    "table-1": Experiment(
        "Table 1: zero-cost class-incremental learning",
        "A network learns the base classes alone, with or without rotations (SST). Then every class, also those it "
        "never trained on, gets its mean feature, and the nearest mean decides: old (base) and new classes among all, "
        "or among their own kind.",
        ZERO_COST,
        (
            Row(
                "without SST",
                {"preset": "finetune"},
                published(ZERO_COST, FIVE, 66.40, 76.60, 31.00, 40.57, 45.16, 86.75, 96.20, 24.86, 36.43, 49.62),
            ),
            Row(
                "with SST",
                {"preset": "pass"},
                published(ZERO_COST, FIVE, 65.64, 80.55, 46.93, 52.11, 54.42, 89.25, 96.85, 38.40, 44.38, 58.74),
            ),
        ),
        FIVE,
        measure="zero_cost",
        mini={"num_tasks": 1, "max_classes": 20},
    ),
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
                JOINT,
                published(TABLE_6, LAST_AVG, 82.76, 87.20, 72.52, 77.03, 72.52, 77.03),
            ),
        ),
    ),
    "table-7": Experiment(
        "Table 7: what each part adds",
        "Each row adds one part to the row above. `+ SST` is PASS, as in the paper's Table 2, with one prototype a "
        "class; the ensemble comes with the prototypes that it reads, one a class and rotation.",
        TABLE_7,
        (
            ablation("KD only", {"preset": "lwf-kd"}, (17.15, 8.46, 8.57, 9.71, 6.53, 6.60), None),
            ablation(
                "+ protoAug",
                BEFORE_SST,
                (50.19, 39.80, 38.61, 33.11, 26.52, 20.97),
                (28.72, 35.70, 40.59, 20.96, 35.33, 43.91),
            ),
            ablation(
                "+ SST",
                {"preset": "pass"},
                (55.67, 49.03, 48.48, 41.58, 39.28, 32.78),
                (25.20, 30.25, 30.61, 18.04, 23.12, 30.55),
            ),
            ablation(
                "+ hardness",
                {"preset": "pass", "hardness": True},
                (56.61, 55.26, 51.30, 42.40, 43.20, 37.68),
                (22.98, 21.94, 23.54, 19.76, 18.62, 11.89),
            ),
            ablation(
                "+ ensemble",
                {},
                (59.87, 57.69, 53.43, 46.93, 46.66, 40.53),
                (23.98, 23.00, 25.42, 21.24, 21.02, 16.61),
            ),
        ),
        ("last", "forgetting", "newest"),
    ),
    "table-8": Experiment(
        "Table 8: classes divided equally over five tasks",
        "ResNet-18 from scratch.",
        TABLE_8,
        (Row("PASS++", {}, published(TABLE_8, LAST_AVG, 52.21, 65.15, 37.19, 49.32, 48.75, 63.95)),),
    ),
    "table-9": Experiment(
        "Table 9: seconds with and without rotations",
        "Training a task for one epoch, its prototypes included (mean over the tasks after the first), and testing all "
        "classes at the end, with one view and with four. The paper's seconds are of its own machine; ratios compare.",
        TIMES,
        (
            Row(
                "without SST",
                {**BEFORE_SST, "num_train_epochs": 1, "lr_milestones": [1]},
                published(TIMES, SECONDS, 21.95, 3.85, 46.80, 8.06, 102.35, 13.15),
            ),
            Row(
                "with SST",
                {"num_train_epochs": 1, "lr_milestones": [1]},
                published(TIMES, SECONDS, 29.28, 6.17, 72.14, 16.02, 156.93, 22.94),
            ),
        ),
        SECONDS,
    ),
    "table-10": Experiment(
        "Table 10: numbers kept of old classes",
        "What the methods store for all classes of a dataset: pixels of exemplars, or prototypes with one radius or "
        "with variances; counted on the objects that a run saves, without running one.",
        MEMORY,
        (
            Row(
                "20 images a class", {}, published(MEMORY, ("entries",), 6.1e6, 49.2e6, 301.1e6, 3010.6e6), exemplars=20
            ),
            Row(
                "10 images a class", {}, published(MEMORY, ("entries",), 3.0e6, 24.6e6, 150.5e6, 1505.3e6), exemplars=10
            ),
            Row(
                "prototypes and variances",
                {"preset": "pass", "covariance": "diag"},
                published(MEMORY, ("entries",), 0.1e6, 0.2e6, 0.1e6, 1.0e6),
            ),
            Row(
                "prototypes and radius",
                {"preset": "pass"},
                published(MEMORY, ("entries",), 50e3, 0.1e6, 50e3, 0.5e6),
            ),
            Row("a prototype a rotation (PASS++)", {}),
        ),
        ("entries",),
        measure="memory",
        mini={"num_tasks": 1},
    ),
    "table-a2": Experiment(
        "Multi-view ensemble against vanilla ensemble",
        "One run, read in three ways: the upright view, every rotation on the upright nodes (vanilla), and every "
        "rotation on its own nodes.",
        CIFAR,
        (
            Row("one view", {}, {CIFAR[0]: {"last": 55.26}}, mode="single"),
            Row("vanilla ensemble", {}, {CIFAR[0]: {"last": 44.69}}, mode="vanilla"),
            Row("multi-view ensemble", {}, {CIFAR[0]: {"last": 57.69}}),
        ),
        plot="curves",
    ),
    "fig-4": Experiment(
        "Figure 4: ten classes on a plane",
        "Features of two dimensions, phase by phase: fine-tuning, LwF, LwF-MC and prototype augmentation, all without "
        "rotations.",
        ("MNIST",),
        (
            Row("finetune", {"preset": "finetune"}),
            Row("LwF", {"preset": "lwf"}),
            Row("LwF-MC", {"preset": "lwf-mc"}),
            Row("protoAug", BEFORE_SST),
        ),
        ("last", "forgetting"),
        plot="plane",
        measure="plane",
        mini={
            "dataset_name": "digits",
            "lora_r": 0,
            "feature_dim": 2,
            "learning_rate": 0.0005,
            "num_tasks": None,
            "task_sizes": [4, 2, 2, 2],
            "max_classes": 10,
            "max_train_per_class": None,
            "max_test_per_class": None,
            "crop_padding": 0,
            "horizontal_flip": False,
            "num_train_epochs": 6,
            "lr_milestones": [4],
        },
    ),
    "fig-5": Experiment(
        "Figure 5: base and novel classes with and without rotations",
        "t-SNE of test features of five base and five novel classes, from the networks of Table 1 (base classes as "
        "dots, novel ones as crosses); the silhouette (-100 to 100) says how well classes are apart before t-SNE.",
        ("CIFAR-100 base 40",),
        (Row("without SST", {"preset": "finetune"}), Row("with SST", {"preset": "pass"})),
        ("silhouette_base", "silhouette_novel"),
        plot="plane",
        measure="tsne",
        mini={"num_tasks": 1, "max_classes": 20},
    ),
    "fig-6": Experiment(
        "Figure 6: accuracy after each task, CIFAR-100",
        "The runs of Table 2.",
        tuple(f"CIFAR-100 T={t}" for t in (5, 10, 20)),
        CURVES,
        plot="curves",
    ),
    "fig-7": Experiment(
        "Figure 7: accuracy after each task, ImageNet-Subset",
        "The runs of Table 2.",
        tuple(f"ImageNet-Subset T={t}" for t in (5, 10, 20)),
        CURVES,
        plot="curves",
    ),
    "fig-8-alpha": Experiment(
        "Figure 8: weight of prototype augmentation",
        "alpha, with beta = 10.",
        CIFAR,
        tuple(Row(f"alpha = {a:g}", {"proto_aug_weight": a}) for a in (0.1, 1.0, 10.0, 20.0)),
        ("last", "forgetting"),
    ),
    "fig-8-beta": Experiment(
        "Figure 8: weight of distillation",
        "beta, with alpha = 10.",
        CIFAR,
        tuple(Row(f"beta = {b:g}", {"kd_weight": b}) for b in (0.1, 1.0, 10.0, 20.0)),
        ("last", "forgetting"),
    ),
    "fig-9": Experiment(
        "Figure 9: explicit against implicit augmentation",
        "Sampled features against the upper bound of infinitely many (Eq. 10).",
        CIFAR,
        (Row("explicit", {}), Row("implicit", {"proto_aug": "implicit"})),
        ("last", "avg", "forgetting", "newest"),
        plot="curves",
    ),
    "fig-100": Experiment(
        "Scale of the covariance in implicit augmentation",
        "gamma of Eq. 10.",
        CIFAR,
        tuple(Row(f"gamma = {g:g}", {"proto_aug": "implicit", "gamma": g}) for g in (0.0, 1.0, 5.0)),
        ("last", "forgetting"),
    ),
    "fig-10": Experiment(
        "Figure 10: hard against soft labels of hard features",
        "The label of a prototype mixed with a new feature: the old class, or both; and how well the last model's "
        "confidence fits its accuracy (ECE, lower is better), against joint training.",
        CIFAR,
        (
            Row("hard label", {}),
            Row("soft label", {"hard_label": "soft"}),
            Row("joint training", JOINT),
        ),
        ("last", "avg", "forgetting", "ece"),
    ),
    "fig-12": Experiment(
        "Figure 12: against nearest means on a frozen extractor",
        "Nearest means on features of a network that is frozen after the first task; `newest` shows what that costs.",
        CIFAR,
        (Row("NCM, frozen after the first task", {"preset": "simplecil"}), Row("PASS++")),
        ("last", "avg", "newest"),
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
    "fig-15": Experiment(
        "Figure 15: PASS++ on damaged images, after each task",
        "Accuracy over all classes seen, on the test images under the 15 corruptions of CIFAR-100-C, severity 1.",
        CIFAR,
        (Row("PASS++"),),
        ("clean", "mean", *CORRUPTIONS),
        plot="corruptions",
        measure="robustness",
    ),
    "fig-16": Experiment(
        "Figure 16: average accuracy on damaged images",
        "Mean over tasks of the accuracy over all classes seen, under the 15 corruptions of CIFAR-100-C, severity 1. "
        "In its text the paper quotes a method with exemplars (DER): 66.73 clean, 47.79 with Gaussian noise.",
        CIFAR,
        (Row("PASS", {"preset": "pass"}), Row("PASS++")),
        ("clean", "mean", *CORRUPTIONS),
        plot="corruptions",
        measure="robustness",
    ),
    "features": Experiment(
        "Not in the paper: how good the features are",
        "The last model's own accuracy, and that of nearest means and SLDA fitted anew on its features of all training "
        "images (of old classes too: a measure of the features, not a method).",
        TABLE_6,
        (
            Row("pretrained", {"preset": "slda"}),
            Row("finetune", {"preset": "finetune"}),
            Row("KD only", {"preset": "lwf-kd"}),
            Row("PASS++"),
            Row("joint", JOINT),
        ),
        ("last", "ncm_refitted", "slda_refitted"),
        measure="features",
    ),
}
