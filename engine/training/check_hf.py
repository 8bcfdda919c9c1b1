"""Checks the target in Hugging Face transformers against our own forward pass: `python -m training.check_hf DIR`.

Needs the transformers package, which nothing else here does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from training.export import load_target
from training.recipe import FULL

PROMPT = "Write a Python function gcd(a, b) that returns the greatest common divisor of a and b."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    folder = parser.parse_args().models / "target"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tok = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": PROMPT}]
    text = tok.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tok(text, return_tensors="pt", add_special_tokens=False).input_ids
    ours = load_target(folder, FULL.shape)
    with torch.no_grad():
        difference = (ours.logits(ours(ids)[0]) - model(ids).logits).abs().max().item()
        output = model.generate(ids, max_new_tokens=120, do_sample=False)
    print(f"largest logit difference {difference:.2e}")
    print(tok.decode(output[0, ids.shape[1] :]))
    if difference > 1e-3:
        raise SystemExit("the two forward passes disagree")


if __name__ == "__main__":
    main()
