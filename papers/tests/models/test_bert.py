"""BERT: its counts to the digit, Hugging Face's outputs from Hugging Face's weights, and padding that is not heard."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from farfield import ShapeError, cost, replace_attention
from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.models.bert import Bert
from farfield_papers.models.bert_weights import fill_from_file
from helpers.seeding import seeded_generator
from helpers.token_products import EPS, relative

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
WORDS = torch.randint(97, (3, 17), generator=seeded_generator(0))
VALID = torch.arange(17) < torch.tensor([[17], [9], [2]])
OURS = {"vocabulary": 97, "positions": 40, "channels": 32, "layers": 3, "heads": 4, "dropout": 0.0}


def theirs(kind: str = "BertForMaskedLM") -> Any:
    """A BERT of transformers whose weights are no mere beginnings."""
    config = transformers.BertConfig(vocab_size=97, max_position_embeddings=40, **SIZES, hidden_dropout_prob=0.0)
    model = getattr(transformers, kind)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def ours(operator: str, state: dict[str, torch.Tensor]) -> Bert:
    return models.load_hugging_face(models.bert_small(operator, **OURS).double().eval(), state)  # type: ignore[arg-type]


# ---- counts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("operator", ["softmax", "factorized_gaussian", "factorized"])
@pytest.mark.parametrize(
    ("build", "pooled", "words"),
    [(models.bert_base, 109_482_240, 109_514_298), (models.bert_large, 335_141_888, 335_174_458)],
)
def test_parameters_to_the_digit(build: Any, pooled: int, words: int, operator: str) -> None:
    with torch.device("meta"):
        nets = [build(operator, head=head) for head in ("pooled", "words")]
    assert [sum(parameter.numel() for parameter in net.parameters()) for net in nets] == [pooled, words]


def test_berts_own_numbers() -> None:
    with torch.device("meta"):
        base, large = models.bert_base(), models.bert_large()
    assert [(len(net.layers), net.layers[0].attention.heads) for net in (base, large)] == [(12, 12), (24, 16)]
    assert [net.layers[0].expand.weight.shape for net in (base, large)] == [(3072, 768), (4096, 1024)]
    assert base.norm.eps == base.layers[0].norm.eps == base.layers[0].feedforward_norm.eps == 1e-12
    assert base.layers[0].dropout.p == base.dropout.p == 0.1
    net = models.bert_small("factorized_gaussian")
    weights = torch.cat([net.words.weight.flatten(), net.layers[0].expand.weight.flatten()])
    assert float(weights.abs().max()) <= 0.04
    # A normal distribution of deviation 0.02 cut at two of them has 0.88 of it.
    assert float(weights.std()) == pytest.approx(0.0176, rel=0.02)
    assert not net.layers[0].expand.bias.any()


# ---- against transformers --------------------------------------------------------------------------------------------
def test_conventional_logits_and_gradients_are_those_of_transformers() -> None:
    model = theirs()
    net = ours("softmax", model.state_dict())
    wanted = model(WORDS, attention_mask=VALID.long(), token_type_ids=(WORDS > 50).long()).logits
    found = net(WORDS, mask=VALID, types=(WORDS > 50).long())
    assert relative(found[VALID], wanted[VALID]) < 50 * EPS
    # Transformers gives the embedding of word 0, its padding, no gradient.
    words = WORDS.clamp_min(1)
    wanted, found = model(words).logits, net(words)
    assert relative(found, wanted) < 50 * EPS
    names = ["words.weight", "layers.1.attention.key.weight", "head.bias"]
    sources = [
        *("bert.embeddings.word_embeddings.weight", "bert.encoder.layer.1.attention.self.key.weight"),
        "cls.predictions.bias",
    ]
    weights = torch.randn_like(wanted)
    mine = torch.autograd.grad((found * weights).sum(), [net.get_parameter(name) for name in names])
    other = torch.autograd.grad((wanted * weights).sum(), [model.get_parameter(name) for name in sources])
    for a, b in zip(mine, other, strict=True):
        assert relative(a, b) < 500 * EPS


@pytest.mark.parametrize("operator", ["factorized_gaussian", "factorized", "averaged", "dot", "siamese_ones"])
def test_factorized_logits_are_those_of_transformers_with_its_attention_replaced(operator: str) -> None:
    model = theirs()
    net = ours(operator, model.state_dict())
    replaced = copy.deepcopy(model)
    replace_attention(replaced, operator)
    wanted = replaced(WORDS, attention_mask=VALID.long()).logits
    assert relative(net(WORDS, mask=VALID)[VALID], wanted[VALID]) < 50 * EPS
    assert relative(wanted[VALID], model(WORDS, attention_mask=VALID.long()).logits[VALID]) > 1e-4


def test_the_pooled_head_is_that_of_transformers() -> None:
    model = theirs("BertModel")
    net = Bert(head="pooled", operator="softmax", **OURS).double().eval()  # type: ignore[arg-type]
    models.load_hugging_face(net, model.state_dict())
    wanted = model(WORDS, attention_mask=VALID.long())
    assert relative(net(WORDS, mask=VALID), wanted.pooler_output) < 50 * EPS
    assert relative(net.encode(WORDS, mask=VALID)[VALID], wanted.last_hidden_state[VALID]) < 50 * EPS


@pytest.mark.long
def test_weights_from_files_of_old_and_new_names(tmp_path: Path) -> None:
    model = theirs("BertForPreTraining")
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in state.items()}
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in old.items()}
    save_file(state, tmp_path / "model.safetensors")
    torch.save(old, tmp_path / "pytorch_model.bin")
    net = ours("softmax", state)
    net.save_pretrained(tmp_path / "ours")
    for file in ("model.safetensors", "pytorch_model.bin", "ours/model.safetensors"):
        again = models.bert_small("softmax", **OURS, weights=tmp_path / file).double().eval()  # type: ignore[arg-type]
        torch.testing.assert_close(again(WORDS), net(WORDS), rtol=1e-4, atol=1e-5)


# ---- padding, choice, positions --------------------------------------------------------------------------------------
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_padding_holds_has_no_effect_at_all(operator: str) -> None:
    net = models.bert_small(operator, **OURS).eval()  # type: ignore[arg-type]
    found = net(WORDS, mask=VALID)
    for other in (torch.zeros_like(WORDS), torch.randint_like(WORDS, 97)):
        assert torch.equal(net(torch.where(VALID, WORDS, other), mask=VALID)[VALID], found[VALID])


@pytest.mark.parametrize("operator", ["softmax", "factorized_gaussian", "factorized", "averaged"])
def test_a_padded_text_is_what_it_is_alone(operator: str) -> None:
    net = models.bert_small(operator, **OURS).double().eval()  # type: ignore[arg-type]
    alone = net(WORDS[1:2, :9])
    assert relative(net(WORDS, mask=VALID)[1, :9], alone[0]) < 100 * EPS


def test_a_batch_that_is_all_padding_is_finite() -> None:
    net = models.bert_small("factorized_gaussian", **OURS)  # type: ignore[arg-type]
    assert net(WORDS, mask=torch.zeros_like(VALID)).isfinite().all()


def test_chosen_tokens_alone() -> None:
    net = models.bert_small("factorized_gaussian", **OURS).eval()  # type: ignore[arg-type]
    chosen = WORDS > 60
    torch.testing.assert_close(net(WORDS, chosen=chosen), net(WORDS)[chosen])
    assert net(WORDS, chosen=torch.zeros_like(VALID)).shape == (0, 97)


@pytest.mark.long
def test_cost_of_a_factorized_bert_is_linear() -> None:
    # The products of queries and keys are what is quadratic: 2 N² c MACs a layer.
    nets = {name: models.bert_small(name, **OURS | {"positions": 512}) for name in ("softmax", "averaged")}  # type: ignore[arg-type]
    macs = {
        name: [cost.count(net, torch.zeros(1, n, dtype=torch.long)).macs for n in (128, 256, 512)]
        for name, net in nets.items()
    }
    first, second, third = macs["softmax"]
    assert (third - second) - 2 * (second - first) == 3 * 2 * 32 * (512**2 - 256**2 - 2 * (256**2 - 128**2))
    first, second, third = macs["averaged"]
    assert (third - second) == 2 * (second - first)


def test_too_many_tokens_and_wrong_kinds_are_refused() -> None:
    net = models.bert_small("factorized_gaussian", **OURS)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"bert_small: 41 tokens .* 40 positions") as raised:
        net(torch.zeros(1, 41, dtype=torch.long))
    assert "fix: split the text, or build it with positions=41." in str(raised.value)
    with pytest.raises(ShapeError, match=r"words .*\(batch, tokens\)"):
        net(torch.zeros(4, dtype=torch.long))
    with pytest.raises(LookupError, match='bert_base: no operator "gauss"'):
        models.bert_base("gauss")
    with pytest.raises(LookupError, match='bert_base: no head "word"; nearest: words'):
        models.bert_base(head="word")
    with pytest.raises(ValueError, match="bert_small: layers must be"):
        models.bert_small(layers=0)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    state = theirs().state_dict()
    net = models.bert_small("softmax", **OURS | {"vocabulary": 98})  # type: ignore[arg-type]
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(
        ValueError, match=r"embeddings.word_embeddings.weight is \(97, 32\) and not \(98, 32\)"
    ) as raised:
        models.load_hugging_face(net, state)
    fix = "fix: a Bert with the vocabulary, positions, channels and layers of the model's config"
    assert fix in str(raised.value)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())
    with pytest.raises(ValueError, match=r"it lacks cls.predictions.bias"):
        models.load_hugging_face(models.bert_small("softmax", **OURS), theirs("BertModel").state_dict())  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"there are no weights .*none.bin"):
        models.bert_small(weights=tmp_path / "none.bin")


def test_another_number_of_heads_than_the_files(tmp_path: Path) -> None:
    """No weight has the number of heads: the configuration beside them has."""
    model = theirs()
    model.save_pretrained(tmp_path)
    weights, sizes = tmp_path / "model.safetensors", {**OURS, "heads": 2}
    text = f"it has 2 heads, and the model of {tmp_path / 'config.json'} has 4; fix: "
    with pytest.raises(ValueError, match=rf"^bert_small: {re.escape(text)}heads=4\.$") as raised:
        models.bert_small("softmax", **sizes, weights=weights)
    with pytest.raises(ValueError, match=rf"^bert_base: {re.escape(text)}models\.bert_small\(heads=4, …\), with the"):
        fill_from_file(Bert("bert_base", operator="softmax", **sizes), weights)
    heads = int(re.search(r"heads=(\d+)", str(raised.value))[1])
    net = models.bert_small("softmax", **{**OURS, "heads": heads}, weights=weights).double().eval()
    with torch.no_grad():
        assert relative(net(WORDS, mask=VALID)[VALID], model(WORDS, VALID.long()).logits[VALID]) < 1e-5
    # Without a configuration, or with one that is not theirs, no number of heads is wrong.
    for content in ("{}", "[]", "no JSON"):
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
        models.bert_small("softmax", **sizes, weights=weights)


# ---- saved -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", ["words", "pooled"])
def test_saved_and_loaded_by_its_name(tmp_path: Path, head: str) -> None:
    net = Bert("bert_base", operator="factorized", head=head, **OURS).eval()  # type: ignore[arg-type]
    net.save_pretrained(tmp_path)
    again = models.from_pretrained(tmp_path)
    assert isinstance(again, Bert)
    assert torch.equal(again(WORDS), net(WORDS))
    card = (tmp_path / "README.md").read_text()
    assert "for one text of 40 tokens" in card
    assert "pipeline_tag: fill-mask" in card
