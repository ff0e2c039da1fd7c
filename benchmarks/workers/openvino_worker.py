"""Runs inside OpenVINO GenAI's venv; commands as in `serve.py`.

One prompt goes through LLMPipeline, several through ContinuousBatchingPipeline, both with their
defaults but for threads, prefix caching and, for several, the tokens of a step: with its 256 the
first of 32 prompts would decode beside the last. Scoring compiles the same model with the same
defaults in OpenVINO itself: the pipelines show no logits.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from serve import serve


class FirstToken(genai.StreamerBase):
    """Notes when the first token comes."""

    def __init__(self) -> None:
        super().__init__()
        self.moment = 0.0

    def write(self, _: object) -> genai.StreamingStatus:
        """Called for each token."""
        self.moment = self.moment or time.perf_counter()
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Called after the last one."""


class Session:
    """A directory that optimum exported."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        self.path = path
        self.properties = {"INFERENCE_NUM_THREADS": threads}
        self.one = genai.LLMPipeline(path, "CPU", scheduler_config=scheduler(), **self.properties)
        self._several: genai.ContinuousBatchingPipeline | None = None
        self._scorer: ov.InferRequest | None = None

    def generate(self, prompts: list[list[int]], steps: int) -> tuple[float, float]:
        """Greedy; nothing ends a text."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = steps + 1, True, False
        inputs = [ov.Tensor(np.asarray([prompt], np.int64)) for prompt in prompts]
        if len(prompts) > 1:
            return self.batch(inputs, config)
        streamer = FirstToken()
        start = time.perf_counter()
        result = self.one.generate(inputs[0], config, streamer)
        end = time.perf_counter()
        count = len(result.tokens[0])
        if count != steps + 1:
            raise ValueError(f"{count} tokens came, not {steps + 1}")
        return streamer.moment - start, end - streamer.moment

    def batch(self, inputs: list[ov.Tensor], config: genai.GenerationConfig) -> tuple[float, float]:
        """Steps of all sequences together."""
        pipeline = self.several()
        start = time.perf_counter()
        handles = [pipeline.add_request(i, ids, config) for i, ids in enumerate(inputs)]
        counts, middle = [0] * len(handles), 0.0
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    counts[i] += sum(len(out.generated_ids) for out in handle.read().values())
            if not middle and all(counts):
                middle, early = time.perf_counter(), sum(counts) - len(counts)
        end = time.perf_counter()
        if set(counts) != {config.max_new_tokens} or early:
            raise ValueError(f"tokens came as {counts}, {early} of them before the last first one")
        return middle - start, end - middle

    def several(self) -> genai.ContinuousBatchingPipeline:
        """The pipeline for several sequences; made when first needed."""
        if self._several is None:
            config = scheduler()
            config.max_num_batched_tokens = 2048
            self._several = genai.ContinuousBatchingPipeline(
                self.path, config, "CPU", self.properties
            )
        return self._several

    def score(self, tokens: list[int], first: int) -> np.ndarray:
        """One run over everything."""
        if self._scorer is None:
            model = str(Path(self.path) / "openvino_model.xml")
            compiled = ov.Core().compile_model(model, "CPU", self.properties)
            self._scorer = compiled.create_infer_request()
        count = len(tokens)
        self._scorer.reset_state()
        feeds = {
            "input_ids": np.asarray([tokens], np.int64),
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        known = {name for value in self._scorer.model_inputs for name in value.names}
        self._scorer.infer({name: value for name, value in feeds.items() if name in known})
        return np.array(self._scorer.get_tensor("logits").data)[0, first:]


def scheduler() -> genai.SchedulerConfig:
    """The defaults, without answers from earlier prompts' caches."""
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = False
    return config


if __name__ == "__main__":
    serve(Session)
