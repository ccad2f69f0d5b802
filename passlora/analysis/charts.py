"""The report's charts: matplotlib's SVG in the colours of the page, so that dark mode reaches it; matrices as PNG.

Each has a description for those who cannot see it; the numbers themselves stand in a table beside it.
"""

from __future__ import annotations

import base64
import io
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup

from passlora.display import figures

WIDTH = 5.0  # inches: at a phone's width, text is still large enough to read
PAGE_COLOURS = {"#000000": "currentColor", "#b0b0b0": "var(--soft)"}  # text and lines; grids
PAGE_COLOURS |= {colour: f"var(--c{i})" for i, colour in enumerate(figures.COLOURS)}
REFERENCE = re.compile(r"#(\w+)")


def accuracy(results: dict[str, Any], description: str) -> Markup:
    methods = 1 + len(results["compare"])
    figure, axes = page_figure(3.2 + 0.21 * methods)
    figures.draw_accuracy(axes, results)
    figure.legend(loc="outside lower left", frameon=False)
    return svg(figure, "accuracy", description)


def reliability(bins: np.ndarray, description: str) -> Markup:
    figure, axes = page_figure(4.2)
    figures.draw_reliability(axes, bins)
    figure.legend(loc="outside lower left", frameon=False)
    return svg(figure, "reliability", description)


def robustness(found: dict[str, Any], description: str) -> Markup:
    figure, axes = page_figure(1.0 + 0.26 * len(found["accuracy"]))
    figures.draw_robustness(axes, found)
    figure.legend(loc="outside lower left", frameon=False)
    return svg(figure, "robustness", description)


def page_figure(height: float) -> tuple[Any, Any]:
    figure = figures.new_figure(WIDTH, height)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)  # the reader's font may be wider than the one measured
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def svg(figure: Any, name: str, description: str) -> Markup:
    """The figure as an element of an HTML page: text stays text, and no identifier occurs in another chart."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # the salt makes what is referred to unique
        figures.write(figure, file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # of the whole page, they would be
                parent.remove(child)
    used = {match for element in root.iter() for match in references(element)}
    for element in root.iter():
        element.tag = element.tag.split("}")[-1]
        element.attrib = {key.split("}")[-1]: value for key, value in element.attrib.items()}
        if element.get("id") not in used:
            element.attrib.pop("id", None)
        if "style" in element.attrib:
            element.set("style", with_page_colours(element.attrib["style"]))
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": description}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def references(element: ElementTree.Element) -> list[str]:
    """The identifiers that an element refers to."""
    values = [v for k, v in element.attrib.items() if k == "clip-path" or k.endswith("}href")]
    return [match for value in values for match in REFERENCE.findall(value)]


def with_page_colours(style: str) -> str:
    for colour, name in PAGE_COLOURS.items():
        style = style.replace(colour, name)
    return style


def matrix_png(share: np.ndarray) -> str:
    """A square a cell, as base64 of a PNG: white is 0, dark is 1."""
    from PIL import Image

    shade = np.stack([255 - 232 * share**0.6, 255 - 190 * share**0.6, 255 - 120 * share**0.6], axis=-1)
    side = len(share) * max(1, 600 // len(share))
    image = Image.fromarray(shade.astype(np.uint8)).resize((side, side), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
