"""One area after the other: look at the machine, and judge what was seen.

Runs in: the command line. The looks are here and in `read_*`; the judging is in `*_checks`, pure.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import get_args

from volunteer.config import Config
from volunteer.doctor.check import Area, Check, LookError, within
from volunteer.doctor.clock_checks import clock_checks, read_synchronized
from volunteer.doctor.disk_checks import disk_checks
from volunteer.doctor.facts import AgentFacts
from volunteer.doctor.gpu_checks import GpuFacts, gpu_checks, pip_command, read_cards
from volunteer.doctor.idle_checks import agent_decision, idle_checks, look, own_decision
from volunteer.doctor.network_checks import network_checks, read_network
from volunteer.doctor.nvidia import NvidiaFacts, read_nvidia
from volunteer.doctor.terminal_checks import TerminalFacts, terminal_checks
from volunteer.doctor.torch_facts import TorchFacts, read_torch
from volunteer.locations import Locations
from volunteer.policy.veto import Cause

AREAS: tuple[Area, ...] = get_args(Area)
GPU_DEADLINE_S = 10.0
"""For the NVIDIA driver, which wakes the cards first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """The machine that is examined."""

    config: Config
    locations: Locations
    environ: Mapping[str, str]
    agent: AgentFacts | None
    """What the running agent says; None: none runs, or it does not answer."""
    is_agent_silent: bool = False
    """Whether one runs that does not answer."""
    pid: int
    """Of the program that asks."""


def examine(area: Area, patient: Patient) -> list[Check]:
    """Return every check of one area; takes up to a minute for `gpu`, some seconds else."""
    if area == "idle":
        return _idle(patient)
    if area == "gpu":
        return gpu_checks(read_gpus(), patient.config)
    if area == "network":
        is_running = patient.agent is not None or patient.is_agent_silent
        facts = read_network(patient.config, is_agent_running=is_running)
        is_silent = patient.is_agent_silent
        return network_checks(facts, patient.agent, patient.config, is_agent_silent=is_silent)
    if area == "disk":
        return disk_checks(patient.config, patient.locations, patient.agent)
    if area == "terminal":
        return terminal_checks(read_terminal(patient.environ))
    now = datetime.now().astimezone()
    return clock_checks(
        patient.agent,
        now,
        is_synchronized=read_synchronized(),
        is_agent_silent=patient.is_agent_silent,
    )


def _idle(patient: Patient) -> list[Check]:
    agent = patient.agent
    if agent is not None:
        decision = agent_decision(agent)
        return idle_checks(agent.sources, decision, is_unknown=agent.is_idle_unknown)
    reports, decided = look(patient.config, patient.locations, patient.pid)
    is_unknown = decided.cause is Cause.UNKNOWN
    decision = own_decision(decided, is_agent_silent=patient.is_agent_silent)
    return idle_checks(reports, decision, is_unknown=is_unknown)


def read_gpus() -> GpuFacts:
    """Ask the PCI bus, the NVIDIA driver and PyTorch."""
    nvidia: NvidiaFacts | None = None
    torch: TorchFacts | None = None
    nvidia_problem = torch_problem = ""
    try:
        nvidia = within(read_nvidia, GPU_DEADLINE_S)
    except LookError as error:
        nvidia_problem = str(error)
    try:
        torch = read_torch()
    except LookError as error:
        torch_problem = str(error)
    return GpuFacts(
        cards=read_cards(),
        nvidia=nvidia,
        nvidia_problem=nvidia_problem,
        torch=torch,
        torch_problem=torch_problem,
        pip=pip_command(),
    )


def read_terminal(environ: Mapping[str, str]) -> TerminalFacts:
    """Look at what this process is connected with."""
    streams = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    closed = tuple(name for name, stream in streams.items() if not stream.isatty())
    size = shutil.get_terminal_size()
    if not closed:
        size = os.get_terminal_size(sys.stderr.fileno())
    return TerminalFacts(
        closed=closed,
        columns=size.columns,
        rows=size.lines,
        encoding=sys.stdout.encoding,
        environ=environ,
    )
