"""Attend over a volume split over two processes: one small message per layer gives the response of the whole."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from farfield import cost
from farfield.nn import GridAttention
from farfield.sharding import sharded_attention


def main():
    """Attend from this process's part to the whole volume; check the response and gradients against the whole."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    volume = torch.randn(1, 16, 24, 20, 20, dtype=torch.float64)
    attention = GridAttention(16, "factorized_gaussian", heads=4, project="qkv").double()
    whole = attention(volume)
    wanted = torch.autograd.grad(whole.square().sum(), attention.value.weight)[0]

    mine = slice(0, 10) if dist.get_rank() == 0 else slice(10, 24)  # parts may have different sizes
    response = sharded_attention(attention, volume[:, :, mine])
    torch.testing.assert_close(response, whole[:, :, mine])

    response.square().sum().backward()
    gradient = attention.value.weight.grad
    dist.all_reduce(gradient)  # each process has its share; the sum is the gradient of the whole
    torch.testing.assert_close(gradient, wanted)

    sent = cost.predict(attention, size=volume.shape[2:]).gathered_bytes
    if dist.get_rank() == 0:
        held = 4 * volume.numel()
        print(
            f"{dist.get_world_size()} processes: {sent:,} bytes from each, of a volume of {held:,} (as float32); equal"
        )
    dist.destroy_process_group()


if "RANK" in os.environ:
    main()
else:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(Path(__file__))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    print(subprocess.run(launch, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)
