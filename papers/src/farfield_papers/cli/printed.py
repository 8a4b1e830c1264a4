"""The networks and the scores that the papers print; their tables of operators stand in `farfield.cli.printed`."""

from __future__ import annotations

from typing import NamedTuple


class Network(NamedTuple):
    """A network of the papers' tables: its name there, parameters and MACs as printed."""

    name: str
    parameters: str | None = None
    macs: str | None = None


NETWORKS = {
    "mobilenet_v2": Network("MobileNetV2", "3.47m", "300m"),
    "mobilenet_v2_kronecker_kv": Network("MobileNetV2+KAO", "3.46m", "298m"),
    "mobilenet_v2_siamese": Network("MobileNetV2+SAO", "3.47m"),
    "kanet_kv": Network("KANet_KV", "3.44m", "288m"),
    "kanet_qkv": Network("KANet_QKV", "3.44m", "281m"),
    "kanet_without_attention": Network("KANet w/o KAO", "3.46m", "298m"),
    "attnnet": Network("AttnNet", "3.44m", "365m"),
    "attnnet_pooled": Network("AttnNet+Pool", "3.44m", "300m"),
    "attnnet_averaged": Network("AttnNet1/N", "3.44m", "312m"),
    "sanet": Network("SANet", "3.44m", "288m"),
    "sanet_ones": Network("SANet w/o params", "3,448,448"),
    "sanet_local": Network("SANet w/o global term", "3.44m"),
    "sanet_without_attention": Network("SANet w/o SAO", "3.44m"),
    "senet": Network("SENet", "3.44m", "294m"),
}


class Scores(NamedTuple):
    """Scores of the papers' tables that a recipe is for, as printed.

    Attributes:
        source: The tables.
        measures: What is scored.
        rows: Options of `farfield fit --config RECIPE` -> the scores, in the order of the measures.
    """

    source: str
    measures: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]


_NETWORK, _OUTPUT, _OPERATOR = "--model.network ", "--model.network.output ", "--model.network.operator "
_PLACES, _BASIS, _HEADS = "--model.network.attention ", "--model.network.basis ", "--model.network.heads "
_RESNET_101 = "--model.network.backbone resnet101 --model.network.weights data/resnet101.pth"
_RESNEXT_101 = "--model.network.backbone resnext101_32x8d --model.network.weights data/resnext101_32x8d.pth"
_RESTORED = ("PSNR", "SSIM", "NRMSE")
SCORES = {
    "kan_imagenet": Scores(
        "KAN Tables 3-5",
        ("top-1",),
        {
            f"{_NETWORK}kanet_qkv": ("0.728",),
            f"{_NETWORK}kanet_kv": ("0.729",),
            f"{_NETWORK}mobilenet_v2": ("0.720",),
            f"{_NETWORK}attnnet": ("0.730",),
            f"{_NETWORK}attnnet_pooled": ("0.729",),
            f"{_NETWORK}mobilenet_v2_kronecker_kv": ("0.726",),
            f"{_NETWORK}kanet_without_attention": ("0.721",),
        },
    ),
    "kan_voc": Scores(
        "KAN Table 6",
        ("pixel accuracy", "mean IoU, %"),
        {
            f"{_OUTPUT}kronecker_kv": ("0.946", "75.9"),
            f"{_OUTPUT}kronecker_qkv": ("0.946", "75.8"),
            f"{_OUTPUT}softmax": ("0.947", "76.3"),
            f"{_OUTPUT}aspp": ("0.944", "75.1"),
        },
    ),
    "san_imagenet": Scores(
        "SAN Tables 3-6 and 8",
        ("top-1",),
        {
            f"{_NETWORK}sanet": ("0.730",),
            f"{_NETWORK}mobilenet_v2": ("0.720",),
            f"{_NETWORK}attnnet": ("0.730",),
            f"{_NETWORK}attnnet_pooled": ("0.729",),
            f"{_NETWORK}attnnet_averaged": ("0.730",),
            f"{_NETWORK}senet": ("0.724",),
            f"{_NETWORK}mobilenet_v2_siamese": ("0.727",),
            f"{_NETWORK}sanet_without_attention": ("0.721",),
            f"{_NETWORK}sanet_local": ("0.728",),
            f"{_NETWORK}sanet_ones": ("0.728",),
        },
    ),
    "san_planaria": Scores(
        "SAN Table 7",
        _RESTORED,
        {
            f"{_OPERATOR}siamese": ("31.929", "0.7898", "0.0257"),
            f"{_OPERATOR}null": ("31.571", "0.7707", "0.0268"),
            f"{_OPERATOR}averaged": ("31.951", "0.7919", "0.0257"),
        },
    ),
    "san_tribolium": Scores(
        "SAN Table 7",
        _RESTORED,
        {
            f"{_OPERATOR}siamese": ("32.549", "0.9196", "0.0239"),
            f"{_OPERATOR}null": ("32.433", "0.9171", "0.0241"),
            f"{_OPERATOR}averaged": ("32.571", "0.9201", "0.0236"),
        },
    ),
    "san_flywing": Scores(
        "SAN Table 7",
        _RESTORED,
        {
            f"{_OPERATOR}siamese": ("22.329", "0.5916", "0.0767"),
            f"{_OPERATOR}null": ("21.958", "0.5592", "0.0798"),  # printed 21958
            f"{_OPERATOR}averaged": ("22.361", "0.5903", "0.0763"),
        },
    ),
    # Table 2's basis of 64 is Table 1's last row, with other scores. Table 4 prints what attention adds.
    "fa_coco": Scores(
        "FA Tables 1-4",
        ("box AP, %", "mask AP, %"),
        {
            f'{_PLACES}"[]"': ("39.4", "35.1"),
            f'{_PLACES}"[res3]"': ("40.2", "36.0"),
            f'{_PLACES}"[res4]"': ("39.1", "34.8"),
            f'{_PLACES}"[fpn1]"': ("39.9", "35.8"),
            f'{_PLACES}"[fpn2]"': ("39.7", "35.7"),
            f'{_PLACES}"[fpn3]"': ("39.7", "35.5"),
            f'{_PLACES}"[fpn4]"': ("39.7", "35.4"),
            f'{_PLACES}"[fpn5]"': ("39.6", "35.3"),
            f'{_PLACES}"[fpn_all]"': ("40.6", "36.2"),
            f'{_PLACES}"[fpn1, fpn2, fpn3, fpn4, res3]"': ("40.6", "36.1"),
            f'{_PLACES}"[fpn_all, res3, res4]"': ("41.2", "36.7"),
            f"{_BASIS}32": ("40.4", "36.1"),
            f"{_BASIS}64": ("40.6", "36.2"),
            f"{_BASIS}128": ("40.3", "36.1"),
            f"{_HEADS}2": ("41.0", "36.5"),
            f"{_HEADS}4": ("40.7", "36.1"),
            f"{_HEADS}8": ("40.7", "36.0"),
            f'{_RESNET_101} {_PLACES}"[]"': ("41.3", "36.6"),
            _RESNET_101: ("43.1", "37.9"),
            f'{_RESNEXT_101} {_PLACES}"[]"': ("43.5", "38.5"),
            _RESNEXT_101: ("44.9", "39.5"),
        },
    ),
    "fa_sceneflow": Scores(
        "FA Table 6",
        ("EPE, px",),
        {f"{_OPERATOR}factorized_gaussian": ("0.477",), f"{_OPERATOR}null": ("0.513",)},
    ),
}
