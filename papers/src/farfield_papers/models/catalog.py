"""The networks by name, saved networks by path, and registration of the names with timm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from torch import nn

from farfield._checks import install_command, unknown
from farfield._refusals import door, put_name, refusal
from farfield.ops.table import OPERATORS, Operator
from farfield_papers.models.bert import Bert, bert_base, bert_large, bert_small
from farfield_papers.models.compact import VARIANTS, CompactNet
from farfield_papers.models.deeplab import DeepLab, deeplab_compact, deeplab_v2
from farfield_papers.models.detector import Detector, faster_rcnn, mask_rcnn
from farfield_papers.models.gan import SAGAN, sagan
from farfield_papers.models.psmnet import PSMNet, psmnet_basic, psmnet_stacked
from farfield_papers.models.storage import load_model
from farfield_papers.models.unet import ProjectionUNet, UNet, unet_care, unet_projection, unet_residual
from farfield_papers.models.video import I3D, VideoResNet, i3d_resnet50, video_resnet


class _Builder(Protocol):
    """The signature that the functions in `CLASSIFIERS` share."""

    __name__: str

    def __call__(
        self,
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: float = 1.0,
        strides: Sequence[int] | None = None,
        dropout: float = 0.2,
    ) -> CompactNet: ...


_T = TypeVar("_T")


class _Catalog(dict[str, _T]):
    """A dictionary whose error for an unknown name lists the nearest names."""

    def __missing__(self, name: str) -> _T:
        raise put_name("models.MODELS", unknown("model", name, self))


def _catalog(*builders: Any) -> _Catalog[Any]:
    return _Catalog((build.__name__, build) for build in builders)


def _builder(name: str, what: str) -> _Builder:
    """Make the builder of one entry of `VARIANTS`: a function of this module, which pickles and which YAML can name."""

    def build(
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: float = 1.0,
        strides: Sequence[int] | None = None,
        dropout: float = 0.2,
    ) -> CompactNet:
        return CompactNet(
            name, num_classes=num_classes, in_channels=in_channels, width=width, strides=strides, dropout=dropout
        )

    return _named(build, name, what)


def _response_builder(name: str, what: str) -> _Builder:
    """Make the builder of an entry of `VARIANTS` with a norm of responses, whose start is an argument too."""

    def build(
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: float = 1.0,
        strides: Sequence[int] | None = None,
        dropout: float = 0.2,
        response_start: Literal["zero", "one"] = "zero",
    ) -> CompactNet:
        sizes: dict[str, Any] = {"num_classes": num_classes, "in_channels": in_channels, "width": width}
        return CompactNet(name, strides=strides, dropout=dropout, response_start=response_start, **sizes)

    return _named(build, name, what)


def _named(build: Any, name: str, what: str) -> Any:
    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"Build {what}\n\nThe arguments are `CompactNet`'s."
    return build


def kanet(
    operator: str | Operator = "kronecker_qkv",
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    width: float = 1.0,
    strides: Sequence[int] | None = None,
    dropout: float = 0.2,
    response_start: Literal["zero", "one"] = "zero",
) -> CompactNet:
    """Build KANet, of Kronecker attention networks (KAN, KDD 2020), with any operator in its attention blocks.

    `operator` is a name of `ops.OPERATORS` or an `Operator`. The other arguments are `CompactNet`'s.

    Reference: KAN Table 1.

    Example:
        >>> import torch
        >>> from farfield_papers import models
        >>> net = models.kanet("factorized_gaussian", num_classes=10, width=0.25, strides=(1, 1, 2, 2, 2))
        >>> net(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return CompactNet("kanet", **locals())


def sanet(
    operator: str | Operator = "siamese",
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    width: float = 1.0,
    strides: Sequence[int] | None = None,
    dropout: float = 0.2,
    response_start: Literal["zero", "one"] = "zero",
) -> CompactNet:
    """Build SANet, with any operator in its attention blocks: the architecture of KANet with another default operator.

    `operator` is a name of `ops.OPERATORS` or an `Operator`. The other arguments are `CompactNet`'s; SAN's literal form
    has `response_start="one"`.

    Reference: SAN Table 9.

    Example:
        >>> import torch
        >>> from farfield_papers import models
        >>> models.sanet(num_classes=10, width=0.25)(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """
    return CompactNet("sanet", **locals())


mobilenet_v2 = _builder("mobilenet_v2", "MobileNetV2.")
mobilenet_v2_kronecker_kv = _builder(
    "mobilenet_v2_kronecker_kv", "MobileNetV2+KAO, with attention blocks without inner skip (KAN Table 5)."
)
mobilenet_v2_siamese = _response_builder("mobilenet_v2_siamese", "MobileNetV2+SAO (SAN Table 6).")
kanet_kv = _builder("kanet_kv", "KANet_KV (KAN Table 3).")
kanet_qkv = _builder("kanet_qkv", "KANet_QKV (KAN Table 3).")
kanet_without_attention = _builder(
    "kanet_without_attention", "KANet w/o KAO, MobileNetV2's blocks in its place (KAN Table 5)."
)
attnnet = _builder("attnnet", "AttnNet, with softmax attention (KAN Table 4).")
attnnet_pooled = _builder("attnnet_pooled", "AttnNet+Pool, with keys and values pooled 2x2 (KAN Table 4).")
attnnet_averaged = _response_builder("attnnet_averaged", "AttnNet1/N, with dot products over N (SAN Table 4).")
sanet_ones = _response_builder("sanet_ones", "SANet w/o params, w = 1 (SAN Table 8).")
sanet_local = _response_builder("sanet_local", "SANet w/o the global term (SAN Table 6).")
sanet_without_attention = _builder("sanet_without_attention", "SANet w/o SAO (SAN Table 6).")


def senet(
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    width: float = 1.0,
    strides: Sequence[int] | None = None,
    dropout: float = 0.2,
    reduction: int = 2,
) -> CompactNet:
    """Build SENet (SAN Table 4), with squeeze-excite of ρ = `reduction` where SANet has attention.

    The other arguments are `CompactNet`'s.
    """
    return CompactNet("senet", **locals())


# The compact networks for image classification, which `register_timm` registers under these names.
CLASSIFIERS: dict[str, _Builder] = _catalog(
    *(mobilenet_v2, mobilenet_v2_kronecker_kv, mobilenet_v2_siamese),
    *(kanet_kv, kanet_qkv, kanet_without_attention, attnnet, attnnet_pooled, attnnet_averaged),
    *(sanet, sanet_ones, sanet_local, sanet_without_attention, senet),
)
MODELS: dict[str, Callable[..., Any]] = _catalog(
    *CLASSIFIERS.values(),
    *(deeplab_v2, deeplab_compact, unet_care, unet_residual, unet_projection, psmnet_stacked, psmnet_basic),
    *(i3d_resnet50, video_resnet, sagan, bert_base, bert_large, bert_small, mask_rcnn, faster_rcnn),
)
# Name of a model in a saved configuration -> the class whose arguments the configuration has.
_FAMILIES: dict[str, Any] = dict.fromkeys(VARIANTS, CompactNet)
_FAMILIES |= {"deeplab_v2": DeepLab, "deeplab_compact": DeepLab, "mask_rcnn": Detector, "faster_rcnn": Detector}
_FAMILIES |= {"bert_base": Bert, "bert_large": Bert, "bert_small": Bert}
_FAMILIES |= {"unet_care": UNet, "unet_residual": UNet, "unet_projection": ProjectionUNet}
_FAMILIES |= {"psmnet_stacked": PSMNet, "psmnet_basic": PSMNet}
_FAMILIES |= {"i3d_resnet50": I3D, "video_resnet": VideoResNet, "sagan": SAGAN}
# timm's register_model appends names to this module's __all__, or creates it; here it already has them all.
__all__ = ["CLASSIFIERS", "MODELS", "from_pretrained", "kanet", "register_timm", *MODELS]


@door("models.from_pretrained")
def from_pretrained(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> nn.Module:
    """Rebuild a model saved by `save_pretrained` from its name, arguments and weights; in eval mode, on the CPU.

    No code from the files is executed: the name must be that of a network of farfield, the weights are safetensors.

    Args:
        path_or_repo: A folder, or a repository of the Hugging Face Hub.
        revision: Branch, tag or commit of the repository.
        cache_dir: Folder in which downloads are kept; the Hub's cache by default.
        token: Access token for private repositories; by default that of `hf auth login`.
        local_files_only: Whether to use only files downloaded before.
        force_download: Whether to download again.

    Raises:
        OSError: If the files are missing or cannot be downloaded.
        ValueError: If one of them is damaged, or they belong to different models.
        LookupError: If the name of the model or of a part, such as its operator, is unknown.

    Example:
        >>> import tempfile
        >>> from farfield_papers import models
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     models.kanet("dot", num_classes=10, width=0.25).save_pretrained(folder)
        ...     models.from_pretrained(folder).config["operator"]
        'dot'
    """
    if path_or_repo in MODELS and not Path(path_or_repo).exists():
        fix = f'models.MODELS["{path_or_repo}"]() builds it, or the folder that save_pretrained wrote.'
        problem = f"{path_or_repo} is the name of a network, of which no weights are published"
        raise refusal(FileNotFoundError, f"{problem}; fix: {fix}")
    hub = {"revision": revision, "cache_dir": cache_dir, "token": token}
    hub |= {"local_files_only": local_files_only, "force_download": force_download}
    return load_model(path_or_repo, rebuild, hub)


def rebuild(config: dict[str, Any]) -> nn.Module:
    """Build the model of a saved configuration, without its weights."""
    build = _FAMILIES.get(config["model"])
    if build is None:
        raise unknown("model", config["model"], _FAMILIES)
    if config.get("operator", "softmax") not in OPERATORS:
        raise unknown("operator", config["operator"], OPERATORS)
    return build(**config)


def register_timm() -> list[str]:
    """Register every name of `CLASSIFIERS` with timm, and so with libraries that take their encoders from timm.

    `timm.create_model(name, …)` then takes timm's num_classes, in_chans, drop_rate, drop_path_rate, global_pool,
    output_stride, features_only and out_indices, and the width, strides, operator, reduction and response_start of
    `CompactNet`. The model has `forward_intermediates`, `set_grad_checkpointing`, and `group_matcher` for layer-wise
    learning rate decay; it cannot be scripted. No pretrained weights are published, so timm raises an error for
    `pretrained=True`. Calling this function again changes nothing.

    Returns:
        The names.

    Raises:
        ImportError: If timm is not installed.

    Example:
        >>> import timm
        >>> from farfield_papers import models
        >>> names = models.register_timm()
        >>> timm.create_model("kanet_qkv", features_only=True, output_stride=16).feature_info.reduction()
        [2, 4, 8, 16, 16]
    """
    try:
        import timm.models
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "timm":  # what timm lacks
            raise
        fix = install_command("timm")
        raise ImportError(f"models.register_timm: timm is not installed; fix: {fix}", name="timm") from error

    for name in CLASSIFIERS:
        if not (timm.models.is_model(name) and timm.models.model_entrypoint(name).__module__ == __name__):
            timm.models.register_model(_timm_entry(name))
    return list(CLASSIFIERS)


def _timm_entry(name: str) -> Callable[..., nn.Module]:
    def build(
        *, in_chans: int = 3, drop_rate: float = 0.2, drop_path_rate: float = 0.0, **arguments: Any
    ) -> CompactNet:
        net = CompactNet(name, in_channels=in_chans, dropout=drop_rate, **arguments)
        net.set_drop_path(drop_path_rate)
        return net

    def entry(pretrained: bool = False, pretrained_cfg: Any = None, **options: Any) -> nn.Module:
        from timm.models import build_model_with_cfg

        shape = {"input_size": (3, 224, 224), "pool_size": (7, 7), "crop_pct": 0.875, "interpolation": "bilinear"}
        ends = {"first_conv": "stem.convolution", "classifier": "classifier"}
        return build_model_with_cfg(
            build,
            name,
            pretrained,
            pretrained_cfg=pretrained_cfg or {**shape, **ends, "architecture": name},
            feature_cfg={"out_indices": (0, 1, 2, 3, 4), "flatten_sequential": True},
            **options,
        )

    entry.__name__ = entry.__qualname__ = name
    return entry
