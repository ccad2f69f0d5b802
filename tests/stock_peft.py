"""Features by stock peft, in a process that cannot import passlora: MODEL BACKBONE_WEIGHTS INPUT OUTPUT."""

import sys


def main(model_name: str, weights: str, x: str, out: str) -> None:
    sys.modules["passlora"] = None  # whoever imports it fails
    import timm
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file

    network = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=6, num_classes=0)
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(weights).items()})
    model = PeftModel.from_pretrained(network, model_name, subfolder="task_01").eval()
    with torch.no_grad():
        torch.save(model(torch.load(x)), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
