"""f: a timm network with LoRA adapters, or ResNet-18 from scratch; and f together with its classifier."""
