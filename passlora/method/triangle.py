"""Symmetric matrices as they are stored: the upper triangle, row by row."""

from __future__ import annotations

import torch
from torch import Tensor


def size(width: int) -> int:
    """How many numbers a matrix of so many rows takes."""
    return width * (width + 1) // 2


def packed(matrix: Tensor) -> Tensor:
    """(..., n, n) -> (..., size(n))."""
    rows, columns = torch.triu_indices(*matrix.shape[-2:])
    return matrix[..., rows, columns]


def unpacked(values: Tensor, width: int) -> Tensor:
    """(..., size(n)) -> (..., n, n)."""
    rows, columns = torch.triu_indices(width, width)
    matrix = values.new_zeros(*values.shape[:-1], width, width)
    matrix[..., rows, columns] = values
    matrix[..., columns, rows] = values
    return matrix
