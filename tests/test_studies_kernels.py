"""The cost model's attention against NVIDIA's measured rates: within bounds, and better than one efficiency for all."""

import sys
from dataclasses import replace

import pytest

from studies import kernels

POINTS = list(kernels.points())


def test_rates_are_predicted_within_bounds():
    whole = [point for point in POINTS if point.queries == point.keys]
    chunks = [point for point in POINTS if point.queries != point.keys]
    assert (len(whole), len(chunks)) == (20, 72)
    assert kernels.mean_error(whole) < 0.05
    assert kernels.mean_error(chunks) < 0.10
    assert max(abs(point.error) for point in POINTS) < 0.25


def test_what_set_a_devices_efficiency_comes_out():
    used = [point for point in POINTS if point.used]
    assert [(point.device, point.kind) for point in used] == list(kernels.WHOLE)
    for point in used:
        assert point.predicted == pytest.approx(point.measured, rel=0.02)


def test_waves_are_what_short_chunks_need(monkeypatch):
    flat = {name: replace(device, attention_rows=0) for name, device in kernels.DEVICES.items()}
    monkeypatch.setattr(kernels, "DEVICES", flat)
    chunks = [point for point in kernels.points() if point.queries != point.keys]
    assert kernels.mean_error(chunks) > 0.5


def test_the_command_prints_the_block(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels.py"])
    assert kernels.main() == 0
    assert "| h200, forward | 534 / " in capsys.readouterr().out
