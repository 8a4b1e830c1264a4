"""KAN Tables 3-5 and SAN Tables 3, 4, 6 and 8: parameters and MACs of every network, as printed."""

from __future__ import annotations

import pytest

from farfield import cost, nn
from farfield_papers import models
from papers_helpers.printed import millions, network

# Exact, at 224 x 224: weights (no biases, no norms); MACs in the papers' convention, in millions.
COUNTS = {
    "mobilenet_v2": (3_469_760, "300.77"),
    "kanet_kv": (3_448_448, "288.41"),
    "kanet_qkv": (3_448_448, "281.12"),
    "attnnet": (3_448_448, "365.37"),
    "attnnet_pooled": (3_448_448, "300.25"),
    "attnnet_averaged": (3_448_448, "312.09"),
    "sanet": (3_449_408, "289.86"),
    "sanet_ones": (3_448_448, "289.86"),
    "sanet_local": (3_449_408, "289.58"),
    "mobilenet_v2_kronecker_kv": (3_461_120, "298.65"),
    "kanet_without_attention": (3_457_088, "290.54"),
    "sanet_without_attention": (3_344_448, "279.15"),
    "mobilenet_v2_siamese": (3_462_080, "300.09"),
    "senet": (3_448_448, "278.31"),
}
# Networks whose printed entries do not come out are in papers/docs/printed-numbers.md and not here.
PRINTED_PARAMETERS = {
    "mobilenet_v2": "3.47m",  # KAN Tables 3 and 5, SAN Tables 3 and 6: with the classifier's 1,000 biases
    "kanet_kv": "3.44m",  # KAN Tables 3, 4 and 5
    "kanet_qkv": "3.44m",  # KAN Tables 3 and 4
    "attnnet": "3.44m",  # KAN Table 4, SAN Table 4
    "attnnet_pooled": "3.44m",  # KAN Table 4, SAN Table 4
    "attnnet_averaged": "3.44m",  # SAN Table 4
    "sanet": "3.44m",  # SAN Tables 3, 4 and 6
    "sanet_local": "3.44m",  # SAN Table 6
    "senet": "3.44m",  # SAN Table 4
    "mobilenet_v2_kronecker_kv": "3.46m",  # KAN Table 5
}
PRINTED_MACS = {
    "mobilenet_v2": "300m",  # KAN Tables 3 and 5, SAN Table 3
    "kanet_kv": "288m",  # KAN Tables 3, 4 and 5
    "kanet_qkv": "281m",  # KAN Tables 3 and 4
    "attnnet": "365m",  # KAN Table 4, SAN Table 4
    "attnnet_pooled": "300m",  # KAN Table 4, SAN Table 4
    "attnnet_averaged": "312m",  # SAN Table 4
    "mobilenet_v2_kronecker_kv": "298m",  # KAN Table 5
}


def test_every_network_is_counted() -> None:
    assert set(models.MODELS) >= set(COUNTS)


@pytest.mark.long
@pytest.mark.parametrize("name", COUNTS)
def test_weights_and_macs(name: str) -> None:
    found = network(name)
    assert (found.weights, f"{found.macs / 1e6:.2f}") == COUNTS[name]


@pytest.mark.parametrize("name", PRINTED_PARAMETERS)
def test_printed_parameters(name: str) -> None:
    weights = network(name).weights
    assert millions(weights + 1000 * (name == "mobilenet_v2"), 2) == PRINTED_PARAMETERS[name]


@pytest.mark.parametrize("name", PRINTED_MACS)
def test_printed_macs(name: str) -> None:
    assert millions(network(name).macs) == PRINTED_MACS[name]


def test_san_table_8() -> None:
    assert network("sanet").weights == 3_449_408
    assert network("sanet_ones").weights == 3_448_448
    assert network("sanet").weights - network("sanet_ones").weights == 960  # SAN §4.6: "only 960 more parameters"


def test_parameters_with_norms_and_biases() -> None:
    assert network("mobilenet_v2").parameters == 3_504_872  # torchvision's: 34,112 of batch norm, 1,000 biases
    outside = 29_824 + 1_000  # batch norm after every convolution, and the classifier's biases
    assert network("kanet_qkv").parameters == 3_448_448 + outside + 10 * 4  # a scale a head in ten operators
    assert network("sanet").parameters == 3_449_408 + outside + 2 * 960  # a scale and a shift a channel


@pytest.mark.long
def test_reduce_first_executes_what_kan_counts_and_less_than_san_counts() -> None:
    for name in ("mobilenet_v2", "kanet_kv", "attnnet", "attnnet_pooled"):
        assert network(name, "farfield").macs == network(name).macs
    executed = {name: f"{network(name, 'farfield').macs / 1e6:.2f}" for name in ("sanet", "attnnet_averaged")}
    assert executed == {"sanet": "281.41", "attnnet_averaged": "311.12"}


def test_a_block_maps_the_responses_of_the_axes_by_themselves() -> None:
    """The last convolution acts on one vector an index of each axis, before they are added to the grid."""
    blocks = [(28, 32, 32), *[(14, 64, 64)] * 3, (14, 64, 96), *[(14, 96, 96)] * 2, *[(7, 160, 160)] * 2, (7, 160, 320)]
    mapped = sum(2 * side * channels * out for side, channels, out in blocks)
    assert network("kanet_qkv", "farfield").macs - network("kanet_qkv").macs == mapped


def test_pooling_in_floor_mode_would_not_give_the_printed_count() -> None:
    # 7 positions a side become 3 in floor mode and 4 in ceil mode, in the three blocks of 160 channels.
    lost = 3 * (16 - 9) * (160**2 + 2 * 49 * 160)
    assert f"{(network('attnnet_pooled').macs - lost) / 1e6:.2f}" == "299.38"


def test_squeeze_excite_reductions() -> None:
    # SAN's 3.44m needs a reduction of 2: the value map's own c² weights.
    for reduction, weights in ((2, 3_448_448), (4, 3_392_128), (8, 3_363_968), (16, 3_349_888)):
        squeezes = [nn.SqueezeExcite(channels, reduction=reduction) for channels in ATTENTION_CHANNELS]
        added = sum(parameter.numel() for squeeze in squeezes for parameter in squeeze.parameters())
        assert added == sum(2 * channels**2 // reduction for channels in ATTENTION_CHANNELS)
        assert network("senet").weights - sum(c * c for c in ATTENTION_CHANNELS) + added == weights


ATTENTION_CHANNELS = (32, 64, 64, 64, 64, 96, 96, 160, 160, 160)


def test_attention_blocks_channels() -> None:
    assert sum(ATTENTION_CHANNELS) == 960
    assert sum(channels**2 for channels in ATTENTION_CHANNELS) == 112_640


def test_the_skip_block_saves_positions_times_channels_squared() -> None:
    # KAN §3.5 prints a saving of h·w·c MACs; it is h·w·c².
    plain, skip = (cost.count(nn.BaseBlock(24, 24, skip=skip).eval(), (1, 24, 14, 14)) for skip in (False, True))
    assert plain.macs - skip.macs == 14 * 14 * 24**2
    assert plain.weights - skip.weights == 24**2
