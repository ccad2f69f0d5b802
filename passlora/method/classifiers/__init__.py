"""Features -> classifier, one file each."""

from passlora.method.classifiers.anacp import AnaCP
from passlora.method.classifiers.base import Classifier, Linear, make_classifier, register
from passlora.method.classifiers.fecam import FeCAM
from passlora.method.classifiers.fetril import FeTrIL
from passlora.method.classifiers.head import Head
from passlora.method.classifiers.ncm import NearestMean
from passlora.method.classifiers.probe import Probe
from passlora.method.classifiers.rgda import RGDA
from passlora.method.classifiers.ridge import Ridge
from passlora.method.classifiers.slda import SLDA

__all__ = [
    "RGDA",
    "SLDA",
    "AnaCP",
    "Classifier",
    "FeCAM",
    "FeTrIL",
    "Head",
    "Linear",
    "NearestMean",
    "Probe",
    "Ridge",
    "make_classifier",
    "register",
]
