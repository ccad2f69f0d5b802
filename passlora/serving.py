"""A merged model as transformers knows models: AutoModelForImageClassification and pipeline("image-classification").

`import passlora.serving` registers these classes with transformers, before or after transformers itself is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BaseImageProcessor,
    BatchFeature,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.image_transforms import to_pil_image
from transformers.image_utils import make_flat_list_of_images
from transformers.modeling_outputs import ImageClassifierOutput

from passlora.config import NUM_ROTATIONS
from passlora.data.batches import as_input
from passlora.errors import PassloraError
from passlora.method.discriminant import heavy_tailed
from passlora.method.feature_map import LIFTS, FeatureMap
from passlora.method.views import class_scores, rotate
from passlora.network.backbone import as_pixel, check_blocks, class_tokens, prepare
from passlora.network.factory import rebuild

README = """# A model merged by passlora

transformers reads this folder after `import passlora.serving`:

```python
import passlora.serving  # tells transformers of the model's classes
from transformers import pipeline

classifier = pipeline("image-classification", model="FOLDER")  # this folder, or its id on the Hub
```
"""


class PassLoraConfig(PretrainedConfig):
    """What rebuilds the network, and how its nodes become class scores."""

    model_type = "passlora"

    def __init__(
        self,
        architecture: str = "deit_small_patch16_224",
        architecture_args: dict[str, Any] | None = None,
        feature_dim: int = 384,
        feature_blocks: int = 1,  # of a transformer, whose class tokens are the features, side by side
        num_views: int = 4,
        inference: str = "multiview",
        unit_length: bool = False,  # features are brought to length 1 before the head
        classifier_views: int = 1,  # rotations whose features the head reads, side by side
        lift: str = "none",  # random features before the head
        lift_width: int = 0,
        heavy_tails: bool = False,  # of the probabilities
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.architecture, self.architecture_args = architecture, architecture_args or {}
        self.feature_dim, self.num_views, self.inference = feature_dim, num_views, inference
        self.unit_length, self.feature_blocks = unit_length, feature_blocks
        self.classifier_views, self.lift, self.lift_width = classifier_views, lift, lift_width
        self.heavy_tails = heavy_tails
        named = isinstance(architecture, str) and isinstance(self.architecture_args, dict)
        sized = isinstance(feature_dim, int) and 0 < feature_dim <= 2**16 and num_views in (1, NUM_ROTATIONS)
        answers = inference in ("multiview", "single", "vanilla") and isinstance(unit_length, bool)
        mapped = classifier_views in (1, NUM_ROTATIONS) and lift in ("none", *LIFTS) and isinstance(heavy_tails, bool)
        mapped = mapped and isinstance(lift_width, int) and (lift == "none" or 0 < lift_width <= 2**16)
        sized = sized and isinstance(feature_blocks, int) and 0 < feature_blocks <= 64
        if not (named and sized and answers and mapped):
            raise PassloraError("the settings of this merged model are not ones that passlora writes")


class PassLoraForImageClassification(PreTrainedModel):
    """Backbone and head; the rotations and their ensemble (Eq. 13) are inside."""

    config_class = PassLoraConfig
    main_input_name = "pixel_values"

    def __init__(self, config: PassLoraConfig) -> None:
        super().__init__(config)
        self.map = FeatureMap(config.feature_dim, config.classifier_views, config.lift, config.lift_width)
        with torch.device("cpu"):  # not transformers' meta device: timm computes while it builds
            self.backbone = rebuild(config.architecture, config.architecture_args)
            if config.feature_blocks > 1:
                check_blocks(self.backbone, config.feature_blocks)
            self.head = nn.Linear(self.map.width, config.num_views * config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: `from_pretrained` refuses a file that lacks any weight."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs |= {"use_safetensors": True, "ignore_mismatched_sizes": True}  # never a pickle; shapes are checked below
        model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            if info[what]:
                odd = sorted(str(key) for key in info[what])
                raise PassloraError(f"{name}: {len(odd)} {what.replace('_keys', '')} weights, such as {odd[0]}")
        for key, tensor in model.state_dict().items():
            if not tensor.isfinite().all():
                raise PassloraError(f"{name}: {key} holds values that are not finite")
        restore_buffers(model)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Beside the weights, a note of what to import, unless there is a README already."""
        super().save_pretrained(save_directory, *args, **kwargs)
        note = Path(save_directory) / "README.md"
        if not note.exists():
            note.write_text(README, encoding="utf-8")

    def features(self, x: Tensor) -> Tensor:
        blocks = self.config.feature_blocks
        return self.backbone(x) if blocks == 1 else class_tokens(self.backbone, x, blocks)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> ImageClassifierOutput:
        config = self.config
        if not self.map.is_plain:
            z = self.features(rotate(pixel_values, self.map.views)).unflatten(0, (-1, self.map.views))
            scores = self.head(self.map(z))
            scores = heavy_tailed(scores) if config.heavy_tails else scores
        else:
            views = 1 if config.inference == "single" else config.num_views
            z = self.features(rotate(pixel_values, views))
            logits = self.head(F.normalize(z, dim=1) if config.unit_length else z)
            scores = logits[:, :: config.num_views] if views == 1 else class_scores(logits, views, config.inference)
        loss = None if labels is None else F.cross_entropy(scores, labels)
        return ImageClassifierOutput(loss=loss, logits=scores)


def restore_buffers(model: PassLoraForImageClassification) -> None:
    """transformers leaves in buffers that no file holds, such as indices of positions, what was in memory before."""
    saved = model.backbone.state_dict()
    lost = {name: buffer for name, buffer in model.backbone.named_buffers() if name not in saved}
    if lost:
        fresh = dict(rebuild(model.config.architecture, model.config.architecture_args).named_buffers())
        for name, buffer in lost.items():
            buffer.copy_(fresh[name])


class PassLoraImageProcessor(BaseImageProcessor):
    """Images as passlora reads them: small ones at their own size, large ones by their centre crop, then resized."""

    model_input_names: ClassVar[list[str]] = ["pixel_values"]

    def __init__(self, image_size: int = 224, mean: Any = (0.5,) * 3, std: Any = (0.5,) * 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.image_size, self.mean, self.std = image_size, list(mean), list(std)

    def preprocess(self, images: Any, return_tensors: Any = None, **kwargs: Any) -> BatchFeature:
        pictures = [as_input(to_pil_image(image), self.image_size) for image in make_flat_list_of_images(images)]
        mean, std = as_pixel(self.mean), as_pixel(self.std)
        rows = [prepare(picture[None], self.image_size, mean, std)[0] for picture in pictures]
        return BatchFeature({"pixel_values": torch.stack(rows)}, tensor_type=return_tensors)


def register() -> None:
    """May be called again."""
    AutoConfig.register(PassLoraConfig.model_type, PassLoraConfig, exist_ok=True)
    AutoModelForImageClassification.register(PassLoraConfig, PassLoraForImageClassification, exist_ok=True)
    both = {"pil": PassLoraImageProcessor, "torchvision": PassLoraImageProcessor}
    AutoImageProcessor.register(PassLoraConfig, image_processor_classes=both, exist_ok=True)


register()
