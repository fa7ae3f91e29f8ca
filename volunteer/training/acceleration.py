"""How a layer is computed: as it is written, compiled, or twice to save memory. The owner's choice.

Runs in: trainer. None of it is part of a run: every way gives the same losses, up to rounding.

- Compiled (`compile`): torch.compile on one layer, whose code serves all layers, and any number of
  sequences but one. It takes 10 to 30 s at the first start and needs a compiler (a C++ compiler
  for CPUs, Triton for GPUs); the code is kept in the run's folder for the next start.
- Checkpointed (`activation_checkpointing`): the backward pass computes each layer again from its
  input, which is all that is kept of it (arXiv:1604.06174): a third more work, bit for bit the
  same gradient.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from volunteer.run import ModelSpec
from volunteer.training.model import (
    LayerWeights,
    LossFunction,
    RopeTables,
    RunLayer,
    Weights,
    decoder_layer,
    next_token_loss,
)

CODE_DIR_NAME = "compiled"
"""In the run's folder."""
_MAX_REASON_CHARS = 200


def prepare_compiler(code_dir: Path) -> None:
    """Have torch keep compiled code in `code_dir`, and compile in this process alone.

    Its pool of compiling processes would outlive a kill of this one. Before torch is first used.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(code_dir)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def make_loss_function(*, is_compiled: bool, is_checkpointed: bool) -> LossFunction:
    """Return what computes `next_token_loss` in that way."""
    run_layer = _compiled_layer() if is_compiled else decoder_layer
    if is_checkpointed:
        run_layer = functools.partial(_run_checkpointed, run_layer)

    def loss(weights: Weights, windows_BT1: Tensor, model: ModelSpec) -> Tensor:
        return next_token_loss(weights, windows_BT1, model, run_layer)

    return next_token_loss if run_layer is decoder_layer else loss


def is_compiler_failure(error: BaseException) -> bool:
    """Tell whether an error is the compiler's, not the model's."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, short."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 3] + "..."


def forget_compiled(code_dir: Path) -> None:
    """Remove what was kept of an earlier start, where nothing is compiled any more."""
    shutil.rmtree(code_dir, ignore_errors=True)


@functools.cache
def _compiled_layer() -> RunLayer:
    compiled = torch.compile(decoder_layer)

    def run(x_BTD: Tensor, layer: LayerWeights, tables: RopeTables, head_dim: int) -> Tensor:
        # Else it would be compiled once more for the next number of sequences.
        torch._dynamo.maybe_mark_dynamic(x_BTD, 0)
        result_BTD: Tensor = compiled(x_BTD, layer, tables, head_dim)
        return result_BTD

    return run


def _run_checkpointed(
    run_layer: RunLayer, x_BTD: Tensor, layer: LayerWeights, tables: RopeTables, head_dim: int
) -> Tensor:
    result_BTD: Tensor = checkpoint(
        run_layer,
        x_BTD,
        layer,
        tables,
        head_dim,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    return result_BTD
