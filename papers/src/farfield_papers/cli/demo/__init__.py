"""`farfield demo`: train two networks on handwritten digits, measure KAN's Table 2, draw a picture and a page."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from farfield import cost
from farfield.cli.output import Column, Row, Table, megabytes, millions, milliseconds, percent, ratio, write_table
from farfield.cli.printed import KAN_TABLE_2
from farfield.cli.values import Index
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.cli.demo.picture import write as write_picture
from farfield_papers.cli.explore.page import write as write_page
from farfield_papers.cli.explore.panels import panels_of_features
from farfield_papers.cli.printed import NETWORKS
from farfield_papers.data.classify import Digits
from farfield_papers.tasks.checkpoints import check_writable, written
from farfield_papers.tasks.classify import Classify

_SIDE, _STRIDES = 32, (1, 1, 2, 2, 2)
TRAINED = ("kanet_qkv", "mobilenet_v2")
_BATCH = 32
# Ten passes over 1,437 digits are few: at 0.015 the order of sums alone changed KANet's accuracy by two points.
_SETTINGS: dict[str, Any] = {
    "learning_rate": 0.006,
    "nesterov": True,
    "schedule": "cosine",
    "warmup_epochs": 1,
    "label_smoothing": 0.1,
}


# Progress of the training of one network: its name, batches done, batches in all, and a text.
_Update = tuple[str, int, int, str]


class _Settings(NamedTuple):
    output: Path
    epochs: int
    seed: int
    width: float
    subset: int | None


def run_demo(
    *,
    output: Path = Path("runs/demo"),
    epochs: int = 10,
    seed: Index = 0,
    width: float = 0.25,
    subset: int | None = None,
) -> None:
    """Train two networks on handwritten digits, measure KAN's Table 2, draw a picture and a page.

    Args:
        output: Folder of the output files.
        epochs: Passes over the training digits.
        seed: Seed of weights, order, augmentation and split.
        width: Multiplies the channels of the networks.
        subset: Number of training digits (default: all 1,437).
    """
    # A folder that cannot be written to must fail now, not after minutes of training.
    check_writable(output)
    console, start = Console(highlight=False), time.perf_counter()
    console.rule("[bold]1 of 3 · Two networks on scikit-learn's handwritten digits", align="left")
    networks = _train_all(_Settings(output, epochs, seed, width, subset), console)
    write_table(_trained_table(networks))
    write_table(_full_table(networks))
    console.rule("[bold]2 of 3 · KAN Table 2 on this machine", align="left")
    with console.status("softmax attention and Kronecker attention"):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # on small grids, synchronizing threads takes longer than the operator
        operators = [row for side in (14, 28, 56) for row in _measure_grid(side)]
        torch.set_num_threads(threads)
    write_table(_table_2(operators))
    console.rule("[bold]3 of 3 · What one petal attends to", align="left")
    picture, page = output / "attention.png", output / "explore.html"
    with console.status("one attention row per operator"):
        write_picture(picture)
        write_page(panels_of_features(None, list(OPERATORS), 56), page)
    seconds = time.perf_counter() - start
    results = {"networks": networks, "operators": operators, "seconds": seconds}
    with written(output / "results.json") as file:
        file.write(f"{json.dumps(results, indent=2)}\n".encode())
    console.print(f"picture   {picture}", f"page      {page}: the same under the pointer", sep="\n", soft_wrap=True)
    console.print(f"numbers   {output / 'results.json'}", soft_wrap=True)
    weights = ", ".join(str(output / name) for name in TRAINED)
    console.print(f"networks  {weights}: farfield_papers.models.from_pretrained(path)", soft_wrap=True)
    console.print(f"[bold]Done in {_clock(seconds)} minutes.")


def _train_all(options: _Settings, console: Console) -> list[Row]:
    """Train the networks in parallel, each in a process with an equal share of the cores; return their results."""
    # Small layers gain little from more threads, and lose much where other programs use the cores.
    threads = max(1, torch.get_num_threads() // len(TRAINED))
    context = multiprocessing.get_context("spawn")
    updates: Queue[_Update] = context.Queue()
    columns = [
        TextColumn("{task.description:13}"),
        BarColumn(30),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    ]
    with (
        Progress(*columns, console=console) as progress,
        ProcessPoolExecutor(len(TRAINED), context, _begin, (updates, threads)) as pool,
    ):
        lines = {name: progress.add_task(name, total=None, state="starting") for name in TRAINED}
        trained = [pool.submit(_train, name, options) for name in TRAINED]
        while not all(one.done() for one in trained):
            with suppress(Empty):
                name, done, total, state = updates.get(timeout=0.2)
                progress.update(lines[name], completed=done, total=total, state=state)
        return [one.result() for one in trained]


def _begin(updates: Queue[_Update], threads: int) -> None:
    """Prepare a training process: its threads, the queue of its progress, and its end with the main process."""
    torch.set_num_threads(threads)
    _Bar.updates = updates
    # Lightning's advice on loggers and loader processes has no place in the display of the progress.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """Exit this process when the one that started it has ended, killed or not: nothing would use its result."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _train(name: str, options: _Settings) -> Row:
    seed_everything(options.seed, verbose=False)
    network = models.MODELS[name](num_classes=10, width=options.width, strides=_STRIDES)
    task = Classify(network, **_SETTINGS)
    digits = Digits(image_size=_SIDE, batch_size=_BATCH, subset=options.subset, seed=options.seed)
    start = time.perf_counter()
    trainer = Trainer(
        max_epochs=options.epochs,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[_Bar(name)],
    )
    trainer.fit(task, datamodule=digits)
    accuracy = trainer.test(task, datamodule=digits, verbose=False)[0]["test/accuracy"]
    seconds = time.perf_counter() - start
    network.cpu().save_pretrained(options.output / name)
    held_out = len(digits.parts["test"])  # type: ignore[arg-type]
    result = {"network": name, "accuracy": accuracy, "held_out": held_out, "right": round(accuracy * held_out)}
    return {**result, "seconds": seconds, **_costs(name, network)}


