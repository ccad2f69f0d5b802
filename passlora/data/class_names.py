"""What may be the name of a class: one rule for who reads a dataset and for who reads a model's folder."""

from __future__ import annotations

import unicodedata

from passlora.errors import PassloraError

LONGEST = 1000  # characters
CONTROL = ("Cc", "Zl", "Zp")  # Unicode's categories of control characters and of line ends


def check_class_name(name: str) -> None:
    """Names are written into JSON, tables and pages, and read back: what could not be is refused before training."""
    shown = ascii(name if len(name) <= 80 else name[:77] + "...")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:  # of a folder whose name is not UTF-8, Python keeps the odd bytes as half characters
        raise PassloraError(f"the class name {shown} is not UTF-8: rename the class") from None
    if not name.strip():
        raise PassloraError(f"the class name {shown} is empty: give the class a name")
    if len(name) > LONGEST:
        raise PassloraError(f"the class name {shown} has {len(name):,} characters, at most {LONGEST:,} are allowed")
    if any(unicodedata.category(character) in CONTROL for character in name):
        raise PassloraError(f"the class name {shown} holds a line end or a control character: rename the class")
