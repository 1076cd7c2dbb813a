"""The benchmark beside peers: all do the same work, and a difference would be seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import ours
import peers
import plain
import work

STEPS, ROUNDS = 2, 2


def final(folder: Path) -> np.ndarray:
    return np.load(folder / "final.npy")


@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn", "cifar"])
def test_ours_ends_where_a_plain_loop_ends(model, tmp_path):
    work.write(tmp_path, model, 6, 3, STEPS, ROUNDS)
    work.make_comparable(tmp_path)
    work.read.cache_clear()
    plain.main(str(tmp_path), "cpu")
    expected, x = final(tmp_path), np.load(tmp_path / "x.npy")
    moved = np.abs(expected - x).max()
    assert len(json.loads((tmp_path / "times.json").read_text())) == ROUNDS + 1
    ours.main(str(tmp_path), "cpu", "auto", "replay")
    times = json.loads((tmp_path / "times.json").read_text())
    assert len(times) == ROUNDS + 1 and times == sorted(times)
    assert np.abs(final(tmp_path) - expected).max() <= 1e-9 * moved
    ours.main(str(tmp_path), "cpu", "auto", "replacement")  # other batches: the comparison must see it
    assert np.abs(final(tmp_path) - expected).max() > 10 * peers.TOLERANCE * moved


def test_a_peer_with_other_weights_is_named_in_words():
    us = peers.Figures(200.0, 0.1, 1.0, 1, 0.0)
    assert peers.speed(us, us) == "200"
    assert peers.speed(us._replace(rate=100.0), us) == "100 (2.0x)"
    assert peers.speed(us._replace(difference=0.02), us) == "weights differ by 2e-02"
    assert peers.speed(us._replace(difference=float("nan")), us) == "weights differ by nan"


def test_memory_is_counted_over_all_descendants():
    grow = "import time; held = bytearray(100 << 20); print(len(held), flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grow!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True)
    try:
        process.stdout.readline()
        assert 100 << 20 < peers.resident(process.pid) < 300 << 20
    finally:
        os.killpg(process.pid, 9)
        process.wait()
