"""Which experts a token goes through, depth step by depth step.

    python examples/look_inside_a_router.py [RUN] [--text "…"]

Shows for every token of a text the experts of the feed-forward that the router chose, the likeliest
first, and how evenly all of them are used. Without a run folder the model is an untrained MoEUT:
its choices are those of chance, and a trained model's are not.

Legend: T rows (one per token of the text), E experts, N routes.
"""

import argparse

import torch
from torch import Tensor

import moebius
from moebius.model.transformer import Transformer
from moebius.train.record.route_tap import RoutedCall, tap

BYTES = {"prepare": {"tokenizer": "bytes", "vocab_size": 257}, "model": {"vocab_size": 257}}


def routes_of(model: Transformer, tokens_T: Tensor) -> list[RoutedCall]:
    """Returns what the feed-forward's router decided at every depth step."""
    with torch.no_grad(), tap(model) as calls:
        model.eval()(tokens_T[None])
    return [call for call in calls if call.id.kind == "feed_forward"]


def chosen(call: RoutedCall, row: int) -> list[int]:
    """Returns the experts of one row, the one with the largest gate weight first."""
    routes = call.routes
    of_row = (routes.source_N == row).nonzero().flatten()
    order = routes.weight_N[of_row].argsort(descending=True)
    return routes.expert_N[of_row][order].tolist()


def main() -> None:
    """Prints a table of tokens by depth steps, and below it the load of the experts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", help="a run folder; default: an untrained model")
    parser.add_argument("--text", default="the band closes upon itself")
    options = parser.parse_args()

    if options.run:
        loaded = moebius.load(options.run)
        model, tokenizer = loaded.model, loaded.tokenizer
        ids = tokenizer.encode(options.text).tolist()
        words = [tokenizer.decode([token]) for token in ids]
    else:
        model = moebius.build(moebius.recipe("moeut", **BYTES))
        ids = list(options.text.encode())
        words = [chr(token) for token in ids]

    device = next(model.parameters()).device
    calls = routes_of(model, torch.tensor(ids, device=device))
    print("token".ljust(12), *(f"depth {call.id.depth}".ljust(18) for call in calls))
    for row, word in enumerate(words):
        cells = (" ".join(map(str, chosen(call, row)[:5])) for call in calls)
        print(repr(word).ljust(12), *(cell.ljust(18) for cell in cells))
    print()
    for call in calls:
        load_E = torch.bincount(call.routes.expert_N, minlength=call.routes.num_experts)
        share = load_E.max().item() / load_E.float().mean().item()
        used = int((load_E > 0).sum())
        print(
            f"depth {call.id.depth}: {used} of {len(load_E)} experts in use, the fullest has "
            f"{share:.1f} times the mean load"
        )


if __name__ == "__main__":
    main()
