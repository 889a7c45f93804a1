"""Child of model.py: GGUF file -> model folder with safetensors, tokenizer and chat template.

`python -m kvferry.launch.convert SOURCE.gguf TARGET DTYPE`. Lines that begin with "> " are progress.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path


def _say(line: str) -> None:
    print(f"> {line}", flush=True)


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the parent is gone
    os._exit(1)


def main(source: Path, target: Path, dtype: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _say(f"{source.name}: loading transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _say(f"{source.name}: reading and dequantising")
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
    )
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config  # the weights are plain now
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if not tokenizer.chat_template:
        raise SystemExit(f"{source.name} has no chat template")
    _say(f"{source.name}: writing {dtype} safetensors and tokenizer")
    target.mkdir(parents=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
