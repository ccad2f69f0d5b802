"""Features -> classifier, one file each: the trained head, nearest mean, SLDA, ridge, FeCAM, FeTrIL."""

from passlora.method.classifiers.base import Classifier, Linear, make_classifier, register
from passlora.method.classifiers.fecam import FeCAM
from passlora.method.classifiers.fetril import FeTrIL
from passlora.method.classifiers.head import Head
from passlora.method.classifiers.ncm import NearestMean
from passlora.method.classifiers.ridge import Ridge
from passlora.method.classifiers.slda import SLDA

__all__ = [
    "SLDA",
    "Classifier",
    "FeCAM",
    "FeTrIL",
    "Head",
    "Linear",
    "NearestMean",
    "Ridge",
    "make_classifier",
    "register",
]
