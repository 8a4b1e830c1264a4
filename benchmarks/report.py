"""Results of a race as a table, and as a picture of time and memory against the number of positions."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from race import Row

from farfield.cli.output import Column, Table, joined, megabytes, milliseconds, ratio, write_table


def show(rows: list[Row]) -> None:
    """Print a table for each grid and direction."""
    for _, group in groupby(rows, key=lambda row: (row["size"], row["direction"])):
        each = [row | {"error_text": verdict(row), "rival_text": rival(row)} for row in group]
        columns = [Column("name", "", left=True), Column("seconds", "time", milliseconds)]
        columns += [Column("copies", "copies", "{:,.2f}".format)]
        columns += [Column("plain_times", "plain ÷", ratio), Column("sdpa_times", "SDPA ÷", ratio)]
        if any(row["rival"] for row in each):
            columns.append(Column("rival_text", "÷ ours", left=True))
        columns.append(Column("peak_bytes", "peak memory", megabytes))
        if any(row["saved_bytes"] for row in each):
            columns.append(Column("saved_bytes", "kept for backward", megabytes))
        columns.append(Column("error_text", "error", left=True))
        write_table(Table(title(each[0]), columns, each))
    print("\n".join([*NOTES, str(rows[0]["hardware"])]))


NOTES = [
    "Copies: time divided by that of x.clone(). Plain ÷, SDPA ÷: time of regular attention divided by the operator's.",
    "÷ ours: time of the peer divided by that of farfield's operator with the same weights, or of the nearest operator",
    "if none computes the same function. Error: relative L2 against float64, of responses and gradients.",
]


def title(row: Row) -> str:
    """Format the setting and the direction of a result."""
    projections = row["project"] or "none"
    return (
        f"{joined(row['size'])} positions, {row['channels']} channels, batch {row['batch']}, heads {row['heads']}, "
        f"projections {projections}, {row['dtype']}: {row['direction']}"
    )


def verdict(row: Row) -> str:
    """Format the error, marked if the result is wrong."""
    return f"{row['error']:.1e}" if row["right"] else f"WRONG, {row['error']:.1e}"


def rival(row: Row) -> str | None:
    """Format the ratio of a peer to its rival, and the rival's name."""
    if not row["rival_times"]:
        return None
    operator = str(row["rival"]).split(" ")[0]
    return f"{ratio(row['rival_times'])} {operator}" + ("" if row["same"] else " (another function)")


def picture(rows: list[Row], file: Path) -> None:
    """Draw time and memory against the number of positions, log-log, with the copy as a dashed line."""
    import matplotlib.pyplot as plt

    directions = list(dict.fromkeys(str(row["direction"]) for row in rows))
    names = list(dict.fromkeys(str(row["name"]) for row in rows if row["name"] != "copy"))
    figure, grid = plt.subplots(
        len(directions), 2, figsize=(11, 4.2 * len(directions)), layout="constrained", squeeze=False
    )
    for panels, direction in zip(grid, directions, strict=True):
        for axes, key, scale in zip(panels, ("seconds", "peak_bytes"), (1e3, 1e-6), strict=True):
            for index, name in enumerate([*names, "copy"]):
                of_name = [row for row in rows if row["name"] == name and row["direction"] == direction and row[key]]
                points = sorted((row["positions"], scale * row[key]) for row in of_name)
                if points:
                    axes.plot(*zip(*points, strict=True), label=name, **style(index, name, bool(of_name[0]["rival"])))
            axes.set(
                xscale="log", yscale="log", xlabel="positions", ylabel="milliseconds" if scale > 1 else "megabytes"
            )
            positions = sorted({int(row["positions"]) for row in rows})
            axes.set_xticks(positions, [f"{number:,}" for number in positions])
            axes.set_xticks([], minor=True)
            axes.set_title(f"{'time' if scale > 1 else 'peak memory'}, {direction}")
            axes.grid(alpha=0.3, which="both")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    figure.suptitle(f"{title(rows[0]).split('positions, ')[1].rsplit(':', 1)[0]}\n{rows[0]['hardware']}", fontsize=9)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def style(index: int, name: str, peer: bool) -> dict[str, object]:
    """Return the style of a contestant's line; peers are dotted, the copy is dashed."""
    import matplotlib

    if name == "copy":
        return {"color": "black", "linestyle": "--"}
    if name in ("plain", "SDPA"):
        return {"color": "black" if name == "plain" else "grey", "marker": "s", "markersize": 4}
    colours = [colour for number, colour in enumerate(matplotlib.colormaps["tab20"].colors) if number not in (14, 15)]
    line = {"color": colours[index % len(colours)], "linestyle": ":" if peer else "-"}
    return line | {"marker": "ov^"[index % 3], "markersize": 4}
