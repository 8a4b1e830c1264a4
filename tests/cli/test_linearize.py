"""`farfield linearize`: an encoder in a folder and a text; the folder that is written; mistakes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from farfield._checks import install_command
from farfield.cli import main
from farfield.insertion import apply_recipe
from farfield.insertion._linearize import api

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", *"bcdefgh"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "_LENGTHS", (16,))
    Path("bert").mkdir()
    Path("bert/vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    transformers.BertTokenizer(vocab="bert/vocab.txt").save_pretrained("bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes)
    transformers.BertModel(config).save_pretrained("bert")
    Path("text.txt").write_text(" ".join("abcdefgh"[(7 * place * place) % 8] for place in range(900)), encoding="utf-8")

    def run(text: str) -> str:
        try:
            main(["linearize", *text.split()])
        except SystemExit as ended:
            assert ended.code == 2  # noqa: PT017
            return capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.mark.long
def test_an_encoder_becomes_linear_and_loads_again(run: Callable[[str], str]) -> None:
    command = "bert --texts text.txt --out linear --operator hedgehog --steps 3 --tokens 16"
    printed = run(command)
    assert "encoder.layer.0.attention.self" in printed
    report = json.loads(Path("linear/report.json").read_text("utf-8"))
    assert len(report["losses"]) == 3
    assert Path("linear/report.png").stat().st_size > 10_000
    loaded = transformers.AutoModel.from_pretrained("linear", attn_implementation="eager").eval()
    apply_recipe(loaded, "linear")
    assert bool(loaded.encoder.layer[0].attention.self.query_map.any())
    # A repeated command has nothing left to train.
    assert run(command).splitlines()[0].split(" before")[0] == printed.splitlines()[0].split(" before")[0]


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("bert --texts text.txt --out bert", "would replace bert"),
        ("bert --texts text.txt --out text.txt", "would replace text.txt"),
        ("bert --texts none.txt --out linear --tokens 16", "there is no file none.txt"),
        ("bert --texts text.txt --out linear --tokens 80", "fix: --tokens 64"),
        ("bert --texts text.txt --out linear --tokens 60", "fix: more text, or fewer --tokens"),
        ("bert --out linear", "--texts corpus.txt"),
        ("timm:no_such_network --images . --out linear", "timm has no no_such_network"),
        ("nowhere --texts text.txt --out linear", "is no encoder of transformers"),
        ("--texts text.txt --out linear", "give a model"),
    ],
)
def test_mistakes(run: Callable[[str], str], text: str, fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    weights = Path("bert/model.safetensors").read_bytes()
    assert fact in run(text)
    assert Path("bert/model.safetensors").read_bytes() == weights
    assert not Path("linear").exists()


@pytest.mark.parametrize(
    ("text", "package"),
    [("bert --texts text.txt --out linear", "transformers"), ("timm:vit --images . --out linear", "timm")],
)
def test_a_missing_library_is_named_with_its_extra(
    run: Callable[[str], str], text: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert f"{package} is not installed; fix: {install_command(package)}" in run(text)
