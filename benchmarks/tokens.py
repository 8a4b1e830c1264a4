"""Seconds and memory of a transformer's block by tokens, with softmax and each operator: from how many tokens it pays.

    python benchmarks/tokens.py --out benchmarks/records/tokens.jsonl
    python benchmarks/tokens.py --out benchmarks/records/tokens.jsonl --collect

Two blocks: that of timm's `vit_small_patch16_224` (6 heads of 64 channels) and torch's `TransformerEncoderLayer` of 768
channels (12 heads of 64), a sample of so many tokens, without gradients, one thread. The softmax is torch's kernel, in
the same block. Seconds are medians of three runs of `farfield.cost.measure`, in turns; MiB are what operations allocate
at most beyond the input. Ratios are to softmax of the same run.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import Block
from torch import nn

from farfield.cost import measure
from farfield.insertion import replace_attention

TOKENS = (196, 784, 3_136, 12_544)
OPERATORS = ("factorized_gaussian", "averaged", "linear_relu", "linear_elu", "inline", "mala", "hedgehog", "flare")
BLOCKS = {
    "ViT-S": lambda: Block(384, 6, qkv_bias=True),
    "encoder": lambda: nn.TransformerEncoderLayer(768, 12, 3_072, batch_first=True),
}


def measure_block(name: str, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Measure a block with softmax and with each operator, one after the other, as often as is asked for."""
    torch.manual_seed(0)
    softmax = BLOCKS[name]().eval()
    blocks = {"softmax": softmax}
    for operator in OPERATORS:
        blocks[operator] = copy.deepcopy(softmax)
        replace_attention(blocks[operator], operator)
    grid = torch.randn(1, tokens, softmax.norm1.normalized_shape[0])
    runs = [{each: measure(own, grid, repeats=1, warm_up=1) for each, own in blocks.items()} for _ in range(repeats)]
    return [
        {
            "block": name,
            "tokens": tokens,
            "operator": each,
            "seconds": statistics.median(run[each].seconds for run in runs),
            "ratio": statistics.median(run[each].seconds / run["softmax"].seconds for run in runs),
            "mib": runs[0][each].peak_bytes / 2**20,
            "device": runs[0][each].device,
        }
        for each in blocks
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print a line a block and operator, of softmax seconds and MiB, of others what they are beside it."""
    print("| block | operator |" + "".join(f" {tokens:,} tokens |" for tokens in TOKENS) + " MiB at the most |")
    print("|---" * (len(TOKENS) + 3) + "|")
    for name in BLOCKS:
        for operator in ("softmax", *OPERATORS):
            own = {row["tokens"]: row for row in rows if (row["block"], row["operator"]) == (name, operator)}
            if not own:
                continue
            own_time = "{seconds:.3g} s" if operator == "softmax" else "{ratio:.2f}"
            cells = [own_time.format(**own[tokens]) if tokens in own else "–" for tokens in TOKENS]
            print(f"| {name} | `{operator}` | {' | '.join(cells)} | {own[max(own)]['mib']:,.0f} |")


def main() -> None:
    """Measure what the record has not, or print the table of the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON; what is there is not measured again")
    parser.add_argument("--collect", action="store_true", help="print the table")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    if arguments.collect:
        print_table(rows)
        return
    torch.set_num_threads(1)
    for tokens in TOKENS:
        for name in BLOCKS:
            if any((row["block"], row["tokens"]) == (name, tokens) for row in rows):
                continue
            found = measure_block(name, tokens, arguments.repeats)
            with arguments.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)


if __name__ == "__main__":
    main()
