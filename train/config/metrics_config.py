"""Which writers a run's metrics have beside metrics.jsonl: the section `train.metrics`."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator

SinkName = Literal["tensorboard", "wandb", "mlflow"]


class MetricsConfig(BaseModel):
    """Configures where metrics are written (docs/metrics.md); metrics.jsonl always is."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    sinks: tuple[SinkName, ...] = ("tensorboard",)
    """The sinks beside metrics.jsonl. Their keys and server addresses come from the environment."""

    sample_tokens: NonNegativeInt = 0
    """How many tokens the model writes after each of four validation prompts, at every evaluation;
    0: none. It costs as many forward passes over short rows."""

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
