"""The models of the comparison: their RunSpec for us, their tensors' shapes for hivemind.

No torch: both sides read the same layout (volunteer/training/layout.py).
"""

from __future__ import annotations

from volunteer.run import ModelSpec
from volunteer.training.layout import model_layout, num_parameters

MODELS = {
    1: ModelSpec(num_layers=2, dim=192, num_heads=6, ffn_dim=576, context_tokens=8),
    25: ModelSpec(num_layers=8, dim=512, num_heads=8, ffn_dim=1365, context_tokens=8),
    100: ModelSpec(num_layers=14, dim=768, num_heads=12, ffn_dim=2048, context_tokens=8),
}
"""By millions of parameters; 1 is for trying out."""


def shapes(parameters_m: int) -> list[tuple[int, ...]]:
    """Return the shapes of a model's tensors."""
    return [slot.shape for slot in model_layout(MODELS[parameters_m])]


def exact_parameters(parameters_m: int) -> int:
    """Return how many parameters a model has."""
    return num_parameters(MODELS[parameters_m])
