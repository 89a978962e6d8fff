"""Which writers a run's metrics have beside metrics.jsonl: the section `train.metrics`."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

SinkName = Literal["tensorboard", "wandb", "mlflow", "prometheus"]


class MetricsConfig(BaseModel):
    """Configures where metrics are written (docs/metrics.md); metrics.jsonl always is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Keys and servers' addresses come from the environment alone: WANDB_API_KEY,
    # MLFLOW_TRACKING_URI, …
    sinks: tuple[SinkName, ...] = ("tensorboard",)
    # of W&B, and the experiment of MLflow; none: what $WANDB_PROJECT and $MLFLOW_EXPERIMENT_NAME
    # say, or else "moebius"
    project: str | None = Field(default=None, min_length=1, max_length=128)
    # lines about steps from one picture of the experts' load to the next; 0: no pictures
    heat_map_every: NonNegativeInt = 100
    # lines from one with all depth steps to the next; those between have the worst depth step only
    depths_every: PositiveInt = 10
    # what the model writes after each of four beginnings of validation rows, at every evaluation; 0:
    # nothing. As many forward passes over short rows
    sample_tokens: NonNegativeInt = 0
    # where Prometheus finds the gauges, on rank 0's machine; port 0: a free one, which the log tells
    prometheus_host: str = "127.0.0.1"
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 0

    def check_samples(self, *, seq_len: int, causal: bool, paired: bool) -> None:
        """Checks that the model can write what `sample_tokens` asks for.

        Args:
            seq_len: of a row, prompt included.
            causal: what stands behind a position changes nothing at it, in evaluation.
            paired: labels are no continuation of their inputs.

        Raises:
            ValueError: it cannot.
        """
        if not self.sample_tokens:
            return
        if self.sample_tokens >= seq_len:
            raise ValueError(
                f"train.metrics.sample_tokens={self.sample_tokens} leaves no prompt in rows of "
                f"data.seq_len={seq_len}: ask for at most {seq_len - 1}"
            )
        why = ""
        if not causal:
            why = "a model of this router lets positions read later ones, and cannot write"
        elif paired:
            why = "a model of data.targets='paired' labels its inputs, and does not go on with them"
        if why:
            raise ValueError(
                f"train.metrics.sample_tokens={self.sample_tokens}: {why}; set it to 0"
            )

    @model_validator(mode="after")
    def _check_sinks(self) -> Self:
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(
                f"train.metrics.sinks={list(self.sinks)} names a sink twice: name each once"
            )
        return self
