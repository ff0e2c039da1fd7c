"""Runs inside onnxruntime-genai's venv; commands as in `serve.py`.

Generating is genai's own loop (greedy). Scoring runs the same model file in ONNX Runtime, from an
empty cache: genai shows the logits of the last position only.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
import onnxruntime_genai as og
from serve import serve

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
# Shorter caches than the model's window are refused while running.
LEAST_LENGTH = 640


class Session:
    """A directory that genai's builder made."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        config = og.Config(path)
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = og.Model(config)
        self.path, self.threads = Path(path), threads
        self._scorer: ort.InferenceSession | None = None

    def generate(self, prompts: list[list[int]], steps: int) -> tuple[float, float]:
        """Prompts of one length; a token that would end a text is not allowed to come."""
        length = max(len(prompts[0]) + steps + 1, LEAST_LENGTH)
        start = time.perf_counter()
        params = og.GeneratorParams(self.model)
        params.set_search_options(
            max_length=length, min_length=length, batch_size=len(prompts), do_sample=False
        )
        generator = og.Generator(self.model, params)
        generator.append_tokens(np.asarray(prompts, np.int32))
        generator.generate_next_token()
        generator.get_next_tokens()
        middle = time.perf_counter()
        for _ in range(steps):
            generator.generate_next_token()
            generator.get_next_tokens()
        seconds = time.perf_counter() - middle
        if generator.token_count() != len(prompts[0]) + steps + 1:
            raise ValueError(
                f"{generator.token_count()} tokens, not {len(prompts[0])} + {steps + 1}"
            )
        return middle - start, seconds

    def score(self, tokens: list[int], first: int) -> np.ndarray:
        """One run over everything."""
        session = self.scorer()
        count = len(tokens)
        feeds = {
            "input_ids": np.asarray([tokens], np.int64),
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count, dtype=np.int64)[None],
        }
        decoder = json.loads((self.path / "genai_config.json").read_text())["model"]["decoder"]
        empty = (1, decoder["num_key_value_heads"], 0, decoder["head_size"])
        for value in session.get_inputs():
            if value.name.startswith("past_key_values"):
                feeds[value.name] = np.zeros(empty, TYPES[value.type])
        names = {value.name for value in session.get_inputs()}
        (logits,) = session.run(["logits"], {k: v for k, v in feeds.items() if k in names})
        return np.asarray(logits)[0, first:]

    def scorer(self) -> ort.InferenceSession:
        """The model as an ONNX Runtime session; made when first asked for."""
        if self._scorer is None:
            options = ort.SessionOptions()
            options.intra_op_num_threads = self.threads
            options.log_severity_level = 4
            self._scorer = ort.InferenceSession(str(self.path / "model.onnx"), options)
        return self._scorer


if __name__ == "__main__":
    serve(Session)
