"""Progress bars, shown on a terminal and silent elsewhere."""

from __future__ import annotations

import os
import sys
from typing import Any


def progress(iterable: Any = None, **options: Any) -> Any:
    """A tqdm bar on standard error; none when that is not a terminal, nor on processes other than the first."""
    from tqdm import tqdm

    silent = not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0"
    return tqdm(iterable, disable=silent, leave=False, dynamic_ncols=True, **options)
