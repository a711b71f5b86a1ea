"""A device's memory over a step as a picture to scale: device memory by holder, and host memory below."""

from html import escape

from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.report.draw.timeline import FONT, LEFT, RIGHT, Window, time_axis
from sppo_jax.report.plan.occupancy import Occupancy

HBM, HOST, TOP, BETWEEN = 150, 80, 30, 34
COLORS = {
    "parameters, gradients, optimizer, working": "#9aa7b4",
    "K/V": "#4878a8",
    "dK/dV": "#3f8440",
    "stash": "#e07b1a",
}
HOST_COLOR = "#6b4c9a"
LIMIT = "#b00020"
# Keeps a label readable on top of an area.
_HALO = "stroke='white' stroke-width='3' paint-order='stroke'"


def memory_svg(
    curve: Occupancy, window: Window, *, allocated: int, capacity: int, host_allocated: int, host_capacity: int
) -> str:
    """Draws the bytes that a device of a stage has in use, tick by tick.

    Args:
        curve: bytes in use.
        window: the ticks to show and their places, as in the timeline above.
        allocated: bytes of device memory that the step allocates.
        capacity: bytes of device memory.
        host_allocated: bytes of host memory that the step allocates for the device.
        host_capacity: bytes of host memory that the device may take.

    Returns:
        A whole SVG document.
    """
    host_height = BETWEEN + HOST if host_allocated else 0
    height = TOP + HBM + host_height + 62
    layers = [(curve.fixed,) * len(curve.kv), curve.kv, curve.kv_grad, curve.stash]
    title = f"memory in use on a device of stage {curve.stage}; buffers are allocated once for the whole step"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{window.width}' height='{height}' "
        f"viewBox='0 0 {window.width} {height}'>",
        f"<rect width='{window.width}' height='{height}' fill='white'/>",
        f"<text x='{LEFT}' y='18' {FONT} font-weight='bold'>{escape(title)}</text>",
        *_panel(layers, list(COLORS.values()), window, TOP, HBM, allocated, capacity, "HBM"),
    ]
    if host_allocated:
        top = TOP + HBM + BETWEEN
        on_host, fills = [curve.host], [HOST_COLOR]
        if curve.host_fixed:
            on_host, fills = [(curve.host_fixed,) * len(curve.host), *on_host], [next(iter(COLORS.values())), *fills]
        parts += _panel(on_host, fills, window, top, HOST, host_allocated, host_capacity, "host")
    parts += [*time_axis(window, height - 58), *_legend(height - 12, bool(host_allocated))]
    return "\n".join([*parts, "</svg>"])


def _panel(
    layers: list[tuple[int, ...]],
    fills: list[str],
    window: Window,
    top: int,
    height: int,
    allocated: int,
    capacity: int,
    name: str,
) -> list[str]:
    """Draws layers on top of each other, with lines for the allocated bytes and for the capacity."""
    right = window.width - RIGHT
    # If little of the capacity is used, the picture is scaled to the use.
    most = max(allocated, 1)
    shown = capacity if most > capacity / 10 else most * 2
    shown = max(shown, most)
    unit = height / shown
    parts = [f"<rect x='{LEFT}' y='{top}' width='{right - LEFT}' height='{height}' fill='#f7f7f7'/>"]
    below = [0] * len(layers[0])
    for values, fill in zip(layers, fills, strict=True):
        above = [low + value for low, value in zip(below, values, strict=True)]
        parts.append(_area(below, above, window, top + height, unit, fill))
        below = above
    for value, stroke, dash, word in ((allocated, "#222", "4 3", "allocated"), (capacity, LIMIT, "", "capacity")):
        y = top + height - value * unit
        if y < top - 1:
            text = f"{word} {format_bytes(value)}, {value / shown:,.0f} times what is shown"
            parts.append(f"<text x='{right - 4}' y='{top + 12}' {FONT} text-anchor='end'>{text}</text>")
            continue
        parts.append(f"<path d='M{LEFT} {y:.1f}H{right}' stroke='{stroke}' stroke-dasharray='{dash}' fill='none'/>")
        label = y + 12 if word == "allocated" and y + 14 < top + height else y - 4
        text = f"{word} {format_bytes(value)}"
        parts.append(f"<text x='{right - 4}' y='{label:.1f}' {FONT} {_HALO} text-anchor='end'>{text}</text>")
    parts.append(f"<text x='8' y='{top + height / 2:.0f}' {FONT}>{name}</text>")
    parts.append(f"<text x='{LEFT - 4}' y='{top + height}' {FONT} text-anchor='end'>0</text>")
    return parts


def _area(below: list[int], above: list[int], window: Window, bottom: float, unit: float, fill: str) -> str:
    """Returns the area between two step curves, one value a tick; ticks of one pixel share a step."""
    steps: dict[int, tuple[float, int, int]] = {}  # start, smallest and largest value of each pixel
    for index in range(window.first, window.last + 1):
        x = window.x(window.starts_s[index])
        start, low, high = steps.get(int(x), (x, below[index], above[index]))
        steps[int(x)] = start, min(low, below[index]), max(high, above[index])
    places = [steps[pixel] for pixel in sorted(steps)]
    ends = [x for x, _, _ in places[1:]] + [float(window.width - RIGHT)]
    up = [f"L{x:.1f} {bottom - high * unit:.1f}H{end:.1f}" for (x, _, high), end in zip(places, ends, strict=True)]
    down = [
        f"L{end:.1f} {bottom - low * unit:.1f}H{x:.1f}"
        for (x, low, _), end in reversed(list(zip(places, ends, strict=True)))
    ]
    return f"<path d='M{''.join([*up, *down])[1:]}z' fill='{fill}'/>"


def _legend(y: int, host: bool) -> list[str]:
    parts, x = [], LEFT
    for name, fill in {**COLORS, **({"stash on the host": HOST_COLOR} if host else {})}.items():
        parts.append(f"<rect x='{x}' y='{y - 10}' width='12' height='12' fill='{fill}'/>")
        parts.append(f"<text x='{x + 17}' y='{y}' {FONT}>{escape(name)}</text>")
        x += 36 + round(len(name) * 6.0)
    return parts
