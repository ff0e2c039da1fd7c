"""Who is expected to end soon goes first, for a while: ranks of requests by predicted length.

With a model, a request ranks behind its submission by so much per token of its prompt and of the
guess of its answer, until it has waited for its first token as long as the bound says: then it
ranks by its submission, as if there were no model. So whoever is overtaken is so only by requests
that came within the bound after it. (A delay that doesn't end would have to be capped by the same
bound, and win less.) Where the model is slow or returns no numbers, all are delayed alike: first
come, first served.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .checks import out_of_range, require_real
from .sequence import Request

FEATURES = ("log_prompt_tokens", "first_tokens_entropy", "jitter")
FIRST_TOKENS = 16
STEPS = 32  # whose times give the jitter
Predict = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""Features ``[N, 3]`` -> log(output tokens) ``[N]``."""


@dataclass(frozen=True)
class LengthPolicy:
    """Ordering by expected length.

    Attributes:
        model: an ONNX file, one input float32 ``[N, 3]`` (`FEATURES`), one output float32 ``[N]``,
            the natural logarithm of the output's tokens; None = first come, first served.
        every: seconds between two looks at new requests.
        budget: seconds the model may take; a slower answer is not used.
        seconds_per_token: behind its submission a request ranks for each token of its prompt and
            of its expected output (short answers to long prompts are no short work).
        most: seconds without a first token after which it ranks by its submission; also how far
            behind that it ranks as long as nothing is known.

    Raises:
        SpikeError: SPK608, a value out of range.
    """

    model: str | Path | None = None
    every: float = 0.2
    budget: float = 0.02
    seconds_per_token: float = 0.03
    most: float = 5.0

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, str | Path):
            raise out_of_range("model", self.model, "a path or None")
        for name in ("every", "budget", "seconds_per_token", "most"):
            require_real(name, getattr(self, name))


class LengthOrder:
    """Says how far behind their submission requests rank.

    Args:
        policy: see there.
        predict: in place of the policy's model.
        now: a clock for the model's own time.
    """

    def __init__(
        self,
        policy: LengthPolicy,
        predict: Predict | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._policy = policy
        self._predict = predict or _open(policy.model)
        self._now = now
        self._last = -float("inf")
        self._steps: deque[float] = deque(maxlen=STEPS)
        self.refused = 0  # answers that came too late or were no numbers

    @property
    def unknown(self) -> float:
        """Seconds behind its submission of a request about which nothing is known."""
        return 0.0 if self._predict is None else self._policy.most

    def observe(self, seconds: float) -> None:
        """A step took so long."""
        self._steps.append(seconds)

    def overdue(self, request: Request, now: float) -> bool:
        """Whether a delayed request has waited long enough for its first token."""
        waits = request.delayed and request.clock.first is None
        return waits and now - request.clock.submitted >= self._policy.most

    def due(self, now: float) -> bool:
        """Whether to look at new requests; at most every `LengthPolicy.every` seconds."""
        if self._predict is None or now < self._last + self._policy.every:
            return False
        self._last = now
        return True

    def delays(self, requests: Sequence[Request]) -> list[float]:
        """Seconds behind their submission of these, at least one; `unknown` without an answer."""
        assert self._predict is not None  # `due`
        started = self._now()
        try:
            answer = self._predict(np.stack([self.features(r) for r in requests]))
            tokens = np.exp(np.asarray(answer, np.float32))
        except (TypeError, ValueError):  # texts, maps: a model of something else
            tokens = np.empty(0, np.float32)
        late = self._now() - started > self._policy.budget
        if late or tokens.shape != (len(requests),) or not np.isfinite(tokens).all():
            self.refused += 1
            return [self.unknown] * len(requests)
        work = tokens + np.array([request.prompt_tokens for request in requests])
        return [float(seconds) for seconds in work * self._policy.seconds_per_token]

    def features(self, request: Request) -> NDArray[np.float32]:
        """What is known of a request before it runs, float32 ``[3]``."""
        first = np.array(request.tokens[:FIRST_TOKENS])
        shares = np.unique(first, return_counts=True)[1] / first.size
        entropy = -float((shares * np.log2(shares)).sum())
        return np.array([np.log(request.prompt_tokens), entropy, self._jitter()], np.float32)

    def _jitter(self) -> float:
        """Deviation of the last steps' times over their mean; 0 before there are two."""
        if len(self._steps) < 2:
            return 0.0
        times = np.array(self._steps)
        return float(times.std() / max(times.mean(), 1e-9))


def _open(model: str | Path | None) -> Predict | None:
    """The model of a file; None, with a warning, if it can't be used."""
    if model is None:
        return None
    try:
        import onnxruntime as ort  # a runtime of tokens only has it loaded already

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        (name,) = [value.name for value in session.get_inputs()]
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        cause = " ".join(str(error).split())
        warnings.warn(f"{model} is not used, first come, first served: {cause}", stacklevel=2)
        return None

    def predict(features: NDArray[np.float32]) -> NDArray[np.float32]:
        try:
            answer: NDArray[np.float32] = np.asarray(session.run(None, {name: features})[0])
        except Exception:  # of another interface: no answer
            return np.full(len(features), np.nan, np.float32)
        return answer

    return predict
