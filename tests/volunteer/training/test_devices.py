"""Which device is taken, and what is said of one that is not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from volunteer.config import GPU_CONTEXT_BYTES
from volunteer.errors import ConfigError
from volunteer.training import devices
from volunteer.training.devices import Device, choose_device, is_out_of_memory, limit_memory


def pretend(monkeypatch: pytest.MonkeyPatch, **counts: int) -> None:
    monkeypatch.setattr(devices, "num_devices", lambda kind: {"cpu": 1, **counts}.get(kind, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"NVIDIA {number}")
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda number: f"Intel {number}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, "cpu"),
        ({"xpu": 1}, "xpu:0"),
        ({"xpu": 1, "mps": 1}, "mps"),
        ({"xpu": 1, "mps": 1, "cuda": 2}, "cuda:0"),
    ],
)
def test_auto_takes_the_best_kind(
    counts: dict[str, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, **counts)
    assert str(choose_device("auto").torch_device) == expected


def test_a_number_names_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda=2)
    device = choose_device("cuda:1")
    assert (str(device.torch_device), device.name) == ("cuda:1", "NVIDIA 1")
    assert device.autocast_dtype is torch.bfloat16


def test_an_old_gpu_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda=1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert choose_device("cuda").autocast_dtype is None


def test_a_device_that_is_not_there_is_named_with_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda=1)
    with pytest.raises(ConfigError, match="'cuda:1' is not here; torch sees cuda:0") as caught:
        choose_device("cuda:1")
    assert "--device auto" in caught.value.hint
    pretend(monkeypatch)
    with pytest.raises(ConfigError, match="torch sees no accelerator"):
        choose_device("cuda")


@pytest.mark.parametrize("wanted", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "cuda:0:0"])
def test_nonsense_is_a_config_error(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda=1)
    with pytest.raises(ConfigError):
        choose_device(wanted)


def test_the_cpu_computes_in_fp32_and_has_a_name() -> None:
    device = choose_device("cpu")
    assert device.autocast_dtype is None
    assert "CPU" in device.name
    with device.autocast():
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype == torch.float32


def test_real_out_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


GIB = 1024**3


@pytest.mark.parametrize(
    ("max_bytes", "fraction"),
    [(6 * GIB, (6 * GIB - GPU_CONTEXT_BYTES) / (8 * GIB)), (100 * GIB, 1)],
)
def test_the_owners_limit_of_gpu_memory_is_torchs(
    monkeypatch: pytest.MonkeyPatch, max_bytes: int, fraction: float
) -> None:
    limits: list[tuple[float, torch.device]] = []
    properties = SimpleNamespace(total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda f, device: limits.append((f, device))
    )
    gpu = Device(torch_device=torch.device("cuda", 1), name="a GPU", autocast_dtype=None)
    limit_memory(gpu, max_bytes)
    ((limit, device),) = limits
    assert limit == pytest.approx(fraction)
    assert device == torch.device("cuda", 1)


def test_on_a_cpu_gpu_memory_is_not_limited() -> None:
    limit_memory(choose_device("cpu"), GIB)
