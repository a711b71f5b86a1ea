"""What a process wants done: go on, save, stop."""

import os
import signal

import jax
import numpy as np
from jax.sharding import Mesh

from sppo_jax.stopping import ENDS, SAVES, Stopping, in_force
from sppo_jax.train.signals import GO, SAVE, STOP, Signals

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "pipe"))


def test_wishes_are_an_element_a_device_made_once():
    signals = Signals(MESH)
    assert signals.array().shape == (4,) and len(signals.array().sharding.device_set) == 4
    assert signals.array() is signals.array()
    assert (np.asarray(signals.array()) == GO).all() and (np.asarray(signals.array(save=True)) == SAVE).all()


def test_sigterm_is_a_wish_to_stop():
    before = signal.getsignal(signal.SIGTERM)
    with Signals(MESH) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop_reason == "SIGTERM"
        assert (np.asarray(signals.array(save=True)) == STOP).all()
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_command_that_takes_signals_keeps_them():
    """Before the first step they are the command's, from then on requests."""
    with Stopping() as stopping:
        with Signals(MESH) as signals:
            assert in_force() is stopping and stopping.mode == ENDS
            signals.begin()
            assert stopping.mode == SAVES
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.stop_reason == "SIGHUP"
        assert in_force() is stopping
