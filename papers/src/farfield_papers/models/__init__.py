"""The networks of the papers: built by function or by name, or loaded from saved files."""

from farfield_papers.models.bert import Bert, bert_base, bert_large, bert_small
from farfield_papers.models.bert_weights import load_hugging_face
from farfield_papers.models.catalog import (
    CLASSIFIERS,
    MODELS,
    attnnet,
    attnnet_averaged,
    attnnet_pooled,
    from_pretrained,
    kanet,
    kanet_kv,
    kanet_qkv,
    kanet_without_attention,
    mobilenet_v2,
    mobilenet_v2_kronecker_kv,
    mobilenet_v2_siamese,
    register_timm,
    sanet,
    sanet_local,
    sanet_ones,
    sanet_without_attention,
    senet,
)
from farfield_papers.models.compact import STAGES, VARIANTS, CompactNet, Stage, Variant
from farfield_papers.models.deeplab import DeepLab, deeplab_compact, deeplab_v2
from farfield_papers.models.detector import Detector, Setup, faster_rcnn, mask_rcnn
from farfield_papers.models.gan import SAGAN, sagan
from farfield_papers.models.psmnet import PSMNet, psmnet_basic, psmnet_stacked
from farfield_papers.models.transfer import Loaded, load_torchvision
from farfield_papers.models.unet import ProjectionUNet, UNet, unet_care, unet_projection, unet_residual
from farfield_papers.models.video import I3D, VideoResNet, i3d_resnet50, video_resnet

__all__ = [
    "CLASSIFIERS",
    "I3D",
    "MODELS",
    "SAGAN",
    "STAGES",
    "VARIANTS",
    "Bert",
    "CompactNet",
    "DeepLab",
    "Detector",
    "Loaded",
    "PSMNet",
    "ProjectionUNet",
    "Setup",
    "Stage",
    "UNet",
    "Variant",
    "VideoResNet",
    "attnnet",
    "attnnet_averaged",
    "attnnet_pooled",
    "bert_base",
    "bert_large",
    "bert_small",
    "deeplab_compact",
    "deeplab_v2",
    "faster_rcnn",
    "from_pretrained",
    "i3d_resnet50",
    "kanet",
    "kanet_kv",
    "kanet_qkv",
    "kanet_without_attention",
    "load_hugging_face",
    "load_torchvision",
    "mask_rcnn",
    "mobilenet_v2",
    "mobilenet_v2_kronecker_kv",
    "mobilenet_v2_siamese",
    "psmnet_basic",
    "psmnet_stacked",
    "register_timm",
    "sagan",
    "sanet",
    "sanet_local",
    "sanet_ones",
    "sanet_without_attention",
    "senet",
    "unet_care",
    "unet_projection",
    "unet_residual",
    "video_resnet",
]
