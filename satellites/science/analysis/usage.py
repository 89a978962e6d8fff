"""Counts how often every expert is chosen at every depth step, and computes monitors.

It keeps one count per expert and repeat, c[r, e], and the gates' range. From these:

    load        c[r, e] over the mean of its row: 1 if all experts are used equally
    preference  u[r, e] = c[r, e] / Σ_r c[r, e]: at which depth steps an expert is used
    perplexity  exp of the entropy of c[r, ·], over the number of experts: 1 if even, 1/E if one
                expert has all; for a layer with heads the mean over heads
    dead        share of experts that nobody chose
    overlap     Σ_e min(c[r, e], c[q, e]), each row normalized: 1 if two depth steps use the experts
                equally often, 0 if they share none

Legend: R repeats, E experts, H heads, A experts of a head.
"""

import numpy as np
import torch

from .banks import Bank, Choices


class UsageCounter:
    """Counts the choices of one bank."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        repeats = bank.num_repeats
        self.counts_RE = np.zeros((repeats, bank.num_experts), dtype=np.int64)
        self.tokens_R = np.zeros(repeats, dtype=np.int64)  # that have an expert
        self.gate_sum_R = np.zeros(repeats)
        self.gate_min_R = np.full(repeats, np.inf)
        self.gate_max_R = np.full(repeats, -np.inf)

    def add(self, repeat: int, choices: Choices) -> None:
        """Adds the choices of one pass at one depth step."""
        counts_E = torch.bincount(choices.expert_N, minlength=choices.num_experts)
        self.counts_RE[repeat] += counts_E.cpu().numpy()
        self.tokens_R[repeat] += len(choices.token_N.unique())
        if len(choices.weight_N):
            gates = choices.weight_N.double()
            self.gate_sum_R[repeat] += float(gates.sum())
            self.gate_min_R[repeat] = min(self.gate_min_R[repeat], float(gates.min()))
            self.gate_max_R[repeat] = max(self.gate_max_R[repeat], float(gates.max()))

    @property
    def gate_mean_R(self) -> np.ndarray:
        """Returns the mean gate weight of the chosen experts."""
        return _divided(self.gate_sum_R, self.counts_RE.sum(1))

    @property
    def share_RE(self) -> np.ndarray:
        """Returns every expert's share of a depth step's choices."""
        return _divided(self.counts_RE, self.counts_RE.sum(1, keepdims=True))

    @property
    def head_share_RHA(self) -> np.ndarray:
        """Returns the shares within each head."""
        counts = self.counts_RE.reshape(self.bank.num_repeats, self.bank.num_heads, -1)
        return _divided(counts, counts.sum(2, keepdims=True))

    @property
    def preference_RE(self) -> np.ndarray:
        """Returns u: each depth step's share of an expert's choices."""
        return _divided(self.counts_RE, self.counts_RE.sum(0))

    @property
    def perplexity_R(self) -> np.ndarray:
        """Returns the usage perplexity relative to the number of experts, 1/E … 1."""
        share = self.head_share_RHA
        logs = np.log(share, out=np.zeros_like(share), where=share > 0)
        return np.exp(-(share * logs).sum(2)).mean(1) / share.shape[2]

    @property
    def dead_R(self) -> np.ndarray:
        """Returns the share of unchosen experts at each depth step that any token reaches."""
        return np.where(self.tokens_R > 0, (self.counts_RE == 0).mean(1), np.nan)

    @property
    def dead_everywhere(self) -> float:
        """Returns the share of experts chosen at no depth step."""
        return float((self.counts_RE.sum(0) == 0).mean())

    @property
    def overlap_RR(self) -> np.ndarray:
        """Returns the overlap of usage between two depth steps, 0 … 1."""
        share = self.share_RE
        return np.stack([np.minimum(share, row).sum(1) for row in share])

    @property
    def universal_score(self) -> float:
        """Returns the mean overlap of two different repeats; NaN for a single one."""
        repeats = self.bank.num_repeats
        pairs = self.overlap_RR[~np.eye(repeats, dtype=bool)]
        known = pairs[np.isfinite(pairs)]  # a depth step that no token reaches has no usage
        return float(known.mean()) if len(known) else float("nan")


def preference_order(preference_RE: np.ndarray, *, quantile: float = 0.9) -> np.ndarray:
    """Returns the experts in the paper's order, from early depth steps to late ones.

    For every expert only entries above its own quantile over depth steps count; the sort key is the
    sum of entry times depth step. Unused experts come last.
    """
    preference_RE = np.asarray(preference_RE)
    used_E = np.isfinite(preference_RE).all(0)
    plain_RE = np.where(used_E, preference_RE, 0.0)
    kept_RE = plain_RE > np.quantile(plain_RE, quantile, axis=0)
    place_E = (plain_RE * kept_RE * np.arange(len(plain_RE))[:, None]).sum(0)
    return np.argsort(np.where(used_E, place_E, np.inf), kind="stable")


def _divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Returns the quotient; NaN where the divisor is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(below > 0, above / below, np.nan)
