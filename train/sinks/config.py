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
    # where Prometheus finds the gauges, on rank 0's machine; port 0: a free one, which the log tells
    prometheus_host: str = "127.0.0.1"
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 0

    @model_validator(mode="after")
    def _check_sinks(self) -> Self:
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(
                f"train.metrics.sinks={list(self.sinks)} names a sink twice: name each once"
            )
        return self