class _Bar(Callback):
    """Send the progress of a network's training, and at the end its accuracy, to the process that shows the bars."""

    updates: Queue[_Update]

    def __init__(self, network: str) -> None:
        self.network = network

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *rest: Any) -> None:
        state = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  loss {outputs['loss'].item():.3f}"
        self.updates.put((self.network, trainer.global_step, int(trainer.estimated_stepping_batches), state))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        accuracy = float(trainer.callback_metrics["test/accuracy"])
        steps = trainer.global_step
        self.updates.put((self.network, steps, steps, f"held-out accuracy {percent(accuracy)}"))


def _costs(name: str, network: torch.nn.Module) -> Row:
    """Count the cost of one image: in the network as trained, and in the full network by the papers' rule."""
    small = cost.count(network.eval(), (1, 3, _SIDE, _SIDE))
    full = cost.predict(models.MODELS[name]().eval(), channels=3, size=(224, 224), convention="paper")
    counts = {"weights": small.weights, "macs": small.macs, "full_weights": full.weights, "full_macs": full.macs}
    return counts | {"printed_weights": NETWORKS[name].parameters, "printed_macs": NETWORKS[name].macs}


def _trained_table(rows: list[Row]) -> Table:
    columns = [
        Column("network", "network", left=True),
        Column("accuracy", "held-out accuracy", percent),
        Column("right", f"correct of {rows[0]['held_out']}"),
        Column("weights", "weights", "{:,}".format),
        Column("macs", "MACs", millions),
        Column("seconds", "trained in", lambda seconds: f"{_clock(seconds)} min"),
    ]
    return Table(f"as trained: {_SIDE} × {_SIDE}, ten classes", columns, rows)


def _full_table(rows: list[Row]) -> Table:
    columns = [
        Column("network", "network", left=True),
        Column("full_weights", "weights", "{:,}".format),
        Column("printed_weights", "KAN"),
        Column("full_macs", "MACs", millions),
        Column("printed_macs", "KAN"),
    ]
    return Table("full networks, 224 × 224; KAN: as printed in the paper", columns, rows)


def _measure_grid(side: int) -> list[Row]:
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


def _table_2(rows: list[Row]) -> Table:
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


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
