"""`farfield demo`: train two networks on handwritten digits, measure KAN's Table 2, draw a picture and a page."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from farfield import cost, models
from farfield.cli.command_parser import CommandParser
from farfield.cli.demo.picture import write as write_picture
from farfield.cli.explore.page import write as write_page
from farfield.cli.explore.panels import panels_of_features
from farfield.cli.output import Column, Row, Table, megabytes, millions, milliseconds, percent, ratio, write_table
from farfield.cli.printed import KAN_TABLE_2, NETWORKS
from farfield.data.classify import Digits
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield.tasks.checkpoints import check_writable, written
from farfield.tasks.classify import Classify

SIDE, STRIDES = 32, (1, 1, 2, 2, 2)
TRAINED = ("kanet_qkv", "mobilenet_v2")
BATCH = 32
# Ten passes over 1,437 digits are few: at 0.015 the order of sums alone changed KANet's accuracy by two points.
SETTINGS: dict[str, Any] = {
    "learning_rate": 0.006,
    "nesterov": True,
    "schedule": "cosine",
    "warmup_epochs": 1,
    "label_smoothing": 0.1,
}


class Update(NamedTuple):
    """Progress of the training of one network: batches done, batches in all, and a text."""

    network: str
    done: int
    total: int
    state: str


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo.

    Args:
        argv: Its options; None takes them from the system.

    Raises:
        CheckpointError: If the output folder cannot be written to.
        SystemExit: With status 2 for a wrong option.
    """
    options = parser().parse_args(argv)
    # A folder that cannot be written to must fail now, not after minutes of training.
    check_writable(options.output)
    console, start = Console(highlight=False), time.perf_counter()
    console.rule("[bold]1 of 3 · Two networks on scikit-learn's handwritten digits", align="left")
    networks = train_all(options, console)
    write_table(trained_table(networks))
    write_table(full_table(networks))
    console.rule("[bold]2 of 3 · KAN Table 2 on this machine", align="left")
    with console.status("softmax attention and Kronecker attention"), one_thread():
        operators = table_2_rows()
    write_table(table_2(operators))
    console.rule("[bold]3 of 3 · What one petal attends to", align="left")
    picture, page = options.output / "attention.png", options.output / "explore.html"
    with console.status("one attention row per operator"):
        write_picture(picture)
        write_page(panels_of_features(None, list(OPERATORS), 56), page)
    seconds = time.perf_counter() - start
    results = {"networks": networks, "operators": operators, "seconds": seconds}
    with written(options.output / "results.json") as file:
        file.write(f"{json.dumps(results, indent=2)}\n".encode())
    console.print(f"picture   {picture}", f"page      {page}: the same under the pointer", sep="\n", soft_wrap=True)
    console.print(f"numbers   {options.output / 'results.json'}", soft_wrap=True)
    weights = ", ".join(str(options.output / name) for name in TRAINED)
    console.print(f"networks  {weights}: farfield.models.from_pretrained(path)", soft_wrap=True)
    console.print(f"[bold]Done in {clock(seconds)} minutes.")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the demo's options."""
    parser = CommandParser("farfield demo", __doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder of the output files (runs/demo)")
    parser.add_argument("--epochs", type=positive, default=10, help="passes over the training digits (10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order, augmentation and split (0)")
    parser.add_argument("--width", type=float, default=0.25, help="multiplies the channels of the networks (0.25)")
    parser.add_argument("--subset", type=positive, default=None, help="number of training digits (all 1,437)")
    return parser


def positive(text: str) -> int:
    """Convert an option to a whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def train_all(options: argparse.Namespace, console: Console) -> list[Row]:
    """Train the networks in parallel, each in a process with an equal share of the cores; return their results."""
    # Small layers gain little from more threads, and lose much where other programs use the cores.
    threads = max(1, torch.get_num_threads() // len(TRAINED))
    context = multiprocessing.get_context("spawn")
    updates: Queue[Update] = context.Queue()
    columns = [
        TextColumn("{task.description:13}"),
        BarColumn(30),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    ]
    with (
        Progress(*columns, console=console) as progress,
        ProcessPoolExecutor(len(TRAINED), context, begin, (updates, threads)) as pool,
    ):
        lines = {name: progress.add_task(name, total=None, state="starting") for name in TRAINED}
        trained = [pool.submit(train, name, options) for name in TRAINED]
        while not all(one.done() for one in trained):
            with suppress(Empty):
                name, done, total, state = updates.get(timeout=0.2)
                progress.update(lines[name], completed=done, total=total, state=state)
        return [one.result() for one in trained]


def begin(updates: Queue[Update], threads: int) -> None:
    """Prepare a training process: its threads, the queue of its progress, and its end with the main process."""
    torch.set_num_threads(threads)
    Bar.updates = updates
    threading.Thread(target=leave_with_parent, daemon=True).start()


def leave_with_parent() -> None:
    """Exit this process when the one that started it has ended, killed or not: nothing would use its result."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def train(name: str, options: argparse.Namespace) -> Row:
    """Train one network, save it, and evaluate it on the held-out digits."""
    seed_everything(options.seed, verbose=False)
    network = models.MODELS[name](num_classes=10, width=options.width, strides=STRIDES)
    task = Classify(network, **SETTINGS)
    digits = Digits(image_size=SIDE, batch_size=BATCH, subset=options.subset, seed=options.seed)
    start = time.perf_counter()
    with quiet():
        trainer = Trainer(
            max_epochs=options.epochs,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            callbacks=[Bar(name)],
        )
        trainer.fit(task, datamodule=digits)
        accuracy = trainer.test(task, datamodule=digits, verbose=False)[0]["test/accuracy"]
    seconds = time.perf_counter() - start
    network.cpu().save_pretrained(options.output / name)
    held_out = len(digits.parts["test"])  # type: ignore[arg-type]
    result = {"network": name, "accuracy": accuracy, "held_out": held_out, "right": round(accuracy * held_out)}
    return {**result, "seconds": seconds, **costs(name, network)}


class Bar(Callback):
    """Send the progress of a network's training, and at the end its accuracy, to the process that shows the bars.

    Args:
        network: Name of the network.

    Attributes:
        updates: The queue to that process, the same for all instances; `begin` sets it.
    """

    updates: Queue[Update]

    def __init__(self, network: str) -> None:
        self.network = network

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *rest: Any) -> None:
        """Send the epoch and the loss."""
        state = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  loss {outputs['loss'].item():.3f}"
        self.updates.put(Update(self.network, trainer.global_step, int(trainer.estimated_stepping_batches), state))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Send the accuracy."""
        accuracy = float(trainer.callback_metrics["test/accuracy"])
        steps = trainer.global_step
        self.updates.put(Update(self.network, steps, steps, f"held-out accuracy {percent(accuracy)}"))


def costs(name: str, network: torch.nn.Module) -> Row:
    """Count the cost of one image: in the network as trained, and in the full network by the papers' rule."""
    small = cost.count(network.eval(), (1, 3, SIDE, SIDE))
    full = cost.predict(models.MODELS[name]().eval(), channels=3, size=(224, 224), convention="paper")
    counts = {"weights": small.weights, "macs": small.macs, "full_weights": full.weights, "full_macs": full.macs}
    return counts | {"printed_weights": NETWORKS[name].parameters, "printed_macs": NETWORKS[name].macs}


