"""What drafts from earlier in the text give: decode speed with and without, interleaved.

    .venv/bin/python -P benchmarks/prompt_lookup.py .cache/engines/smollm2 [--runs 7] [--set chat]

Two sets of prompts for a chat model: texts to repeat in part (a correction, a rewrite, a summary
that quotes, code to change), and plain chat. The answers must be the same, or it stops. A ratio is
median time without / median time with, of decoding alone; what comes first alternates.
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
            ratios = [measure(engine, prompt, arguments.runs) for prompt in prompts]
            print(f"{name}: median {statistics.median(ratios):.2f}, lowest {min(ratios):.2f}\n")


def measure(engine: SpikeEngine, prompt: str, runs: int) -> float:
    """The ratio for one prompt."""
    times: dict[str, list[float]] = {"off": [], "auto": []}
    for run in range(runs):
        order = ("off", "auto") if run % 2 else ("auto", "off")
        done = {kind: ask(engine, prompt, kind) for kind in order}
        if done["off"].token_ids != done["auto"].token_ids:
            raise SystemExit(f"drafts changed the answer to {prompt[:60]!r}")
        for kind in order:
            times[kind].append(done[kind].timings.decode)
    plain, drafted = (statistics.median(times[kind]) for kind in ("off", "auto"))
    drafts, tokens = done["auto"].speculation, len(done["auto"].token_ids)
    assert drafts is not None
    speeds = f"{(tokens - 1) / plain:.0f} to {(tokens - 1) / drafted:.0f} tokens/s"
    print(
        f"x{plain / drafted:.2f}, {speeds}, "
        f"{drafts.accepted} of {drafts.drafted} drafts right in {tokens} tokens: {prompt[:50]!r}",
        flush=True,
    )
    return plain / drafted


def ask(engine: SpikeEngine, prompt: str, speculative: str) -> Completion:
    """A greedy answer."""
    return engine.complete(prompt, chat=True, max_tokens=TOKENS, speculative=speculative)


if __name__ == "__main__":
    main()
