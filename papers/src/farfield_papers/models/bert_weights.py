"""Load weights of Hugging Face's BERT into `Bert`: the same shapes under other names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from farfield._refusals import door
from farfield._weights import describe_differences, read_weights
from farfield.nn.transformer import TransformerLayer

_Network = TypeVar("_Network", bound=nn.Module)

# Parts of names in `Bert` -> the same parts of Hugging Face's names.
_EMBEDDINGS = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "feedforward_norm": "output.LayerNorm",
}
_HEAD = {
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.dense": "pooler.dense",
}
# Ends of the names of what operators learn beside projections: scores of siamese, latents of flare, maps of hedgehog.
_LEARNED = (".attention.weight", ".attention.latents", ".attention.query_map", ".attention.key_map")
# Names of the two parameters of a norm in files converted from TensorFlow checkpoints -> current names.
_OLD = {".gamma": ".weight", ".beta": ".bias"}


def load_hugging_face(net: _Network, state_dict: Mapping[str, Tensor]) -> _Network:
    """Copy the weights of Hugging Face's `BertForMaskedLM`, `BertForPreTraining` or `BertModel` into a network.

    With a factorized operator the projections of queries, keys and values become those of coefficients, basis and
    values. Entries of the state dict that the network does not have are ignored: a head of the other kind, and the
    word head's copy of the word embedding.

    Args:
        net: The network, a `Bert`, changed in place. The shapes do not depend on its number of heads, which must be
            that of the model for the same outputs.
        state_dict: The state dict of the model, or the contents of its weights file. Only `BertForMaskedLM` and
            `BertForPreTraining` have the word head, and only `BertModel` and `BertForPreTraining` the pooled one.

    Returns:
        The network.

    Raises:
        ValueError: If a tensor of the network is missing or has another shape; nothing is copied then. The score
            vectors of siamese and siamese_local, the latents of flare and the maps of hedgehog are missing in every
            BERT.

    Example:
        >>> import transformers
        >>> from farfield_papers import models
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        >>> theirs = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=100, **sizes))
        >>> net = models.bert_small("softmax", vocabulary=100, positions=512, channels=32, layers=2)
        >>> models.load_hugging_face(net, theirs.state_dict()) is net
        True
    """
    theirs = {_modernize_name(name): tensor for name, tensor in state_dict.items()}
    own = {_name_source(name): (name, tensor) for name, tensor in net.state_dict().items()}
    learned = [name for source, (name, _) in own.items() if name.endswith(_LEARNED) and source not in theirs]
    if learned:
        what = "a score vector" if learned[0].endswith(_LEARNED[0]) else "what its operator learns"
        problem = f"{net.name} has {what} in its attention, {learned[0]}, which no BERT has"
        fix = "a Bert with another operator than siamese, siamese_local, flare and hedgehog."
        raise ValueError(f"load_hugging_face: {problem}; fix: {fix}")
    given = {source: theirs[source] for source in own if source in theirs}
    problems = describe_differences({source: tensor for source, (_, tensor) in own.items()}, given)
    if problems:
        wanted = f"load_hugging_face: for {net.name} the state dict must be that of a BERT of its sizes"
        fix = "a Bert with the vocabulary, positions, channels and layers of the model's config, and a head that it has"
        raise ValueError(f"{wanted}: {problems}. fix: {fix}.")
    net.load_state_dict({name: given[source] for source, (name, _) in own.items()})
    return net


def _modernize_name(name: str) -> str:
    """Return a name in Hugging Face's model without its prefix "bert." and with `weight` and `bias` for old names."""
    name = name.removeprefix("bert.")
    for old, new in _OLD.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _name_source(name: str) -> str:
    if name == "head.bias":
        return "cls.predictions.bias"
    module, _, leaf = name.rpartition(".")
    if module.startswith("layers."):
        _, number, part = module.split(".", 2)
        return f"encoder.layer.{number}.{_LAYER.get(part, part)}.{leaf}"
    return f"{(_EMBEDDINGS | _HEAD).get(module, module)}.{leaf}"


def fill_from_file(net: _Network, path: Path) -> _Network:
    """Copy a file's weights, Hugging Face's or those of a saved `Bert`, into a `Bert`, and return it."""
    with door(str(net.name)):
        tensors = read_weights(path)
    _check_number_of_heads(net, path.parent / "config.json")
    if set(tensors) == set(net.state_dict()):
        tensors = {_name_source(name): tensor for name, tensor in tensors.items()}
    return load_hugging_face(net, tensors)


def _check_number_of_heads(net: nn.Module, config: Path) -> None:
    # No weight shows the number of heads.
    try:
        theirs = json.loads(config.read_text(encoding="utf-8")).get("num_attention_heads")
    except (OSError, ValueError, AttributeError):  # no such file, or not theirs
        return
    heads = next(layer.attention.heads for layer in net.modules() if isinstance(layer, TransformerLayer))
    if theirs is not None and theirs != heads:
        # Of the builders, bert_small alone has a number of heads.
        fix = f"heads={theirs}"
        if net.name != "bert_small":
            fix = f"models.bert_small(heads={theirs}, …), with the other sizes of that file"
        raise ValueError(f"{net.name}: it has {heads} heads, and the model of {config} has {theirs}; fix: {fix}.")
