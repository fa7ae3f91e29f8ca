"""A training loop as one writes it without thinking of volunteers: the measure for ours.

In nanoGPT's manner: torch modules, torch.optim.AdamW (fused), gradients summed over micro-batches,
`clip_grad_norm_`, `zero_grad(set_to_none=True)`. The model is the run's, from the same weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from volunteer.run import InnerSpec, ModelSpec
from volunteer.training.layout import model_layout
from volunteer.training.model import rope_tables


class Layer(nn.Module):
    """Attention, then SwiGLU."""

    def __init__(self, model: ModelSpec) -> None:
        """Make the parameters of a layer, named as the run's layout names them."""
        super().__init__()
        dim, kv_dim = model.dim, model.kv_heads * model.head_dim
        self.head_dim, self.is_grouped = model.head_dim, model.kv_heads != model.num_heads
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_dim, bias=False)
        self.wv = nn.Linear(dim, kv_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.w1 = nn.Linear(dim, model.ffn_dim, bias=False)
        self.w3 = nn.Linear(dim, model.ffn_dim, bias=False)
        self.w2 = nn.Linear(model.ffn_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream after this layer."""
        batch, length, dim = x.shape
        normed = self.attention_norm(x)
        q = self.wq(normed).view(batch, length, -1, self.head_dim).transpose(1, 2)
        k = self.wk(normed).view(batch, length, -1, self.head_dim).transpose(1, 2)
        v = self.wv(normed).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_grouped)
        x = x + self.wo(y.transpose(1, 2).contiguous().view(batch, length, dim))
        normed = self.ffn_norm(x)
        out: Tensor = x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return out


class PlainModel(nn.Module):
    """The run's model, of torch's modules."""

    def __init__(self, model: ModelSpec, weights_P: Tensor) -> None:
        """Take the weights from a flat vector, which is copied."""
        super().__init__()
        self.embedding = nn.Embedding(model.vocab_size, model.dim)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.final_norm = nn.RMSNorm(model.dim, eps=1e-5)
        self.output = nn.Linear(model.dim, model.vocab_size, bias=False)
        if model.tied_embeddings:
            self.output.weight = self.embedding.weight
        tables = rope_tables(
            model.context_tokens,
            model.head_dim,
            model.rope_base,
            torch.float32,
            torch.device("cpu"),
        )
        self.register_buffer("cos", tables.cos_TH)
        self.register_buffer("sin", tables.sin_TH)
        named = dict(self.named_parameters())
        with torch.no_grad():
            for slot in model_layout(model):
                values = weights_P[slot.offset : slot.end].view(slot.shape)
                named[f"{slot.name}.weight"].copy_(values)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean loss of the tokens after the first."""
        x = self.embedding(windows[:, :-1])
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.output(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PlainLoop:
    """Takes steps of the plain loop."""

    def __init__(
        self, model: ModelSpec, inner: InnerSpec, weights_P: Tensor, *, is_compiled: bool
    ) -> None:
        """Make model and optimizer; nothing is compiled before the first step."""
        self._plain = PlainModel(model, weights_P)
        self._clip_norm = inner.clip_norm
        decayed = [p for p in self._plain.parameters() if p.dim() > 1]
        kept = [p for p in self._plain.parameters() if p.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": inner.weight_decay},
                {"params": kept, "weight_decay": 0.0},
            ],
            lr=inner.lr,
            betas=(inner.beta1, inner.beta2),
            fused=True,
        )
        self._loss = torch.compile(self._plain) if is_compiled else self._plain

    def step(self, windows: Tensor, micro_batch_sequences: int) -> float:
        """Take a step; return the mean loss before it."""
        parts = torch.split(windows, micro_batch_sequences)
        total = 0.0
        for micro in parts:
            loss = self._loss(micro) / len(parts)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._plain.parameters(), self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total
