"""Time operators against regular attention, a copy and other libraries: all ratios of a grid come from one run.

    python benchmarks/operators.py --channels 64 --size 28,28 --size 56,56 --backward --peers
    python benchmarks/operators.py --operator siamese --mode eager --mode compiled --json race.json --picture race.png

Every contestant is checked before anything is timed; a wrong one gets no time, and the program ends with status 1.
"Plain" is softmax over the last dimension of an explicit matrix, "SDPA" scaled_dot_product_attention, both on
contiguous (batch, positions, channels) and with the same projections; "copy" is x.clone().
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from contestants import attention_of, ours, regular
from race import Contestant, Row, copy_of_the_grid, machine, race, times_as_long
from torch import Tensor

import farfield
from farfield.cli.tables import import_operator
from farfield.ops import OPERATORS, Operator

MODES = ("eager", "compiled")
# Operators whose work is quadratic in the positions, and the largest number of pairs of positions for which they and
# regular attention run.
SQUARE, PAIRS = ("softmax", "softmax_pooled", "dot"), 1 << 28


def main() -> None:
    """Race, then show the results, and write them to the given files."""
    arguments = parser().parse_args()
    rows: list[Row] = []
    for size in arguments.size or [(14, 14), (28, 28), (56, 56)]:
        rows += on_grid(size, arguments)
        # After each grid, so that an error in a later one does not lose the results.
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    if not arguments.quiet:
        from report import show

        show(rows)
    if arguments.picture:
        from report import picture

        picture(rows, arguments.picture)
    if wrong := [str(row["name"]) for row in rows if not row["right"]]:
        raise SystemExit(f"wrong, and so without a time: {', '.join(dict.fromkeys(wrong))}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--operator", action="append", type=operator_of, metavar="NAME", help="or MODULE:NAME; repeatable; default: all"
    )
    add("--size", action="append", type=size_of, metavar="56,56", help="may be repeated; default: 14,14 28,28 56,56")
    add("--channels", type=int, default=64)
    add("--batch", type=int, default=8)
    add("--heads", type=int, default=1)
    add("--project", default="v", metavar="LETTERS", help='projections, letters of "qkvo" (default: %(default)s)')
    add("--inner-channels", type=int, help="channels of projected queries and keys")
    add("--mode", action="append", choices=MODES, help="may be repeated; default: eager")
    add("--backward", action="store_true", help="also time forward and backward")
    add("--peers", action="store_true", help="also time other libraries, with all four projections")
    add("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    add("--device", default="cpu")
    add("--repeats", type=int, default=7, help="number of turns, for medians (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write raw results")
    add("--picture", type=Path, metavar="FILE", help="draw time and memory against the number of positions")
    add("--only-ours", action="store_true", help="operators and the copy, without regular attention")
    add("--quiet", action="store_true", help="print no table")
    return parser


def operator_of(text: str) -> str | Operator:
    """Parse the name of an operator, or the place of a user's own."""
    if ":" in text:
        try:
            return import_operator(text)
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    if text not in OPERATORS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(OPERATORS)}, or MODULE:NAME of your own")
    return text


def size_of(text: str) -> tuple[int, ...]:
    """Parse the size of a grid, such as 56,56."""
    return tuple(int(side) for side in text.split(","))


def on_grid(size: tuple[int, ...], arguments: argparse.Namespace) -> list[Row]:
    """Time everything on one grid, forward and, with `--backward`, forward and backward."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    grid = torch.randn(arguments.batch, arguments.channels, *size, dtype=dtype, device=device)
    contestants, rivals = [copy_of_the_grid(), *own(arguments, grid)], {}
    if arguments.peers:
        others, rivals = peers_of(arguments, grid)
        contestants += others
    setting: Row = {"size": list(size), "positions": grid[0, 0].numel(), "hardware": machine(device)}
    setting["source"] = str(Path(farfield.__file__).resolve())
    setting |= {key: getattr(arguments, key) for key in ("batch", "channels", "heads", "project", "dtype")}
    # Peers without a backward pass, and what they are compared to.
    forward_only = [each.name for each in contestants if each.forward_only and each.name in rivals]
    without_gradients = [*forward_only, *(rivals[name][0] for name in forward_only)]
    rows: list[Row] = []
    for backward in (False, True)[: 1 + arguments.backward]:
        entrants = [each for each in contestants if not backward or each.name not in without_gradients]
        results = race(entrants, grid, backward=backward, repeats=arguments.repeats)
        rows += [setting | with_ratios(row, results, rivals, backward) for row in results]
    return rows


def with_ratios(row: Row, results: list[Row], rivals: dict[str, tuple[str, bool]], backward: bool) -> Row:
    """Add ratios to a result: to the copy; of regular attention, if it has the same projections; to a peer's rival."""
    name = str(row["name"])
    row |= {"direction": "forward and backward" if backward else "forward"}
    row |= {"copies": times_as_long(results, name, "copy")}
    other_projections = name in rivals or name in dict(rivals.values())
    for regular_one in ("plain", "SDPA"):
        row[f"{regular_one.lower()}_times"] = None if other_projections else times_as_long(results, regular_one, name)
    rival, same = rivals.get(name, (None, None))
    return row | {"rival": rival, "same": same, "rival_times": rival and times_as_long(results, name, rival)}


def own(arguments: argparse.Namespace, grid: Tensor) -> Iterator[Contestant]:
    """Yield regular attention and the chosen operators, without quadratic ones on grids that are too large."""
    small = arguments.batch * arguments.heads * grid[0, 0].numel() ** 2 <= PAIRS
    options = {"heads": arguments.heads, "project": arguments.project, "inner_channels": arguments.inner_channels}
    options |= {"dtype": grid.dtype, "device": grid.device}
    if small and not arguments.only_ours:
        softmax = attention_of("softmax", arguments.channels, **options)
        yield from (regular(softmax, fused=fused) for fused in (False, True))
    for name in arguments.operator or OPERATORS:
        if small or name not in SQUARE:
            for mode in arguments.mode or ["eager"]:
                yield ours(attention_of(name, arguments.channels, **options), compiled=mode == "compiled")


def peers_of(arguments: argparse.Namespace, grid: Tensor) -> tuple[list[Contestant], dict[str, tuple[str, bool]]]:
    """Return the peers, and what each is compared to: name -> (name of the rival, whether it is the same function)."""
    from peers import peers

    contestants, rivals = [], {}
    for peer in peers(arguments.channels, arguments.heads, grid.dim() - 2, grid.device):
        if peer.contestant is None:
            note(f"left out: {peer.name}, {peer.missing}.")
            continue
        rival = ours(peer.rival, name=f"{peer.rival.operator_name} for {peer.name}")
        contestants += [peer.contestant, rival]
        rivals[peer.contestant.name] = rival.name, peer.same
    return contestants, rivals


@functools.cache
def note(text: str) -> None:
    """Print a text once."""
    print(text)


if __name__ == "__main__":
    main()
