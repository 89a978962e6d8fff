"""Which document every token of a micro-batch belongs to, and what of a pass respects it.

Rows are cut out of a stream of documents, or packed from several. A document is a run of equal ids
in a row; −1 is padding, of which nothing is asked. Respected are, each for itself:

    attention   a position sees its own document up to itself, and positions count from the
                document's first token: a document's rows are those that it would have alone
    balancing   a loss over sequences (MoEUT's entropy, DeepSeek's sequence-wise loss) is taken over
                documents instead, each weighed by its tokens
    padding     whatever else is wanted: it has no expert, no place in a capacity, and no part in
                any statistic, halting's depth included

The paper (MoEUT, arXiv 2405.16039) respects none: its rows are cut without regard to documents, and
without document ids everything is as published, bit for bit. What looks across sequences by design
still does: mixtures and expert choice meet other rows position by position, and a mixture takes
padding for a token like any other, since a group without it may be too small to be a mixture
(model/routers/mixture.py).

Cost: one mask of B·S·S bytes for all depth steps, and attention that computes all S·S scores where
the causal one computes half; a table of rotations per row instead of one for all. Where there is
padding the routes of the rest are a list without a rule, as under halting.

Legend: B sequences, S positions, T = B·S tokens (or h·T sub-tokens), R of them no padding, D
documents.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

PADDING = -1


@dataclass(frozen=True)
class DocumentRows:
    """Says which rows of a layer are no padding, and how those of one document lie together.

    All tensors are on the model's device but for the numbers.
    """

    num_rows: int  # T
    num_real: int  # R
    count_B: Tensor  # float32: real rows of each sequence
    real_R: Tensor | None = None  # int64, rising: the rows that are no padding; None: all are
    real_T: Tensor | None = None  # bool: the same
    # Only where balancing respects documents:
    document_T: Tensor | None = None  # int64, 0 … D−1; of padding 0, which nobody may ask for
    length_D: Tensor | None = None  # int64: rows of each document
    length_DB: Tensor | None = None  # float32: the same, in the column of the document's sequence

    def repeated(self, times: int) -> "DocumentRows":
        """Returns the same of rows that were each split into as many neighbours."""
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
    """Holds what the layers of one pass must know of documents, made once for all depth steps."""

    # Where attention respects documents, else None:
    positions_BS: Tensor | None  # int64: from the document's first token on, which is 0
    visible_B1SS: Tensor | None  # bool: which position (third) sees which (fourth)
    # Where there is padding, or balancing respects documents, else None
    rows: DocumentRows | None

    @property
    def real_BS(self) -> Tensor | None:
        """Returns which tokens are no padding, bool; None where there is no padding."""
        if self.rows is None or self.rows.real_T is None:
            return None
        return self.rows.real_T.view(len(self.rows.count_B), -1)


def mark_documents(
    ids_BS: Tensor, device: torch.device, *, attention: bool, balance: bool
) -> Documents:
    """Reads document ids, and returns what a pass over these tokens must know.

    Args:
        ids_BS: of the input tokens, any integers, below 0: padding. On the host, so that numbers of
            documents and rows are known without asking the device.
        device: the model's.
        attention: attention keeps to documents, and positions begin anew with each.
        balance: losses over sequences are taken over documents.
    """
    num_rows, length = ids_BS.numel(), ids_BS.shape[1]
    begins_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    begins_BS[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    run_T = begins_BS.flatten().cumsum(0) - 1
    first_X = begins_BS.flatten().nonzero().squeeze(1)  # of every run, padding included
    positions_BS = visible_B1SS = rows = None
    if attention:
        positions_BS = (torch.arange(num_rows) - first_X[run_T]).view_as(ids_BS).to(device)
        run_BS = run_T.view_as(ids_BS).to(device)
        visible_B1SS = (run_BS[:, :, None] == run_BS[:, None, :]).tril_()[:, None]
    real_T = ids_BS.flatten() >= 0
    padded = not bool(real_T.all())
    if padded or balance:
        count_B = real_T.view_as(ids_BS).sum(1).float()
        rows = DocumentRows(num_rows, int(count_B.sum()), count_B.to(device))
    if rows is not None and padded:
        real_R = real_T.nonzero().squeeze(1)
        rows = replace(rows, real_R=real_R.to(device), real_T=real_T.to(device))
    if rows is not None and balance:
        real_X = real_T[first_X]
        length_D = torch.diff(first_X, append=torch.tensor([num_rows]))[real_X]
        document_T = (real_X.cumsum(0) - 1).clamp_min(0)[run_T]
        sequence_D = first_X[real_X] // length
        length_DB = torch.zeros(len(length_D), len(ids_BS))
        length_DB[torch.arange(len(length_D)), sequence_D] = length_D.float()
        rows = replace(
            rows,
            document_T=document_T.to(device),
            length_D=length_D.to(device),
            length_DB=length_DB.to(device),
        )
    return Documents(positions_BS, visible_B1SS, rows)


def with_neighbours(index_R: Tensor, times: int) -> Tensor:
    """Returns where rows are after each was split into `times` neighbours: (R·times,)."""
    return (index_R[:, None] * times + torch.arange(times, device=index_R.device)).flatten()
