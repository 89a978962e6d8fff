"""TensorBoard's event files in the run folder: curves, pictures of the load, hyper-parameters, events.

Everything goes into one folder, hyper-parameters too (`SummaryWriter.add_hparams` would make a
second run of them). What a lost process or an abandoned way wrote beyond a step is hidden by
`purge_step`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..metrics.curves import depth_numbers, points_of, router_of
from ..metrics.records import Record, RunFacts, flat_values, is_matrix
from .heat_map import draw_load

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
_FLUSH_S = 20
# One chart for all depth steps of a statistic, on the page "Custom Scalars".
_LAYOUT = {
    "loss": {"train and validation": ["Multiline", [r"loss/(train|validation)"]]},
    "experts by depth step": {
        statistic: ["Multiline", [rf"experts_by_depth/{statistic}/.*"]]
        for statistic in ("max_violation", "effective_experts", "drop_fraction", "gate_mean")
    },
}


class TensorBoard:
    """Writes event files; one writer at a time, opened anew where steps are to be forgotten."""

    def __init__(self, facts: RunFacts, first_step: int | None) -> None:
        """Opens the files; what was written from `first_step` on is hidden, None: nothing is."""
        self._facts = facts
        self._writer = self._open(first_step)
        self._write_start()

    def write(self, records: Sequence[Record]) -> None:
        """Writes numbers, every so often depth steps and a picture, and events as text."""
        for record in records:
            for point in points_of(
                record, depths=self._facts.expert_depths, by_depth=self._is_due(record)
            ):
                self._writer.add_scalar(
                    point.path, point.value, record.step, walltime=record.time_s
                )
            self._draw_loads(record)
            for index, sample in enumerate(record.values.get("samples", ())):
                self._writer.add_text(
                    f"samples/{index + 1}", sample_text(sample), record.step, record.time_s
                )
            if text := event_text(record):
                self._writer.add_text("events", text, record.step, walltime=record.time_s)

    def go_back_to(self, step: int) -> None:
        """Hides what was written beyond a step."""
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self, state: str) -> None:
        """Writes how the run ended, and closes the file."""
        if state == "finished":
            self._add_hparams(has_finished=True)
        self._writer.close()

    def _open(self, first_step: int | None) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter  # half a second that only rank 0 spends

        return SummaryWriter(
            str(self._facts.run_dir / FOLDER), purge_step=first_step, flush_secs=_FLUSH_S
        )

    def _is_due(self, record: Record) -> bool:
        return record.number % self._facts.settings.depths_every == 0

    def _draw_loads(self, record: Record) -> None:
        every = self._facts.settings.heat_map_every
        if record.kind != "train" or not every or record.number % every:
            return
        for name, value in record.values.items():
            kind, statistic = router_of(name)
            if statistic == "expert_load" and is_matrix(value):
                depths = depth_numbers(kind, len(value), self._facts.expert_depths)
                title = f"load of experts of {kind.replace('_', '-')}, step {record.step}"
                picture = draw_load(value, depths, title=title)
                self._writer.add_image(
                    f"experts/load/{kind}",
                    picture,
                    record.step,
                    walltime=record.time_s,
                    dataformats="HWC",
                )

    def _write_start(self) -> None:
        self._writer.add_custom_scalars(_LAYOUT)
        text = json.dumps(self._facts.config, indent=2).replace("\n", "\n    ")
        self._writer.add_text("configuration", f"    {text}", 0)
        self._add_hparams(has_finished=False)

    def _add_hparams(self, *, has_finished: bool) -> None:
        """Adds the configuration as hyper-parameters, or that the run with them has finished."""
        from torch.utils.tensorboard.summary import hparams

        file_writer = self._writer.file_writer
        assert file_writer is not None, "a writer that is not closed has a file"
        judged_by = {"loss/validation": 0.0, "loss/train": 0.0}  # only their names are written
        begun, started, ended = hparams(flat_values(self._facts.config), judged_by)
        for summary in (ended,) if has_finished else (begun, started):
            file_writer.add_summary(summary)


def sample_text(sample: Mapping[str, str]) -> str:
    """Returns a beginning and how the model goes on with it, as a block that is no Markdown."""
    whole = f"{sample['prompt']} ▶ {sample['continuation']}"
    return "\n".join(f"    {line}" for line in whole.splitlines())


def event_text(record: Record) -> str:
    """Returns what happened to the run as a sentence; "": the line tells of numbers alone."""
    values = record.values
    match record.kind:
        case "start" if values.get("resumed_from_step") is not None:
            return (
                f"generation {values.get('generation')} goes on from step "
                f"{values['resumed_from_step']} with {values.get('world_size')} ranks"
            )
        case "start":
            return f"started with {values.get('world_size')} ranks"
        case "in_place":
            return f"ranks {values.get('ranks')} were replaced; on from step {record.step}"
        case "rollback":
            return f"went back to step {values.get('to_step')}: {values.get('why')}"
        case "checkpoint" | "checkpoint_copy" if values.get("error"):
            return f"{record.kind.replace('_', ' ')} failed: {values['error']}"
        case "checkpoint_set_aside":
            return f"a damaged checkpoint was set aside: {values.get('why')}"
        case "end":
            return str(values.get("state"))
        case _:
            return ""
