"""Loads exported folders as a transformers user does, in a process without moebius.

python -I hf_reader.py FOLDER: writes answers.safetensors beside every folder in it. It is a
separate process, because the sources' folder may be on this one's path, and transformers would take
its kernels/ for the library of that name.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{sys.argv[1]}.home"}

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def padded(tokens, lengths, *, left: bool):
    """Returns the first tokens of every row, padded to one length, and the mask."""
    longest = int(lengths.max())
    ids, mask = torch.full((len(tokens), longest), 3), torch.zeros(len(tokens), longest).long()
    for row, length in enumerate(lengths.tolist()):
        place = slice(longest - length, None) if left else slice(0, length)
        ids[row, place], mask[row, place] = tokens[row, :length], 1
    return {"input_ids": ids, "attention_mask": mask}


def cached(model, tokens):
    """Returns all logits, computed in pieces of 5, 1, 1, 3 and the rest."""
    past, parts, first = None, [], 0
    for size in (5, 1, 1, 3, tokens.shape[1] - 10):
        piece = tokens[:, first : first + size]
        out = model(piece, past_key_values=past, use_cache=True)
        past, first = out.past_key_values, first + size
        parts.append(out.logits)
    return torch.cat(parts, 1), len(past)


def refusals(model, tokens):
    """Returns what the model says to other numbers of loops, without and with a cache."""
    past, said = model(tokens[:, :5], use_cache=True).past_key_values, []
    for loops, cache in ((0, None), (3, None), (1, past), (9, past)):
        try:
            model(tokens[:, 5:6], num_loops=loops, past_key_values=cache)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def answers_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all answers of one model."""
    given = load_file(folder.with_suffix(".given"))
    tokens, lengths = given["tokens"], given["lengths"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    model, info = loaded
    found = info if isinstance(info, dict) else vars(info)
    assert not any(found.values()), found
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    other = [
        key
        for key, value in model.state_dict().items()
        if key in stored and value.dtype != stored[key].dtype
    ]
    answers = {"logits": model(tokens).logits, "other_dtypes": torch.tensor(len(other))}
    answers["cached"], entries = cached(model, tokens)
    answers["cache_entries"] = torch.tensor(entries)
    for side in ("left", "right"):
        answers[side] = model(**padded(tokens, lengths, left=side == "left")).logits
    answers["last"] = model(tokens, logits_to_keep=1).logits
    answers["embedded"] = model(inputs_embeds=model.get_input_embeddings()(tokens)).logits
    greedy = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 3}
    short = padded(tokens, lengths.clamp_max(8), left=True)
    answers["generated"] = model.generate(**short, **greedy)
    beams = {**greedy, "max_new_tokens": 4, "num_beams": 3, "num_return_sequences": 2}
    answers["beams"] = model.generate(**short, **beams)
    answers["beams_without_cache"] = model.generate(**short, **beams, use_cache=False)
    if (
        model.config.model["layers_per_group"] < model.config.model["num_layers"]
        and model.halting is None
    ):
        for loops in (1, 3):
            answers[f"loops{loops}"] = model(tokens, num_loops=loops).logits
            answers[f"generated{loops}"] = model.generate(**short, **greedy, num_loops=loops)
    folder.with_suffix(".refused").write_text(json.dumps(refusals(model, tokens)))
    model.train()
    with torch.enable_grad():
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    answers["loss"] = loss.detach()
    answers["without_gradient"] = torch.tensor(
        sum(parameter.grad is None for parameter in model.parameters())
    )
    again = folder.with_suffix(".again")
    model.eval().save_pretrained(again)
    model = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
    answers["again"] = model(tokens).logits
    fresh = AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
    answers["fresh"] = fresh.eval()(tokens).logits
    return answers


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    for folder in sorted(path for path in Path(sys.argv[1]).iterdir() if path.suffix == ""):
        answers = answers_of(folder)
        save_file({k: v.contiguous() for k, v in answers.items()}, folder.with_suffix(".answers"))
        if folder.with_suffix(".texts").exists():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            texts = json.loads(folder.with_suffix(".texts").read_text())
            ids = tokenizer(texts)["input_ids"]
            words = [tokenizer.decode(row) for row in ids]
            said = io.StringIO()
            card = (folder / "README.md").read_text()
            example = card.split("```python\n")[1].split("```")[0]
            with contextlib.redirect_stdout(said):
                exec(example.replace("FOLDER", str(folder)), {})
            words_of_card = said.getvalue()
            written = {
                "ids": ids,
                "texts": words,
                "eos": tokenizer.eos_token_id,
                "card": words_of_card,
            }
            folder.with_suffix(".ids").write_text(json.dumps(written))
    assert "moebius" not in sys.modules


main()
