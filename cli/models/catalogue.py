"""Lists the recipes: what each one is, what it costs and what it promises.

The first line of a recipe's docstring describes it. Costs come from model/cost.py, at the recipe's sequence
length.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...model.cost import Flops, Parameters, count_parameters, forward_flops, is_upper_bound
from ...model.loops.pair import BUDGETS, Budget, budgets, unlooped
from ...model.routers.router import Promises
from ...train.config.resolve import resolve
from ...train.config.run_config import Config

_LEGEND = """
active: dense weights, the embedding and one token's experts, each distinct layer counted once
training FLOPs/token: forward and backward, at the recipe's sequence length; ≤ if tokens can be dropped or halt
g: sequences that are routed together
promises: Causal, Independent of the other sequences of a batch, Dropless, Balanced by construction"""

_WIDE = 140  # columns of a screen with room for descriptions beside the figures


@dataclass(frozen=True)
class Entry:
    """Describes one recipe or configuration file: its costs and promises."""

    name: str
    description: str
    seq_len: int
    parameters: Parameters
    flops: Flops  # forward, per token
    upper_bound: bool  # some tokens may take fewer FLOPs
    promises: Promises
    group_sequences: int

    def plain(self) -> dict[str, Any]:
        """Returns everything as JSON values, including totals."""
        flops = {
            **asdict(self.flops),
            "forward": self.flops.forward,
            "training": self.flops.training,
        }
        return {**asdict(self), "flops": flops}


def catalogue(names: Sequence[str], recipes: Mapping[str, Callable[[], Config]]) -> Iterable[Entry]:
    """Yields an entry for each of the named recipes and TOML files; by default for all recipes.

    Raises for a wrong name before the first entry is made.

    Raises:
        ConfigError: there is no such recipe or file.
    """
    configs = [(name, resolve(name, (), recipes)) for name in names or recipes]
    return (_entry(name, config, _first_line(recipes.get(name))) for name, config in configs)


def partner_of(config: Config, budget: Budget) -> Config:
    """Returns the configuration with the model's partner without loops (model/loops/pair.py).

    Raises:
        ValueError: the model has no loops, or cannot be without them.
    """
    model = unlooped(config.model, config.data.seq_len, budget)
    return Config.model_validate(config.model_dump() | {"model": model.model_dump()})


def pair(name: str, recipes: Mapping[str, Callable[[], Config]]) -> tuple[list[Entry], list[str]]:
    """Returns the entries of a looped recipe and its partners, and how equal each partner is."""
    looped = resolve(name, (), recipes)
    own = budgets(looped.model, looped.data.seq_len)
    entries, lines = [_entry(name, looped, _first_line(recipes.get(name)))], []
    for budget in BUDGETS:
        arm, partner = f"{name} --unlooped {budget}", partner_of(looped, budget)
        share = own.difference(budgets(partner.model, partner.data.seq_len), budget)
        lines.append(f"{arm}: {budget} {'equal' if share == 0 else f'{share:+.3%}'}")
        entries.append(_entry(arm, partner, ""))
    return entries, lines


def render_catalogue(entries: Iterable[Entry], *, width: int) -> Group:
    """Returns the table of entries, one line each, with a legend.

    Where a screen's width leaves too little room for descriptions, they follow as a table of their
    own, because a cut description tells nothing.
    """
    entries = list(entries)
    beside = width >= _WIDE
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in ("recipe", "parameters", "active", "training FLOPs/token", "g", "promises"):
        justify = "left" if heading in ("recipe", "promises") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    below = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    below.add_column("recipe", no_wrap=True)
    (table if beside else below).add_column("architecture")
    for entry in entries:
        description = Text(entry.description)
        table.add_row(*map(Text, _cells(entry)), *[description] * beside)
        below.add_row(Text(entry.name), description)
    return Group(table, *["", below] * (not beside), Text(_LEGEND, style="dim"))


def _cells(entry: Entry) -> Iterable[str]:
    yield entry.name
    yield from (short(entry.parameters.total, "B"), short(entry.parameters.active, "B"))
    yield ("≤ " if entry.upper_bound else "") + short(entry.flops.training)
    yield from (str(entry.group_sequences), _letters(entry.promises))


def short(number: float, giga: str = "G") -> str:
    """Formats a number with four digits and a unit: 44,345,792 is 44.35M.

    Args:
        giga: the unit of 10^9: "G" for FLOPs, "B" for parameters.
    """
    for unit, factor in (("T", 1e12), (giga, 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= factor:
            scaled = number / factor
            return f"{scaled:.{max(0, 4 - len(str(int(scaled))))}f}{unit}"
    return f"{number:.0f}"


def _letters(promises: Promises) -> str:
    kept = {
        "C": promises.causal,
        "I": promises.batch_invariant,
        "D": promises.dropless,
        "B": promises.balanced,
    }
    return " ".join(letter if is_kept else "·" for letter, is_kept in kept.items())


def _entry(name: str, config: Config, description: str) -> Entry:
    model, seq_len = config.model, config.data.seq_len
    return Entry(
        name,
        description,
        seq_len,
        count_parameters(model, seq_len),
        forward_flops(model, seq_len),
        is_upper_bound(model),
        model.promises,
        model.group_sequences,
    )


def _first_line(recipe: Callable[[], Config] | None) -> str:
    return ((recipe and recipe.__doc__) or "").strip().split("\n")[0].rstrip(".")
