"""Trains a llama of 6 million parameters on documentation, for judging quantisers.

    python benchmarks/train_small_llama.py [--out .cache/models/small-llama] [--threads 2]

The downloaded checkpoints came off some quantisation grid, and returning to it ranks nothing; these
weights were never quantised. The text is what every machine of ours has: docstrings of Python's
library, numpy and torch. `pydoc_data.topics` (Python's language reference) is left out, so that it
can be calibration text. Hidden size 256, so that q4_k and q6_k fit. Byte-level BPE of 4096 tokens,
trained on the same text.

The same seed, versions and machine give the same weights; other CPUs round differently. About
ten minutes of one core.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import math
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from models import DEFAULT_DIR, publish
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 4096
SPECIAL = ["<|bos|>", "<|eos|>"]
SEQUENCE, BATCH, STEPS, WARM_UP = 512, 1, 3000, 100
PEAK_RATE = 2e-3
SHORTEST = 120
"""Characters of a docstring worth reading."""
PACKAGES = ("numpy", "torch")
CHARACTERS_PER_PACKAGE = 3_000_000


def docstrings(root: Path) -> Iterator[str]:
    """Docstrings of every module under `root` in order of path; tests and packages left out."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"test", "tests", "idlelib", "site-packages", "pydoc_data"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST:
                    yield text


def corpus() -> list[str]:
    """All documents, each once, shuffled by the seed."""
    texts = dict.fromkeys(docstrings(Path(sysconfig.get_path("stdlib"))))
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        folder = Path(spec.origin or "").parent if spec else Path()
        taken = 0
        for text in docstrings(folder):
            if text not in texts and taken < CHARACTERS_PER_PACKAGE:
                texts[text] = None
                taken += len(text)
    documents = list(texts)
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0))
    return [documents[i] for i in order.tolist()]


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Byte-level BPE; deterministic for given documents."""
    tokenizer = Tokenizer(token_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """All documents as one row of ids, each led by the first special token."""
    encoded = tokenizer.encode_batch(documents)
    return torch.tensor([i for item in encoded for i in (0, *item.ids)])


def build_model() -> LlamaForCausalLM:
    """Random weights from the seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def rate(step: int) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine to a twentieth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def train(model: LlamaForCausalLM, stream: torch.Tensor) -> None:
    """AdamW on random windows of the stream; prints the loss of the last fifty steps."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(0)
    start, total = time.monotonic(), 0.0
    for step in range(1, STEPS + 1):
        first = torch.randint(len(stream) - SEQUENCE, (BATCH,), generator=generator)
        batch = torch.stack([stream[i : i + SEQUENCE] for i in first.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.item()
        if step % 50 == 0:
            spent = time.monotonic() - start
            print(f"step {step} of {STEPS}: loss {total / 50:.3f}, {spent:.0f} s", flush=True)
            total = 0.0


def write(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """The checkpoint as a Hugging Face directory."""
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "model_max_length": 1024,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Train unless the directory is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_DIR / "small-llama")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if not arguments.out.is_dir():
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        torch.set_num_threads(arguments.threads)
        documents = corpus()
        tokenizer = train_tokenizer(documents)
        stream = token_stream(tokenizer, documents)
        model = build_model()
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{len(documents)} documents, {len(stream)} tokens, {parameters} parameters")
        train(model, stream)
        publish(arguments.out, lambda out: write(model, tokenizer, out))
    print(arguments.out)


if __name__ == "__main__":
    main()
