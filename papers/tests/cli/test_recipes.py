"""`farfield recipes`: what it lists, prints and copies, and recipes that are found by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from farfield.cli import main
from farfield_papers.cli import recipes

RECIPES = Path(__file__).parents[2] / "recipes"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["recipes", *arguments])
    return capsys.readouterr().out


def test_all_are_listed_with_what_they_take_and_reach(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    names = [path.stem for path in sorted(RECIPES.glob("*.yaml"))]
    assert [line.split()[0] for line in text.splitlines() if line and not line.startswith((" ", "farfield"))] == names
    assert "top-1 .728 (KANet_QKV); .729 kanet_kv" in text
    assert max(map(len, text.splitlines())) <= 120


def test_rows_have_the_whole_comment(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json.loads(printed(capsys, "--json"))}
    for name, row in rows.items():
        recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
        assert row["task"] == recipe.get("task", "classify")
        assert all(row[key] for key in ("paper", "to_reach", "takes", "differs")), name
        assert not any("#" in value or "  " in value for value in row.values() if value)
    assert rows["digits"]["to_reach"].startswith("98 % of the held-out fifth")
    # The commands below the fields belong to none.
    assert "--seed_everything" not in json.dumps(rows["camvid"], ensure_ascii=False)
    assert printed(capsys, "--csv").count("\n") == len(rows) + 1


def test_one_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "digits") == (RECIPES / "digits.yaml").read_text(encoding="utf-8")


def test_a_copy_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--copy", "text", "--to", str(tmp_path))
    copied = tmp_path / "text.yaml"
    assert str(copied) in text
    assert copied.read_bytes() == (RECIPES / "text.yaml").read_bytes()
    copied.write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        main(["recipes", "--copy", "text", "--to", str(tmp_path)])
    assert stopped.value.code == 2
    assert "exists and is not replaced; fix: remove it, or --to another folder." in capsys.readouterr().err
    assert copied.read_text() == "mine"
    with pytest.raises(SystemExit):
        main(["recipes", "--copy", "text", "--to", str(tmp_path / "nowhere")])
    assert "farfield recipes: there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["digits", "digits.yaml"])
def test_a_name_is_the_recipe(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(recipes.find_configuration(value)).samefile(RECIPES / "digits.yaml")
    (tmp_path / value).write_text("seed_everything: 7\n")
    # What --copy makes is a file of the user's and has a suffix; a file of a recipe's bare name is not meant by it.
    found = Path(recipes.find_configuration(value))
    assert found.samefile(RECIPES / "digits.yaml" if value == "digits" else tmp_path / value)
    assert recipes.find_configuration(f"./{value}") == f"./{value}"
    assert recipes.find_configuration(str(tmp_path / value)) == str(tmp_path / value)


@pytest.mark.long
def test_the_commands_take_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # A file of one setting does not name a network and data.
    (tmp_path / "digits").write_text("seed_everything: 77\n")
    named = ["--model.network", "kanet_qkv", "--data", "farfield_papers.data.classify.Digits"]
    for value, seed in (
        ("digits", yaml.safe_load((RECIPES / "digits.yaml").read_text())["seed_everything"]),
        ("./digits", 77),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["fit", "--config", value, "--print_config", *(named if seed == 77 else [])])
        assert stopped.value.code == 0
        assert f"seed_everything: {seed}\n" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["digit", "digts.yaml", "mine/digits", "mine/digits.yaml"])
def test_neither_a_file_nor_a_name(value: str) -> None:
    with pytest.raises(LookupError, match=f'no recipe or file "{value}"; nearest: digits'):
        recipes.find_configuration(value)
