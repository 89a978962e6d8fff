"""Registers our checkpoints with EleutherAI's lm-evaluation-harness as the model `moebius`.

    moebius lm-eval --model moebius --model_args path=runs/mine --tasks hellaswag,arc_easy

The harness has no plugin mechanism for models, so `lm_eval` knows this one only after importing
this module. The command above imports it and passes everything on; a task file can import it too
(docs/evaluate.md).

Rows are scored as in our own tasks (scoring.py): a text without context follows an end of document,
long rows lose their left end, and options share their context's pass. The harness runs in one
process, because it would gather results as pickled objects, which our ranks refuse. `moebius eval`
runs on several ranks.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from ..distributed.process.process import start_process
from .batches import Row, rolling_rows
from .generate import generate
from .restore import refuse_pairs, restore, tokenizer_of_run
from .scoring import open_scorer
from .tasks.task import Encoder, TaskError
from .text import draw_group_context

logger = logging.getLogger(__name__)

_KNOWN = {"do_sample", "until", "max_gen_toks", "temperature"}  # options of a generation request


@register_model("moebius")
class MoebiusLM(TemplateLM):
    """Wraps the checkpoint of a run folder for the harness.

    Args:
        path: the run folder.
        step: of the checkpoint; None: the newest.
        max_length: the longest input in tokens; None: as in training.
        seed: of sampled text and of group contexts.
        device: cpu; any other value uses a GPU if there is one.
        batch_size: ignored: the rows determine batch sizes.
        max_batch_size: ignored.

    Raises:
        ValueError: the run or its checkpoint cannot be read, the model reads later positions, or
            there are several processes.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        step: int | None = None,
        max_length: int | None = None,
        seed: int = 0,
        device: str | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
    ) -> None:
        super().__init__()
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            # The harness passes "cuda" unless --device says otherwise.
            logger.warning("the harness requested %s, which is missing: scoring on the CPU", device)
        with start_process("cpu" if device == "cpu" else "auto") as process:
            if process.world_size > 1:
                raise ValueError(
                    f"the harness scores moebius' models in one process, and this is one of "
                    f"{process.world_size}: start it without torchrun, or use `moebius eval --tasks`"
                )
            restored = restore(Path(path), process, step=step)
        refuse_pairs(restored)
        self._restored, self._seed = restored, seed
        self._device = process.device
        length = int(max_length or restored.config.data.seq_len)
        self._encoder = Encoder(tokenizer_of_run(restored), length)
        self._scorer = open_scorer(restored, seed=seed)

    @property
    def eot_token_id(self) -> int:
        """Returns the id of the end of a document."""
        return self._encoder.end_of_document

    @property
    def max_length(self) -> int:
        """Returns the longest input in tokens."""
        return self._encoder.context

    def get_model_info(self) -> dict[str, object]:
        """Returns what the harness records beside its results."""
        parameters = sum(parameter.numel() for parameter in self._restored.model.parameters())
        return {
            "model_num_parameters": parameters,
            "model_dtype": str(self._restored.model.embedding.dtype),
            "model_step": self._restored.step,
            "model_max_length": self.max_length,
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Returns a text's tokens; no special tokens are added."""
        return self._encoder.ids(string)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: object,
    ) -> list[tuple[float, bool]]:
        """Returns each continuation's log-likelihood and whether it is the greedy one."""
        families: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, _) in enumerate(requests):
            families.setdefault(tuple(context), []).append(number)
        rows = [
            [self._row(*requests[number]) for number in numbers] for numbers in families.values()
        ]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        hidden = disable_tqdm
        with tqdm(total=len(requests), desc="loglikelihood", disable=hidden) as bar:
            found = self._scorer.score(rows, advance=lambda more: (bar.update(more), None)[1])
        for numbers, scores in zip(families.values(), found, strict=True):
            for number, score in zip(numbers, scores, strict=True):
                texts, _, continuation = requests[number]
                answers[number] = (score.total(), score.greedy_S.tolist() == continuation)
                self.cache_hook.add_partial("loglikelihood", texts, answers[number])
        return answers

    def _row(self, texts: tuple[str, str], context: list[int], continuation: list[int]) -> Row:
        try:
            return self._encoder.row(context, continuation)
        except TaskError as error:
            raise TaskError(f"{texts[0][-60:]!r} + {texts[1][:60]!r}: {error}") from error

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-likelihood of every text; each token is scored once."""
        texts: list[str] = [request.args[0] for request in requests]
        families: list[list[Row]] = [
            rolling_rows(self.tok_encode(text), self.eot_token_id, self.max_length)
            for text in texts
        ]
        answers = []
        for text, scores in zip(texts, self._scorer.score(families), strict=True):
            answers.append(sum(score.total() for score in scores))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answers[-1])
        return answers

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the generated continuation of every context, up to a stop sequence."""
        answers = []
        for request in tqdm(requests, desc="generate_until", disable=disable_tqdm):
            asked: tuple[Any, ...] = request.args
            answers.append(self._write(asked[0], asked[1]))
            self.cache_hook.add_partial("generate_until", asked, answers[-1])
        return answers

    def _write(self, context: str, options: dict[str, Any]) -> str:
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(options))
        if unknown := sorted(set(wanted) - _KNOWN):
            raise ValueError(
                f"unknown generation options {', '.join(unknown)}; known: {', '.join(sorted(_KNOWN))}"
            )
        room = self.max_length - wanted["max_gen_toks"]
        if room < 1:
            raise ValueError(
                f"max_gen_toks={wanted['max_gen_toks']} leaves no room for a prompt in a context of "
                f"{self.max_length} tokens; lower it"
            )
        prompt = (self.tok_encode(context) or [self.eot_token_id])[-room:]
        written, text = [], ""
        for token in generate(
            self._restored.model,
            torch.tensor(prompt, device=self._device),
            num_tokens=wanted["max_gen_toks"],
            temperature=wanted.get("temperature", float(bool(wanted.get("do_sample")))),
            seed=self._seed,
            context_MS=draw_group_context(
                self._restored, len(prompt) + wanted["max_gen_toks"], seed=self._seed
            ),
        ):
            if token == self.eot_token_id:
                break
            written.append(token)
            text = self._encoder.tokenizer.decode(written)
            if any(stop and stop in text for stop in wanted["until"]):
                break
        return postprocess_generated_text(text, wanted["until"], None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the harness's own command line with `--model moebius` registered."""
    from lm_eval.__main__ import cli_evaluate

    if arguments is not None:
        sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
