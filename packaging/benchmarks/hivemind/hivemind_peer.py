"""One peer of hivemind, told what to do on stdin, a line of JSON each; answers on stdout.

Runs in the environment that run.py makes, not in ours. It does what OpenDiLoCo does with hivemind
(open_diloco/hivemind_diloco.py): the pseudo-gradients of all parameters are averaged in one group
by a DecentralizedAverager, whose group is found before the round closes (`require_trigger`), and
torch's SGD with Nesterov momentum takes the outer step.

    {"do": "prepare", "round": N}         find the group, come to be ready
    {"do": "exchange"}                    close: pseudo-gradient, average, outer step
    {"do": "dump", "file": F}             write the last average to F, fp32
    {"do": "end"}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import numpy as np
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression
from hivemind.dht import DHT

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5
STEP = 1e-3  # size of the pretended inner steps
GROUP_DEADLINE_S = 60.0
# As hivemind.Optimizer has them by default.
NEXT_CHUNK_TIMEOUT_S = 15.0
ALLREDUCE_TIMEOUT_S = 60.0
MATCHMAKING_S = 3.0


class Peer:
    """A volunteer's weights and its averager."""

    def __init__(self, options: argparse.Namespace, dht: DHT) -> None:
        """Start an averager over tensors of the model's shapes."""
        shapes = json.loads(options.shapes)
        self.seed = options.seed
        self.shared = [torch.zeros(shape) for shape in shapes]
        self.local = [torch.zeros(shape) for shape in shapes]
        parameters = [torch.nn.Parameter(tensor) for tensor in self.shared]
        self.outer = torch.optim.SGD(
            parameters, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True
        )
        self.parameters = parameters
        self.averager = DecentralizedAverager(
            [torch.zeros(shape) for shape in shapes],
            dht,
            prefix="bench",
            target_group_size=options.peers,
            min_group_size=options.peers,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=0.9 * MATCHMAKING_S,
            part_size_bytes=options.part_bytes,
            next_chunk_timeout=NEXT_CHUNK_TIMEOUT_S,
            allreduce_timeout=ALLREDUCE_TIMEOUT_S,
            compression=Float16Compression() if options.codec == "fp16" else NoCompression(),
            start=True,
        )
        self.control = None

    def prepare(self, round_index: int) -> dict[str, object]:
        """Train a little, and find the others."""
        generator = torch.Generator().manual_seed(1000 * round_index)
        common = torch.randn(2**16, generator=generator)
        own = torch.randn(2**16, generator=generator.manual_seed(1000 * round_index + self.seed))
        for local, shared in zip(self.local, self.shared, strict=True):
            noise = (common + own).mul_(STEP)
            flat, target = shared.view(-1), local.view(-1)
            for start in range(0, len(flat), len(noise)):
                piece = flat[start : start + len(noise)]
                torch.sub(piece, noise[: len(piece)], out=target[start : start + len(noise)])
        begun_at = time.monotonic()
        self.control = self.averager.step(
            gather={"tokens": 1},
            require_trigger=True,
            wait=False,
            timeout=GROUP_DEADLINE_S + ALLREDUCE_TIMEOUT_S,
        )
        while self.control.stage != AveragingStage.AWAITING_TRIGGER:
            if self.control.done():
                self.control.result()
            time.sleep(0.005)  # noqa: TID251 - hivemind has nothing to wait on
        return {"preparation_s": time.monotonic() - begun_at}

    def exchange(self) -> dict[str, object]:
        """Close the round."""
        with self.averager.get_tensors() as averaged:
            for target, shared, local in zip(averaged, self.shared, self.local, strict=True):
                torch.sub(shared, local, out=target)
        loaded_at = time.monotonic()
        self.control.allow_allreduce()
        error = ""
        group_size = 0
        try:
            group_size = len(self.control.result(ALLREDUCE_TIMEOUT_S + NEXT_CHUNK_TIMEOUT_S))
        except Exception as caught:  # noqa: BLE001 - whatever hivemind reports is a result
            error = repr(caught)
        averaged_at = time.monotonic()
        with self.averager.get_tensors() as averaged:
            for parameter, gradient in zip(self.parameters, averaged, strict=True):
                parameter.grad = gradient
            self.outer.step()
            for local, shared in zip(self.local, self.shared, strict=True):
                local.copy_(shared)
        return {
            "loaded_at": loaded_at,
            "averaged_at": averaged_at,
            "applied_at": time.monotonic(),
            "group_size": group_size,
            "error": error,
        }

    def dump(self, file: str) -> dict[str, object]:
        """Write the last average."""
        with self.averager.get_tensors() as averaged:
            np.concatenate([tensor.numpy().ravel() for tensor in averaged]).tofile(file)
        return {}


def main() -> None:
    """Obey until told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", required=True, help="JSON: a list of lists")
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--codec", choices=["fp16", "fp32"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--part-bytes", type=int, required=True)
    parser.add_argument("--initial-peer", action="append", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to the log
    dht = DHT(initial_peers=options.initial_peer, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    peer = Peer(options, dht)

    def answer(reply: dict[str, object]) -> None:
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    answer({"addresses": [str(address) for address in dht.get_visible_maddrs()]})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "prepare":
            answer(peer.prepare(command["round"]))
        elif command["do"] == "exchange":
            answer(peer.exchange())
        elif command["do"] == "dump":
            answer(peer.dump(command["file"]))
        else:
            break
    peer.averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
