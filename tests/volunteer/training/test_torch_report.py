"""What PyTorch says of itself, asked as the doctor asks it."""

from __future__ import annotations

import pytest
import torch

from volunteer.doctor.torch_facts import read_torch


@pytest.mark.slow
def test_pytorch_is_what_it_is() -> None:
    facts = read_torch()
    assert facts.version == torch.__version__
    assert facts.cuda == (torch.version.cuda or "")
    assert len([d for d in facts.devices if d.kind == "cuda"]) == torch.cuda.device_count()
    assert not facts.problem
