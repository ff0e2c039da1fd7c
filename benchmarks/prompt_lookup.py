"""What drafts from earlier in the text give: decode speed with and without, interleaved.

    .venv/bin/python -P benchmarks/prompt_lookup.py .cache/engines/smollm2 [--runs 7] [--set chat]

Two sets of prompts for a chat model: texts to repeat in part (a correction, a rewrite, a summary
that quotes, code to change), and plain chat. The answers must be the same, or it stops. Each run
asks three times, without drafts, without again, and with, in an order that goes round. A ratio is
the median over the runs of time without / time with, of decoding alone; beside it, for the noise,
that of without / without again.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from spikeinfer import Completion, SpikeEngine

TOKENS = 96
LETTER = (
    "Dear Ms Okafor, thank you for you're letter of 3 March about the water pump in building "
    "seven. Our technician have visited the building on Monday and found that the pump runs "
    "normally, but that the pressure valve on the second floor was not closing properly. He "
    "replaced the valve, tested the pump again for two hours, and wrote the readings into the "
    "maintenance book. If the noise comes back, please call us at once under the number below, "
    "and we will send somebody the same day. Kind regards, Tomas Lindqvist"
)
REPORT = (
    "The Halden bridge was closed on Tuesday after inspectors found cracks in two of its twelve "
    "steel hangers. The bridge carries about nine thousand vehicles a day across the Tista river. "
    "Traffic is being sent over the old stone bridge in the town, where trucks above ten tonnes "
    "are not allowed. The road administration said that the cracks had not been there in the "
    "inspection of last autumn. Engineers will replace the two hangers and examine the other ten "
    "with ultrasound. The bridge is expected to open again for cars in three weeks, and for "
    "trucks in two months. A ferry for trucks will run from Friday on."
)
CODE = '''def total_price(items, tax_rate, discount=0):
    """Return the price of all items with tax."""
    subtotal = 0
    for item in items:
        if item.quantity < 1:
            raise ValueError("quantity must be positive")
        subtotal += item.price * item.quantity
    subtotal -= subtotal * discount
    tax = subtotal * tax_rate
    return round(subtotal + tax, 2)'''
EDITS = (
    f"Correct the spelling and grammar of this letter. Repeat the whole letter.\n\n{LETTER}",
    f"Rewrite this letter with 'Mr Adeyemi' in place of 'Ms Okafor', else the same.\n\n{LETTER}",
    f"Make this letter more friendly.\n\n{LETTER}",
    f"Summarize this report in its own sentences, word for word where you can.\n\n{REPORT}",
    f"Proofread this report.\n\n{REPORT}",
    f"Which sentences of this report are about trucks? Quote them.\n\n{REPORT}",
    f"Rename the variable subtotal to amount in this function, and print all of it.\n\n{CODE}",
    f"Write this function again with type hints.\n\n{CODE}",
)
CHATS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I cook with rice, tomatoes and two eggs?",
    "Explain to a child how a refrigerator works.",
    "Give me advice on how to prepare for a job interview.",
    "What is the difference between a virus and a bacterium?",
    "What are the main causes of the French Revolution?",
    "Write a poem about autumn rain.",
    "What is a good name for a small bakery, and why?",
    "Describe the water cycle in a few sentences.",
    "Write a polite email to a neighbour about loud music at night.",
    "Tell me a joke about a cat, and explain it.",
    "Who was Marie Curie?",
    "How do I sharpen a kitchen knife?",
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--set", choices=("edit", "chat"), help="only this one")
    arguments = parser.parse_args()
    with SpikeEngine(arguments.engine) as engine:
        for name, prompts in (("edit", EDITS), ("chat", CHATS)):
            if arguments.set not in (None, name):
                continue
            pairs = [measure(engine, prompt, arguments.runs) for prompt in prompts]
            for title, ratios in zip(("drafts", "noise"), zip(*pairs, strict=True), strict=True):
                print(f"{name}, {title}: median {statistics.median(ratios):.3f}, "
                      f"{min(ratios):.3f} to {max(ratios):.3f}")  # fmt: skip


def measure(engine: SpikeEngine, prompt: str, runs: int) -> tuple[float, float]:
    """The ratio for one prompt, and what it is of the same with the same."""
    kinds = ("off", "again", "auto")
    gains, noise = [], []
    for run in range(runs):
        order = kinds[run % 3 :] + kinds[: run % 3]
        done = {kind: ask(engine, prompt, "auto" if kind == "auto" else "off") for kind in order}
        if done["off"].token_ids != done["auto"].token_ids:
            raise SystemExit(f"drafts changed the answer to {prompt[:60]!r}")
        off, again, auto = (done[kind].timings.decode for kind in kinds)
        gains.append((off + again) / 2 / auto)
        noise.append(off / again)
    drafts, tokens = done["auto"].speculation, len(done["auto"].token_ids)
    assert drafts is not None
    gain, same = statistics.median(gains), statistics.median(noise)
    print(
        f"x{gain:.3f} (noise x{same:.3f}), {drafts.accepted} of {drafts.drafted} drafts right in "
        f"{tokens} tokens: {prompt[:50]!r}",
        flush=True,
    )
    return gain, same


def ask(engine: SpikeEngine, prompt: str, speculative: str) -> Completion:
    """A greedy answer."""
    return engine.complete(prompt, chat=True, max_tokens=TOKENS, speculative=speculative)


if __name__ == "__main__":
    main()
