"""Tiny child processes that speak the agent's line protocol, each with one fault.

Every script is run by `python -S -c`, needs nothing but the standard library, and says what it is
asked to say: `hello` to a started event, echoes with the request's id.
"""

from __future__ import annotations

import sys

_HEAD = """
import json, sys, time
def say(**event):
    sys.stdout.write(json.dumps(event) + "\\n"); sys.stdout.flush()
def commands():
    for line in sys.stdin:
        yield json.loads(line)
"""

AGGREGATOR = """
say(type="started")
for command in commands():
    say(type="state_evaluated", request_id=command["request_id"],
        state_hash=command.get("state_hash", ""), held_out_loss=1.5,
        loss_stderr=0.1, num_windows=64)
"""
REFUSING_AGGREGATOR = """
say(type="started")
for command in commands():
    say(type="failed", request_id=command["request_id"], error="VolunteerError",
        message="no such state", hint="look elsewhere")
"""
AGGREGATOR_CRASHES_WHEN_ASKED = """
say(type="started")
next(commands())
sys.exit(7)
"""
CRASHES_AT_ONCE = "sys.exit(3)"
SILENT = "sys.stdin.read()"
DEAF = "time.sleep(1000)"
CLOSES_STDOUT = """
import os
os.close(1)
time.sleep(1000)
"""
GARBAGE = """
sys.stdout.write("warning: not for you\\n{}\\n[[[[\\n\\n"); sys.stdout.flush()
sys.stdout.buffer.write(b"\\xff\\xfe\\n" + b"[" * 100000 + b"\\n"); sys.stdout.flush()
say(type="started")
sys.stdin.read()
"""
FLOOD = """
sys.stdout.write("x" * (2 * 1024 * 1024)); sys.stdout.flush()
time.sleep(1000)
"""

_TRAINER_HEAD = """
def started(last=None):
    say(type="started", device="cpu", device_name="a fake", inner_step=5, tokens_total=500,
        last_contribution=last)
def stepped(n):
    say(type="stepped", inner_step=n, tokens_total=100 * n, tokens_since_contribution=100,
        tokens_per_s=50.0, loss=2.5, lr=0.1)
"""
TRAINER = """
started()
for command in commands():
    if command["type"] == "rebase":
        say(type="rebased", commit_id=command["commit_id"], carried=[], discarded_tokens=0)
        stepped(6)
    if command["type"] == "stop":
        say(type="stopping", inner_step=6, tokens_total=600)
        say(type="snapshot_saved", inner_step=6, tokens_total=600, tokens_since_contribution=100)
        break
"""
TRAINER_OF_A_STOPPED_AGENT = """
started()
stepped(6)
say(type="stopping", inner_step=6, tokens_total=600)
say(type="snapshot_saved", inner_step=6, tokens_total=600, tokens_since_contribution=100)
sys.exit(75)
"""
TRAINER_IGNORES_STOP = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
started()
for command in commands():
    stepped(6)
time.sleep(1000)
"""
TRAINER_ANSWERS_AND_NEVER_STEPS = """
started()
for command in commands():
    if command["type"] == "rebase":
        say(type="rebased", commit_id=command["commit_id"], carried=[], discarded_tokens=0)
"""
TRAINER_STEPS_AND_CRASHES = """
started()
stepped(6)
sys.exit(1)
"""
TRAINER_FAILS = """
started()
say(type="failed", error="OutOfGpuMemoryError", message="the device is full", hint="close a game")
sys.exit(1)
"""
TRAINER_REFUSES = """
started()
say(type="failed", error="ConfigError", message="no such device", hint="take another")
sys.exit(1)
"""
TRAINER_DISK_FULL = """
started()
say(type="failed", error="StorageFullError", message="no space left to write it", hint="make room")
sys.exit(1)
"""
TRAINER_WITHOUT_DATA = """
say(type="preparing")
say(type="failed", error="DataUnavailableError", message="hf:x cannot be read", hint="")
sys.exit(1)
"""


def python(script: str) -> list[str]:
    """Return the argument list that runs one of the scripts."""
    return [sys.executable, "-S", "-c", _HEAD + _TRAINER_HEAD + script]