def trained_table(rows: list[Row]) -> Table:
    """Return the table of the trained networks."""
    columns = [
        Column("network", "network", left=True),
        Column("accuracy", "held-out accuracy", percent),
        Column("right", f"correct of {rows[0]['held_out']}"),
        Column("weights", "weights", "{:,}".format),
        Column("macs", "MACs", millions),
        Column("seconds", "trained in", lambda seconds: f"{clock(seconds)} min"),
    ]
    return Table(f"as trained: {SIDE} × {SIDE}, ten classes", columns, rows)


def full_table(rows: list[Row]) -> Table:
    """Return the table of the full networks, beside the numbers of the paper."""
    columns = [
        Column("network", "network", left=True),
        Column("full_weights", "weights", "{:,}".format),
        Column("printed_weights", "KAN"),
        Column("full_macs", "MACs", millions),
        Column("printed_macs", "KAN"),
    ]
    return Table("full networks, 224 × 224; KAN: as printed in the paper", columns, rows)


def table_2_rows() -> list[Row]:
    """Measure KAN's Table 2: batch 8, 8 channels, one head, a projection of the values."""
    return [row for side in (14, 28, 56) for row in table_2_grid(side)]


def table_2_grid(side: int) -> list[Row]:
    """Measure the four operators on one grid."""
    torch.manual_seed(0)
    grid = torch.randn(8, 8, side, side)
    printed = {name: row for (name, length), row in KAN_TABLE_2.items() if length == side}
    measured = {name: cost.measure(GridAttention(8, name, bias=False).eval(), grid) for name in printed}
    return [
        {
            "grid": f"{side}²",
            "operator": name,
            "macs": cost.predict(name, channels=8, size=(side, side), convention="paper").macs,
            "printed_macs": row.macs,
            "bytes": measured[name].peak_bytes,
            "printed_memory": row.memory,
            "seconds": measured[name].seconds,
            "printed_time": row.time,
            "speed_up": measured["softmax"].seconds / measured[name].seconds,
            "printed_speed_up": row.speed_up,
        }
        for name, row in printed.items()
    ]


def table_2(rows: list[Row]) -> Table:
    """Return the table of the measured numbers, beside those of the paper."""
    columns = [
        Column("grid", "grid", left=True),
        Column("operator", "operator", left=True),
        Column("macs", "MACs", millions),
        Column("printed_macs", "KAN"),
        Column("bytes", "memory", megabytes),
        Column("printed_memory", "KAN"),
        Column("seconds", "time", milliseconds),
        Column("printed_time", "KAN"),
        Column("speed_up", "speed-up", ratio),
        Column("printed_speed_up", "KAN"),
    ]
    notes = [
        "MACs of one image, by formula; time and memory of the batch. Softmax attention uses torch's fused",
        "kernel, which never forms the attention matrix: hence less memory and smaller speed-ups than printed.",
    ]
    return Table("batch 8, 8 channels, one thread; KAN: as printed in the paper", columns, rows, notes)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning's advice on loggers and loader processes out of the progress display."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: on small grids, synchronizing threads takes longer than the operator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def clock(seconds: float) -> str:
    """Format a duration as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
