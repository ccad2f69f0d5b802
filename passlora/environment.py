"""What a bug report needs: versions and devices. And which process this is."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from importlib import metadata

PACKAGES = ("passlora", "torch", "timm", "peft", "transformers", "accelerate", "datasets", "safetensors")


def peak_memory() -> int:
    """Bytes that this process held at its peak: of the GPU if it uses one, else of main memory; 0 if unknown."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if importlib.util.find_spec("resource") is None:  # Windows
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def is_first_process() -> bool:
    """Before torch is there to ask."""
    return os.environ.get("RANK", "0") == "0"


def describe_environment() -> str:
    import torch

    lines = [("python", platform.python_version()), ("platform", platform.platform())]
    for package in PACKAGES:
        try:
            lines.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            lines.append((package, "not installed"))
    lines.append(("cpu threads", str(torch.get_num_threads())))
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    lines.append(("accelerators", ", ".join(devices) or "none"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)
