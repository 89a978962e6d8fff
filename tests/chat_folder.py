"""A folder with a tokenizer of bytes and a chat template."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

CHATML = """{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")


def folder_of(folder: Path, template: object = CHATML, **config: Any) -> Path:
    """Writes a tokenizer of bytes with a chat template in its tokenizer_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    library.add_special_tokens([*SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    written = named | {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(written | config))
    return folder
