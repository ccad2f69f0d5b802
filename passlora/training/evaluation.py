"""Counts over test images: enough for every number that is reported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CALIBRATION_BINS = 15


@dataclass
class Evaluation:
    confusion: np.ndarray  # (true class, predicted class)
    bins: np.ndarray  # (CALIBRATION_BINS, 3): images, right ones, sum of confidences

    @property
    def accuracy(self) -> float:
        """Over all images, in percent."""
        return 100.0 * float(np.diagonal(self.confusion).sum() / self.confusion.sum())

    @property
    def calibration_error(self) -> float:
        """ECE in percent: mean gap between confidence and accuracy, weighted by the images of each bin."""
        images, right, confidence = self.bins.T
        return 100.0 * float(np.abs(right - confidence).sum() / images.sum())

    @property
    def tested_classes(self) -> int:
        """How many classes had test images."""
        return int((self.confusion.sum(axis=1) > 0).sum())


def tally(scores: Tensor, truth: Tensor, confusion: Tensor, bins: Tensor) -> None:
    """Add what a batch's scores say to the counts of an Evaluation, without leaving the device."""
    k = len(confusion)
    predicted = scores.argmax(dim=1)
    confusion += torch.bincount(truth * k + predicted, minlength=k * k).view(k, k)
    confidence = scores.softmax(dim=1).amax(dim=1)
    place = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
    entry = torch.stack([torch.ones_like(confidence), (predicted == truth).to(confidence), confidence], dim=1)
    bins.index_add_(0, place, entry.to(bins.dtype))
