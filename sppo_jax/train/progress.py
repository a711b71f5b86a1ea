"""What a run shows while it works: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm


class Progress:
    """Shows steps as they are logged."""

    def __init__(self, num_steps: int, *, first: int = 0):
        """Show nothing yet; the clock starts with the first step, not with what is compiled before it.

        Args:
            num_steps: length of the run.
            first: steps that were done before.
        """
        self._num_steps, self._first, self._start_s = num_steps, first, 0.0
        is_terminal = sys.stdout.isatty()
        self._bar = tqdm(total=num_steps, initial=first, unit="step", file=sys.stdout) if is_terminal else None

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a step: `step`, `loss`, `tokens_per_s`, `step_s`, `mfu` and peak memory where known."""
        if not self._start_s:
            self._start_s = time.perf_counter() - metrics["step_s"] * (metrics["step"] - self._first)
        if self._bar is None:
            print(self._line(metrics), flush=True)
            return
        self._bar.set_postfix_str(f"loss {_loss(metrics)}, {metrics['tokens_per_s']:,.0f} tokens/s", refresh=False)
        self._bar.update(metrics["step"] - self._bar.n)

    def say(self, text: str) -> None:
        """Show a text between the steps."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stdout)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, metrics: Mapping[str, Any]) -> str:
        step, width = metrics["step"], len(str(self._num_steps))
        left_s = (time.perf_counter() - self._start_s) / (step - self._first) * (self._num_steps - step)
        parts = [
            f"step {step:>{width}}/{self._num_steps}",
            f"loss {_loss(metrics)}",
            f"{metrics['tokens_per_s']:,.0f} tokens/s",
            f"step {metrics['step_s']:.3f} s",
        ]
        if metrics.get("mfu") is not None:
            parts.append(f"mfu {metrics['mfu']:.1%}")
        for key, name in (("hbm_peak_bytes", "device"), ("host_peak_bytes", "host")):
            if metrics.get(key) is not None:
                parts.append(f"{name} {metrics[key] / 2**30:.1f} GiB")
        return "  ".join([*parts, f"eta {_clock(left_s)}"])


def _loss(metrics: Mapping[str, Any]) -> str:
    return "not finite" if metrics["loss"] is None else f"{metrics['loss']:.4f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
