"""Small charts as SVG text, whose colours are the page's: they follow dark mode and need no script.

Each has a description for those who cannot see it; the numbers themselves stand in a table beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LEFT, TOP, BOTTOM = 480, 40, 12, 42
COLOURS = 8


def colour(i: int) -> str:
    return f"var(--c{i % COLOURS})"


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str = 'class="axis"') -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def picture(height: float, description: str, parts: list[str]) -> str:
    label = escape(description, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], description: str, x_label: str, top: float = 100.0
) -> str:
    """Lines of (x, y) from 0 to `top`, with a legend below; a marker shape beside the colour tells them apart."""
    plot = 220
    x = sorted({value for values, _ in series.values() for value in values})
    low, high = x[0], x[-1]

    def place(value: float, number: float) -> tuple[float, float]:
        share = (value - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - 16), TOP + plot * (1 - min(number / top, 1.0))

    parts = []
    for i in range(5):
        level = top * i / 4
        y = place(low, level)[1]
        parts += [line(LEFT, y, WIDTH - 16, y), text(LEFT - 6, y + 4, f"{level:.0f}", "end")]
    for value in x if len(x) <= 12 else x[:: len(x) // 10]:
        parts.append(text(place(value, 0)[0], TOP + plot + 16, f"{value:g}", "middle"))
    parts.append(text((LEFT + WIDTH) / 2, TOP + plot + 34, x_label, "middle"))
    for i, (name, (values, numbers)) in enumerate(series.items()):
        points = [place(value, number) for value, number in zip(values, numbers, strict=True)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dash = "" if i < COLOURS else ' stroke-dasharray="5 3"'
        parts.append(f'<polyline class="mark" stroke="{colour(i)}"{dash} points="{path}"/>')
        parts += [marker(a, b, i) for a, b in points]
        y = TOP + plot + BOTTOM + 16 * (i + 1)
        parts += [marker(LEFT + 6, y - 4, i), text(LEFT + 18, y, f"{name} ({numbers[-1]:.1f} at the end)")]
    return picture(TOP + plot + BOTTOM + 16 * len(series) + 10, description, parts)


def marker(x: float, y: float, i: int) -> str:
    if i % 2 == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour(i)}"/>'
    return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" fill="{colour(i)}"/>'


def bars(names: Sequence[str], numbers: Sequence[float], description: str, top: float = 100.0) -> str:
    """A bar a name, lying, its number at the end."""
    step, left, parts = 22, 130, []
    for i, (name, number) in enumerate(zip(names, numbers, strict=True)):
        width = max(min(number / top, 1.0), 0.0) * (WIDTH - left - 50)
        y = TOP + step * i
        parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{step - 6}" fill="{colour(0)}"/>')
        parts += [text(left - 8, y + 12, name, "end"), text(left + width + 6, y + 12, f"{number:.1f}")]
    return picture(TOP + step * len(names) + 6, description, parts)


def reliability(bins: Sequence[Sequence[float]], description: str) -> str:
    """Accuracy of the images of each confidence; on the diagonal, a model is as often right as it believes."""
    side, parts, count = 230, [], len(bins)
    for i in range(6):
        y, x = TOP + side * (1 - i / 5), LEFT + side * i / 5
        parts += [line(LEFT, y, LEFT + side, y), text(LEFT - 6, y + 4, f"{20 * i}", "end")]
        parts.append(text(x, TOP + side + 16, f"{20 * i}", "middle"))
    for i, (images, right, _) in enumerate(bins):
        if images:
            height = side * right / images
            x, width = LEFT + side * i / count, side / count - 1.5
            opacity = 0.35 + 0.65 * (images / max(row[0] for row in bins)) ** 0.5
            parts.append(
                f'<rect x="{x:.1f}" y="{TOP + side - height:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="{colour(0)}" opacity="{opacity:.2f}"/>'
            )
    parts.append(
        line(LEFT, TOP + side, LEFT + side, TOP, f'stroke="{colour(1)}" stroke-width="2" stroke-dasharray="6 4"')
    )
    parts.append(text(LEFT + side / 2, TOP + side + 34, "confidence (%)", "middle"))
    for i, words in enumerate(
        ("bars: accuracy (%)", "dashed: as right as it", "believes to be", "fainter: fewer images")
    ):
        parts.append(text(LEFT + side + 12, TOP + 14 + 18 * i, words))
    return picture(TOP + side + BOTTOM + 4, description, parts)
