"""The page of an analysis: one HTML file that needs nothing beside it and nothing from a network.

Pictures are inlined as data URIs. Text of the run (its name, its paths) is escaped. Made for a
phone as for a screen: one column of at most 720 pixels, tables that scroll by themselves, light or
dark as the reader has it.
"""

import base64
import html
from collections.abc import Iterable, Sequence

from ..pictures.picture import KIND_NAMES, Picture
from .analyse import Analysis, BankAnalysis
from .banks import member_name

_STYLE = """
:root { color-scheme: light dark; --ink: #22313f; --faint: #566573; --line: #e1e6ea; --ground: #ffffff; --note: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --faint: #a7b1bb; --line: #39434d; --ground: #171c21; --note: #222a31; } }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--ground); max-width: 720px;
       margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .6rem 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { margin: .5rem 0; } .facts, .source { color: var(--faint); font-size: .87rem; }
figure { margin: .8rem 0; } img { display: block; width: 100%; height: auto; background: #ffffff; border-radius: 6px;
         border: 1px solid var(--line); }
.absent { background: var(--note); border-left: 4px solid #e69f00; padding: .7rem .9rem; border-radius: 4px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .87rem; overflow-wrap: normal; }
th, td { text-align: right; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } nav ol { padding-left: 1.4rem; } a { color: inherit; }
"""


def page(analysis: Analysis, pictures: Sequence[tuple[Picture, bytes]]) -> str:
    """Returns the page; of a picture that is absent the bytes are empty."""
    name = html.escape(str(analysis.facts["run"]))
    links = "".join(
        f'<li><a href="#{picture.name}">{html.escape(picture.title)}</a></li>'
        for picture, _ in pictures
    )
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Analysis of {name}</title><style>{_STYLE}</style></head>\n<body>",
        f"<h1>Inside of {name}</h1>",
        f'<p class="facts">{html.escape(facts_line(analysis))}</p>',
        f"<p>{html.escape(model_line(analysis))}</p>",
        _summary(analysis),
        f"<nav><ol>{links}</ol></nav>",
        *(_section(analysis, picture, drawn) for picture, drawn in pictures),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def facts_line(analysis: Analysis) -> str:
    """Returns the model, step, tokens and seed in a line, as every picture has it below."""
    facts = analysis.facts
    return (
        f"{facts['run']}, step {facts['step']:,}; {facts['tokens']:,} {facts['split']} tokens in "
        f"{facts['rows']:,} rows, loss {facts['loss']:.4f} nats; seed {facts['seed']}"
    )


def model_line(analysis: Analysis) -> str:
    """Returns a sentence about the model's shape."""
    config = analysis.model
    repeats = (
        f"a group of {config.layers_per_group} layers, applied {config.num_repeats} times"
        if config.num_repeats > 1
        else "no layer applied twice"
    )
    return (
        f"{config.num_layers} depth steps ({repeats}), width {config.d_model}, norm {config.norm}, "
        f"vocabulary {config.vocab_size:,}. The rows are evenly spaced over the split, so the same "
        "command finds the same ones. Depth steps count from 1, and layers of the group have letters."
    )


def _summary(analysis: Analysis) -> str:
    rows = [
        _bank_row(each)
        for each in analysis.banks
        if each.chosen_by != "nobody" and not each.takes_all
    ]
    if not rows:
        return ""
    head = (
        "experts of",
        "number",
        "per token",
        "perplexity",
        "never used",
        "kept",
        "universal",
    )
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return (
        '<div class="scroll"><table>\n'
        + "\n".join(lines)
        + '\n</table></div>\n<p class="facts">Means over depth steps. Per token: experts of a token '
        "that has any. Perplexity: of the usage, 1 where all experts are used alike. Never used: at no depth "
        "step. Kept: share of a token's experts that it had one repeat before. Universal: overlap of "
        "the usage of two depth steps.</p>"
    )


def _bank_row(each: BankAnalysis) -> tuple[str, ...]:
    usage, bank = each.usage, each.bank
    per_token = usage.counts_RE.sum() / max(1, usage.tokens_R.sum())
    kept = each.similarity.consecutive_R[1:]
    name = f"{KIND_NAMES[bank.kind]}, layer {member_name(bank.member)}"
    return (
        name,
        str(bank.num_experts)
        if bank.num_heads == 1
        else f"{bank.num_heads} × {bank.num_experts // bank.num_heads}",
        f"{per_token:.3g}",
        _mean(usage.perplexity_R),
        f"{100 * usage.dead_everywhere:.1f} %",
        _mean(kept),
        _mean([usage.universal_score]),
    )


def _mean(values: Iterable[float]) -> str:
    known = [value for value in values if value == value]
    return f"{sum(known) / len(known):.3f}" if known else "–"


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _section(analysis: Analysis, picture: Picture, drawn: bytes) -> str:
    heading = f'<h2 id="{picture.name}">{html.escape(picture.title)}</h2>'
    if picture.absent:
        return f'{heading}\n<p class="absent">Not drawn. {html.escape(picture.absent)}</p>'
    data = base64.b64encode(drawn).decode("ascii")
    alt = html.escape(f"{picture.title}: {facts_line(analysis)}")
    return (
        f"{heading}\n<p>{html.escape(picture.explanation)}</p>\n"
        f'<figure><img alt="{alt}" src="data:image/png;base64,{data}"></figure>\n'
        f'<p class="source">After {html.escape(picture.source)}. Of {html.escape(facts_line(analysis))}. '
        f"Data: {picture.name}.parquet.</p>"
    )
