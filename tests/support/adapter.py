"""A LoRA adapter of random weights for the test model: it changes what the model says, and what is in its KV."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8


def make(folder: Path, model: Path) -> Path:
    """In `folder`, in the format of peft. `model`: a folder with the `config.json` of a Llama."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    outs = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    draw = torch.Generator().manual_seed(11)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in outs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, hidden, generator=draw) * 0.05
            weights[f"{at}.lora_B.weight"] = torch.randn(out, RANK, generator=draw) * 0.05
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(outs),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
