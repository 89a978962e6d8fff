"""Which document every token of a micro-batch belongs to, and what respects it.

Rows are cut from a stream of documents or packed from several. A document is a run of equal ids in
a row; −1 is padding. Three things respect documents, each enabled separately:

    attention   a position sees only its own document, and positions count from its first token: a document's
                outputs are those that it would have alone
    balancing   a loss over sequences (MoEUT's entropy, DeepSeek's sequence-wise loss) is taken over
                documents instead, weighted by their tokens
    padding     always: it has no expert, takes no place in a capacity, and enters no statistic,
                halting's depth included

The paper (MoEUT, arXiv 2405.16039) respects none of them; without document ids everything is as
published, bit for bit. Routers that look across sequences by design still do: mixtures and expert
choice read other rows position by position. A mixture treats padding as a token, because a group
without it may be too small to mix (model/routers/mixture.py).

Cost: where torch's variable-length attention runs (model/attention/attention.py), 4 bytes per
document, and attention computes the pairs within documents only. Elsewhere one mask of B·S·S bytes
for all depth steps, and all S·S scores instead of the causal half. The rotation table has one entry
per row. With padding the remaining routes follow no rule, as under halting.

Legend: B sequences, S positions, T = B·S tokens (or h·T sub-tokens), R of them no padding, D
documents, X runs: documents and stretches of padding.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .layers import on_device

PADDING = -1


@dataclass(frozen=True)
class DocumentRows:
    """Marks a layer's rows that are not padding, and how documents group them.

    All tensors are on the model's device.
    """

    num_rows: int  # T
    num_real: int  # R
    count_B: Tensor  # float32: real rows of each sequence
    real_R: Tensor | None = None  # int64, ascending: the rows that are not padding; None: all
    real_T: Tensor | None = None  # bool: the same
    # Only when balancing respects documents:
    document_T: Tensor | None = None  # int64, 0 … D−1; meaningless for padding
    length_D: Tensor | None = None  # int64: rows of each document
    length_DB: Tensor | None = None  # float32: the same, in the column of the document's sequence

    def repeated(self, times: int) -> "DocumentRows":
        """Returns the same for rows that were each split into `times` neighbours."""
        if times == 1:
            return self

        def split(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.repeat_interleave(times)

        def scaled(values: Tensor | None) -> Tensor | None:
            return None if values is None else values * times

        real_R = self.real_R
        if real_R is not None:
            real_R = with_neighbours(real_R, times)
        return replace(
            self,
            num_rows=self.num_rows * times,
            num_real=self.num_real * times,
            count_B=self.count_B * times,
            real_R=real_R,
            real_T=split(self.real_T),
            document_T=split(self.document_T),
            length_D=scaled(self.length_D),
            length_DB=scaled(self.length_DB),
        )


@dataclass(frozen=True)
class Documents:
    """Holds what the layers of one pass know about documents, built once for all depth steps."""

    # None unless attention respects documents:
    positions_BS: Tensor | None  # int64: the document's first token has position 0
    # int32, (X + 1,): first tokens of runs in all rows laid end to end, and T; None where the device
    # has no variable-length attention
    offsets: Tensor | None
    longest: int  # tokens of the longest run
    # None without padding, unless balancing respects documents
    rows: DocumentRows | None
    ids_BS: Tensor  # int64, on the host, as given

    @property
    def visible_B1SS(self) -> Tensor | None:
        """Returns which position (third) sees which (fourth), bool; None: attention ignores documents.

        Built on first use. Compiled parts build their own, because tracing cannot store it.
        """
        return _visible(self) if torch.compiler.is_compiling() else self._visible_B1SS

    @cached_property
    def _visible_B1SS(self) -> Tensor | None:
        return _visible(self)

    def of_sequences(self, live: Tensor) -> "Documents":
        """Returns the documents of some of the sequences."""
        return mark_documents(
            self.ids_BS[live.cpu()],
            live.device,
            attention=self.positions_BS is not None,
            balance=self.rows is not None and self.rows.length_D is not None,
        )

    @property
    def real_BS(self) -> Tensor | None:
        """Returns which tokens are not padding, bool; None: there is no padding."""
        if self.rows is None or self.rows.real_T is None:
            return None
        return self.rows.real_T.view(len(self.rows.count_B), -1)


def mark_documents(
    ids_BS: Tensor, device: torch.device, *, attention: bool, balance: bool
) -> Documents:
    """Builds what a pass over these tokens must know about documents.

    Args:
        ids_BS: document ids of the input tokens, any integers; negative: padding. On the host, so
            that counting documents and rows does not wait for the device.
        device: the model's.
        attention: restrict attention to documents, and restart positions with each.
        balance: take losses over sequences over documents instead.
    """
    num_rows, length = ids_BS.numel(), ids_BS.shape[1]
    begins_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    begins_BS[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    run_T = begins_BS.flatten().cumsum(0) - 1
    first_X = begins_BS.flatten().nonzero().squeeze(1)
    length_X = torch.diff(first_X, append=torch.tensor([num_rows]))
    positions_BS = offsets = rows = None
    if attention:
        positions_T = torch.arange(num_rows) - first_X[run_T]
        positions_BS = on_device(positions_T.view_as(ids_BS), device)
        if num_rows and has_varlen_attention(device):
            offsets = on_device(torch.cat((first_X, torch.tensor([num_rows]))).int(), device)
    real_T = ids_BS.flatten() >= 0
    padded = not bool(real_T.all())
    if padded or balance:
        count_B = real_T.view_as(ids_BS).sum(1).float()
        rows = DocumentRows(num_rows, int(count_B.sum()), on_device(count_B, device))
    if rows is not None and padded:
        real_R = real_T.nonzero().squeeze(1)
        rows = replace(rows, real_R=on_device(real_R, device), real_T=on_device(real_T, device))
    if rows is not None and balance:
        real_X = real_T[first_X]
        length_D = length_X[real_X]
        document_T = (real_X.cumsum(0) - 1).clamp_min(0)[run_T]
        sequence_D = first_X[real_X] // length
        length_DB = torch.zeros(len(length_D), len(ids_BS))
        length_DB[torch.arange(len(length_D)), sequence_D] = length_D.float()
        rows = replace(
            rows,
            document_T=on_device(document_T, device),
            length_D=on_device(length_D, device),
            length_DB=on_device(length_DB, device),
        )
    longest = int(length_X.max()) if num_rows else 0
    return Documents(positions_BS, offsets, longest, rows, ids_BS)


def has_varlen_attention(device: torch.device) -> bool:
    """Returns whether torch's flash attention runs there; AMD's has not been tried with documents."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    built = torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


def _visible(documents: Documents) -> Tensor | None:
    if (positions_BS := documents.positions_BS) is None:
        return None
    place_S = torch.arange(positions_BS.shape[1], device=positions_BS.device)
    first_BS = place_S - positions_BS  # of the position's document
    return (place_S >= first_BS[..., None]).tril_()[:, None]


def with_neighbours(index_R: Tensor, times: int) -> Tensor:
    """Returns where rows are after each was split into `times` neighbours: (R·times,)."""
    return (index_R[:, None] * times + torch.arange(times, device=index_R.device)).flatten()
