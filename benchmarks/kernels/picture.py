"""The picture of expert_layer.py: how fast each is beside the dense layer of equal active work;
ours in colour.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

GOAL = 0.6
# From light to dark: nobody's grey says more than another's.
PEERS = {
    "loop, where + index_add": "#dddddd",
    "loop, sorted + unbind": "#bdbdbd",
    "grouped_mm": "#969696",
    "grouped_mm, gate in h": "#737373",
    "ScatterMoE": "#9aa7c0",
    "Liger fused MoE, SwiGLU": "#7d8db0",
}
DENSE = "#f2c14e"
OURS = ("#1b9e77", "#7fd0b5", "#0b5d46", "#52b788", "#2d6a4f", "#95d5b2", "#40916c", "#b7e4c7")


def draw(figures: Mapping[str, Any], path: Path) -> Path:
    """One panel per dtype and number of threads, a group of bars per setting; skewed routing.
    Returns the path.
    """
    panels = sorted(
        {(e["dtype"], c["threads"]) for e in figures["entries"] for c in e["cells"]},
        key=lambda p: (p[0] != "float32", p[1]),
    )
    dtypes, threads = list(dict.fromkeys(p[0] for p in panels)), sorted({p[1] for p in panels})
    figure, axes = plt.subplots(
        max(1, len(dtypes)),
        max(1, len(threads)),
        squeeze=False,
        sharey=True,
        layout="constrained",
        figsize=(3 + 5 * max(1, len(threads)), 1.2 + 3 * max(1, len(dtypes))),
    )
    colours = colours_of(figures)
    for dtype, thread_count in panels:
        _panel(
            axes[dtypes.index(dtype)][threads.index(thread_count)],
            figures,
            dtype,
            thread_count,
            colours,
        )
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(
        handles, list(colours), loc="outside lower center", ncols=4, fontsize=8, frameon=False
    )
    where = figures.get("environment", {}).get("gpu") or figures.get("environment", {}).get(
        "cpu", ""
    )
    title = (
        "Experts, forward + backward, new routing in every run: "
        "speed ÷ dense MLP of equal active work"
    )
    figure.suptitle(f"{title}\n{where}", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def colours_of(figures: Mapping[str, Any]) -> dict[str, str]:
    """Every contender that was timed, but the ceiling, in the order of the bars."""
    timed = list(
        dict.fromkeys(
            e["name"] for e in figures["entries"] if e["cells"] and e["role"] != "ceiling"
        )
    )
    roles = {e["name"]: e["role"] for e in figures["entries"]}
    own = [name for name in timed if roles[name] == "ours"]
    # The meaning of the operation is not meant to be fast.
    own.sort(key=lambda name: "reference" in name)
    colours = {name: DENSE for name in timed if roles[name] == "dense"}
    colours |= {name: PEERS.get(name, "#aaaaaa") for name in timed if roles[name] == "peer"}
    return colours | {
        name: "#cfe8df" if "reference" in name else OURS[i % len(OURS)]
        for i, name in enumerate(own)
    }


def best_of(
    figures: Mapping[str, Any], name: str, setting: str, dtype: str, threads: int
) -> dict[str, Any] | None:
    """The better of a contender's modes, under skewed routing."""
    cells = [
        cell
        for entry in figures["entries"]
        if (entry["name"], entry["setting"], entry["dtype"]) == (name, setting, dtype)
        for cell in entry["cells"]
        if cell["threads"] == threads and cell["skew"] > 0
    ]
    return max(cells, key=lambda cell: cell["of_ceiling"], default=None)


def _panel(
    axes: Axes, figures: Mapping[str, Any], dtype: str, threads: int, colours: Mapping[str, str]
) -> None:
    settings = [setting["name"] for setting in figures["settings"]]
    width = 0.85 / max(1, len(colours))
    for group, setting in enumerate(settings):
        for place, (name, colour) in enumerate(colours.items()):
            cell = best_of(figures, name, setting, dtype, threads)
            if cell is None:
                continue
            x = group + (place - (len(colours) - 1) / 2) * width
            axes.bar(x, cell["of_ceiling"], width, color=colour)
            if name.startswith("ours") and "reference" not in name:
                axes.text(
                    x,
                    cell["of_ceiling"] + 0.01,
                    f"{cell['of_ceiling']:.2f}",
                    ha="center",
                    fontsize=7,
                )
    axes.axhline(1, color="black", linewidth=1)
    axes.axhline(GOAL, color="#1b9e77", linewidth=0.8, linestyle=":")
    axes.set_xticks(
        range(len(settings)), [_tick(figures, s, dtype, threads) for s in settings], fontsize=8
    )
    axes.set_title(
        f"{dtype}" + (f", {threads} thread{'s' * (threads > 1)}" if threads else ""), fontsize=10
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel("of the ceiling (1 = dense; dotted: goal)", fontsize=8)


def _tick(figures: Mapping[str, Any], setting: str, dtype: str, threads: int) -> str:
    """The setting, and how many milliseconds the full height stands for."""
    cells = [
        best
        for name in {e["name"] for e in figures["entries"] if e["role"] == "ceiling"}
        if (best := best_of(figures, name, setting, dtype, threads)) is not None
    ]
    return setting if not cells else f"{setting}\n1 = {cells[0]['fastest_ms']:.3g} ms"
