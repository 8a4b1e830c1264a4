"""Networks of transformers for images, videos and sound: see networks_of_others.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from networks_of_others import IMAGE, SQUARE, TILE, Frames, FramesLast, Network, Output, Sound, Tokens
from torch import Tensor, nn

# Numbers of a small vision transformer, of one with stages, and of one whose stages are named otherwise.
SIZE = list(IMAGE[1:])
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 16}
PLAIN = VIT | {"image_size": SIZE}
OF_FOUR = VIT | {"num_hidden_layers": 4}
NECK = {"neck_hidden_sizes": (8, 16, 16, 32), "fusion_hidden_size": 16}
WINDOWS = {"embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2), "window_size": 4, "image_size": SIZE}
PYRAMID = {"depths": (1, 1, 1, 1), "hidden_sizes": (8, 16, 16, 32), "num_attention_heads": (1, 1, 2, 2)}
STAGES: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32]}
SOUND, TILE_SOUND = (1, 8000), (2000,)
# Speech: convolutions with a stride of 320 in all, then a transformer with convolved positions.
SPEECH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SPEECH |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
CONVOLUTIONS = {"conv_dim": (16,) * 7}
Wrap = Callable[[nn.Module], nn.Module]


class Videos(nn.Module):
    """A network of videos `(b, t, c, h, w)`, as one of `(b, c, t, h, w)`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, grid: Tensor) -> Any:
        """Return what the network returns."""
        return self.network(grid.transpose(1, 2))


def make(name: str, numbers: dict[str, Any], wrap: Wrap | None = None, config: str = "") -> nn.Module:
    """Build a network with a configuration of these numbers; those that are dicts are configurations of parts."""
    transformers = importlib.import_module("transformers")
    for end in ("Model", "Backbone", "For"):
        config = config or (name.split(end)[0] if end in name else "")
    parts = {
        key: getattr(transformers, f"{each['of']}Config")(**{k: v for k, v in each.items() if k != "of"})
        if isinstance(each, dict) and "of" in each
        else each
        for key, each in numbers.items()
    }
    network = getattr(transformers, name)(getattr(transformers, f"{config}Config")(**parts))
    return network if wrap is None else wrap(network)


last = partial(Output, name="last_hidden_state")
depth = partial(Output, name="predicted_depth", channel=True)
logits = partial(Output, name="logits")
features = partial(Output, name="feature_maps", place=-1)


def images() -> Iterator[tuple[str, dict[str, Any], Wrap | None, str]]:
    """Yield class, numbers, the module around it and, where it is not that of the class, the configuration."""
    token = partial(Tokens, patch=16, skip=1)
    dino = VIT | {"image_size": 96, "mlp_ratio": 2}
    dino.pop("intermediate_size")
    yield "ViTModel", PLAIN, token, ""
    yield "DeiTModel", PLAIN, partial(Tokens, patch=16, skip=2), ""
    yield "BeitModel", PLAIN | {"use_relative_position_bias": True}, token, ""
    yield "Data2VecVisionModel", PLAIN | {"use_shared_relative_position_bias": True}, token, ""
    yield "ViTMSNModel", PLAIN, token, ""
    yield "IJepaModel", PLAIN, partial(Tokens, patch=16), ""
    yield "Dinov2Model", dino, token, ""
    yield "Dinov2Backbone", dino, features, "Dinov2"
    yield "Dinov2WithRegistersModel", dino, partial(Tokens, patch=16, skip=5), ""
    yield "DINOv3ViTModel", VIT | {"num_register_tokens": 4}, partial(Tokens, patch=16, skip=5), ""
    yield "DINOv3ConvNextModel", STAGES, partial(Tokens, patch=32, skip=1), ""
    yield "PixioModel", dino, partial(Tokens, patch=16, skip=8), ""
    yield "ViTForImageClassification", PLAIN, logits, "ViT"
    yield "Dinov2ForImageClassification", dino, logits, "Dinov2"
    yield "ViTForMaskedImageModeling", VIT | {"image_size": 128}, partial(Output, name="reconstruction"), "ViT"
    window = {"image_size": 96, "pretrain_image_size": 96, "window_block_indices": (0,), "window_size": 4}
    yield "VitDetBackbone", dino | window | {"use_relative_position_embeddings": True}, features, "VitDet"
    yield "CLIPVisionModel", VIT | {"image_size": 128}, token, ""
    yield "SiglipVisionModel", VIT | {"image_size": 128}, partial(Tokens, patch=16), ""
    sam = {"output_channels": 16, "image_size": 128, "window_size": 3, "global_attn_indexes": (1,), "mlp_dim": 64}
    yield "SamVisionModel", {**_without(VIT, "intermediate_size"), **sam, "num_pos_feats": 8}, last, ""
    yield "YolosModel", PLAIN | {"num_detection_tokens": 4}, _patches_of_yolos, ""
    reassemble = {"backbone_out_indices": (0, 1, 2, 3), "image_size": 128, **NECK}
    yield "DPTForDepthEstimation", OF_FOUR | reassemble, depth, "DPT"
    yield "DPTForSemanticSegmentation", OF_FOUR | reassemble | {"num_labels": 3}, logits, "DPT"
    backbone = dino | {"of": "Dinov2", "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
    backbone |= {"reshape_hidden_states": False, "patch_size": 14, "image_size": 112}
    anything = {"backbone_config": backbone, "reassemble_hidden_size": 32, "head_hidden_size": 8, **NECK}
    yield "DepthAnythingForDepthEstimation", anything, depth, "DepthAnything"
    beit = OF_FOUR | {"of": "Beit", "image_size": SIZE, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
    zoe = {"backbone_config": beit, "bottleneck_features": 16, "num_attractors": [4, 2, 2, 1], "bin_embedding_dim": 8}
    zoe |= {"bin_configurations": [{"n_bins": 8, "min_depth": 0.01, "max_depth": 10.0, "name": "nyu"}], **NECK}
    yield "ZoeDepthForDepthEstimation", zoe, depth, "ZoeDepth"
    yield "GLPNForDepthEstimation", PYRAMID | {"decoder_hidden_size": 16}, depth, "GLPN"
    yield "SegformerModel", PYRAMID, last, ""
    yield (
        "SegformerForSemanticSegmentation",
        PYRAMID | {"decoder_hidden_size": 16, "num_labels": 3},
        logits,
        "Segformer",
    )
    yield "SwinModel", WINDOWS, partial(Tokens, patch=8), ""
    yield "SwinBackbone", WINDOWS, features, "Swin"
    yield "Swinv2Model", WINDOWS, partial(Tokens, patch=8), ""
    yield "Swinv2Backbone", WINDOWS, features, "Swinv2"
    yield "DonutSwinModel", WINDOWS, partial(Tokens, patch=8), ""
    yield "MaskFormerSwinBackbone", WINDOWS, features, "MaskFormerSwin"
    sr = {"embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4}
    reconstruction = partial(Output, name="reconstruction")
    yield "Swin2SRForImageSuperResolution", sr, reconstruction, "Swin2SR"
    yield "Swin2SRModel", sr, last, ""
    yield "ConvNextModel", STAGES, last, ""
    yield "ConvNextV2Model", STAGES, last, ""
    yield "ConvNextBackbone", STAGES, features, "ConvNext"
    yield "ResNetModel", STAGES | {"embedding_size": 16, "layer_type": "basic"}, last, ""
    yield "RegNetModel", STAGES | {"embedding_size": 16, "groups_width": 8}, last, ""
    yield "BitModel", STAGES | {"embedding_size": 16, "num_groups": 4}, last, ""
    yield "MobileNetV1Model", {"depth_multiplier": 0.25}, last, ""
    yield "MobileNetV2Model", {"depth_multiplier": 0.35}, last, ""
    yield "MobileNetV2ForSemanticSegmentation", {"depth_multiplier": 0.35, "num_labels": 3}, logits, "MobileNetV2"
    mobile = {"hidden_sizes": (16, 24, 32), "neck_hidden_sizes": (8, 8, 16, 16, 16, 16, 32), "image_size": 96}
    yield "MobileViTModel", mobile, last, ""
    yield "MobileViTForSemanticSegmentation", mobile | {"num_labels": 3, "aspp_out_channels": 16}, logits, "MobileViT"
    yield "MobileViTV2Model", {"base_attn_unit_dims": (16, 24, 32), "width_multiplier": 0.5}, last, ""
    yield "PoolFormerModel", STAGES, last, ""
    yield "PvtModel", PYRAMID | {"image_size": 128}, _grid_or_tokens, ""
    yield "PvtV2Model", PYRAMID, last, ""
    yield "PvtV2Model, linear attention", PYRAMID | {"linear_attention": True}, last, "PvtV2"
    levit = {"hidden_sizes": (32, 48, 64), "num_attention_heads": (2, 3, 4), "depths": (1, 1, 1), "key_dim": (8, 8, 8)}
    levit |= {"image_size": 128}
    yield "LevitModel", levit, partial(Tokens, patch=64), ""
    focal = {"embed_dim": 16, "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}
    yield "FocalNetModel", focal, partial(Tokens, patch=32), ""
    yield "FocalNetBackbone", focal, features, "FocalNet"
    hiera = {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "image_size": (128, 128)}
    yield "HieraModel", hiera, partial(Tokens, patch=32), ""
    yield "HieraBackbone", hiera, features, "Hiera"
    cvt = {"embed_dim": (16, 16, 32), "num_heads": (1, 1, 2), "depth": (1, 2, 3)}
    yield "CvtModel", cvt, last, ""
    yield "EfficientNetModel", {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640}, last, ""
    yield "SwiftFormerModel", {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32)}, last, ""
    yield "TextNetModel", {"hidden_sizes": [8, 8, 16, 16, 32], "stem_out_channels": 8}, last, ""
    yield "HGNetV2Backbone", {}, features, "HGNetV2"
    yield "TextNetBackbone", {"hidden_sizes": [8, 8, 16, 16, 32], "stem_out_channels": 8}, features, "TextNet"
    convnext = STAGES | {"of": "ConvNext", "out_features": ["stage1", "stage2", "stage3", "stage4"]}
    uper = {"backbone_config": convnext, "hidden_size": 16, "use_auxiliary_head": False, "num_labels": 3}
    yield "UperNetForSemanticSegmentation", uper, logits, "UperNet"
    pose = dino | {"of": "VitPoseBackbone", "image_size": SIZE, "patch_size": [16, 16], "out_indices": [2]}
    yield "VitPoseForPoseEstimation", {"backbone_config": pose}, partial(Output, name="heatmaps"), "VitPose"
    matte = dino | {"of": "VitDet", "num_channels": 4, "image_size": 96, "pretrain_image_size": 96, "out_indices": [2]}
    numbers = {"backbone_config": matte, "hidden_size": 32, "convstream_hidden_sizes": [8, 8, 16]}
    numbers |= {"fusion_hidden_sizes": [16, 16, 8, 8]}
    yield "VitMatteForImageMatting", numbers, partial(Output, name="alphas"), "VitMatte"
    points = {"encoder_hidden_sizes": [16, 16, 16, 16], "decoder_hidden_size": 16, "descriptor_decoder_dim": 16}
    yield "SuperPointForKeypointDetection", points, partial(Output, name="scores"), "SuperPoint"
    swin = WINDOWS | {"of": "Swin", "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}
    swin |= {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
    mask = {"backbone_config": swin, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_queries": 5}
    mask |= {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 32}
    queries = partial(Output, name="masks_queries_logits")
    yield "Mask2FormerForUniversalSegmentation", mask | {"encoder_feedforward_dim": 32}, queries, "Mask2Former"
    resnet = STAGES | {"of": "ResNet", "embedding_size": 16, "layer_type": "basic", "out_features": ["stage4"]}
    detr = {"backbone_config": resnet, "num_queries": 5, "encoder_layers": 1, "decoder_layers": 1, "d_model": 32}
    detr |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    yield "DetrForObjectDetection", detr, partial(Output, name="pred_boxes"), "Detr"
    yield "ViTMAEModel", PLAIN | {"image_size": SIZE}, last, ""


def videos() -> Iterator[tuple[str, dict[str, Any], Wrap | None, str]]:
    """Yield networks of videos, as `images` does."""
    numbers = _without(VIT, "patch_size") | {"image_size": 64, "num_frames": 4}

    def wrap(net: nn.Module) -> nn.Module:
        return Tokens(Videos(net), (2, 16, 16))

    yield "VideoMAEModel", numbers | {"patch_size": 16, "tubelet_size": 2}, wrap, ""
    yield "VivitModel", numbers | {"tubelet_size": [2, 16, 16]}, lambda net: Tokens(Videos(net), (2, 16, 16), 1), ""


def sounds() -> Iterator[tuple[str, dict[str, Any], Wrap | None, str]]:
    """Yield networks of sound, as `images` does."""
    plain = SPEECH | CONVOLUTIONS
    yield "Wav2Vec2Model", plain, Sound, ""
    yield (
        "Wav2Vec2Model, layer norms",
        plain | {"feat_extract_norm": "layer", "do_stable_layer_norm": True},
        Sound,
        "Wav2Vec2",
    )
    yield "Wav2Vec2ForCTC", plain, partial(Sound, name="logits"), "Wav2Vec2"
    yield "Wav2Vec2ConformerModel", plain | {"position_embeddings_type": "rotary"}, Sound, ""
    yield "HubertModel", plain, Sound, ""
    yield "WavLMModel", plain | {"num_buckets": 32, "max_bucket_distance": 80}, Sound, ""
    yield "UniSpeechModel", plain, Sound, ""
    yield "Data2VecAudioModel", plain | {"conv_pos_kernel_size": 5}, Sound, ""
    yield "SEWModel", SPEECH | {"conv_dim": (16,) * 13}, Sound, ""
    yield (
        "SEWDModel",
        SPEECH | {"conv_dim": (16,) * 13, "position_buckets": 16, "max_position_embeddings": 64},
        Sound,
        "",
    )
    codec = {"hidden_size": 16, "num_filters": 4, "upsampling_ratios": [4, 2], "codebook_dim": 16, "codebook_size": 32}
    yield "EncodecModel, encoder", codec, lambda net: net.encoder, "Encodec"
    yield "EncodecModel, decoder", codec, lambda net: net.decoder, "Encodec"
    dac = {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 32, "codebook_size": 32}
    dac |= {"n_codebooks": 2, "codebook_dim": 4}
    yield "DacModel, encoder", dac, lambda net: net.encoder, "Dac"
    yield "DacModel, decoder", dac, lambda net: net.decoder, "Dac"
    yield "DacModel", dac, partial(Output, name="audio_values", channel=True), "Dac"
    mimi = {"hidden_size": 16, "num_filters": 4, "upsampling_ratios": [4, 2], "num_hidden_layers": 1}
    mimi |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32, "upsample_groups": 16}
    mimi |= {"vector_quantization_hidden_dimension": 16, "codebook_dim": 16, "codebook_size": 32, "num_quantizers": 4}
    yield "MimiModel, encoder", mimi, lambda net: net.encoder, "Mimi"
    yield "MimiModel, decoder", mimi, lambda net: net.decoder, "Mimi"
    yield "ASTModel", VIT | {"max_length": 96, "num_mel_bins": 64}, _tokens_of_spectrogram, ""
    encoder = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    encoder |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "vocab_size": 100}
    encoder |= {"max_source_positions": 200, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    yield "WhisperModel, encoder", encoder | {"decoder_start_token_id": 1}, lambda net: Frames(net.encoder), "Whisper"
    conformer = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    parakeet = conformer | {"subsampling_conv_channels": 8, "num_mel_bins": 80}
    yield "ParakeetEncoder", parakeet, FramesLast, "ParakeetEncoder"
    bert = conformer | {"feature_projection_input_dim": 80, "conv_depthwise_kernel_size": 7}
    yield "Wav2Vec2BertModel", bert, FramesLast, ""
    yield "SpeechT5HifiGan", {"upsample_initial_channel": 32}, _vocoder, "SpeechT5HifiGan"


def _without(numbers: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: each for key, each in numbers.items() if key != name}


class _PatchesOfYolos(Tokens):
    """Its tokens without those of detections, which are the last four."""

    def forward(self, grid: Tensor) -> Tensor:
        tokens = self.network(grid).last_hidden_state[:, 1:-4]
        return tokens.transpose(1, 2).unflatten(2, [length // self.patch for length in grid.shape[2:]])


_patches_of_yolos = partial(_PatchesOfYolos, patch=16)


class _GridOrTokens(Tokens):
    """Its last stage has a class token, which is the first."""

    def forward(self, grid: Tensor) -> Tensor:
        tokens = self.network(grid).last_hidden_state[:, 1:]
        return tokens.transpose(1, 2).unflatten(2, [length // self.patch for length in grid.shape[2:]])


_grid_or_tokens = partial(_GridOrTokens, patch=32)


class _TokensOfSpectrogram(Tokens):
    """Its patches overlap: those of 16 stand 10 apart."""

    def forward(self, grid: Tensor) -> Tensor:
        tokens = self.network(grid[:, 0].transpose(1, 2)).last_hidden_state[:, 2:]
        return tokens.transpose(1, 2).unflatten(2, [(length - 16) // 10 + 1 for length in grid.shape[2:]])


_tokens_of_spectrogram = partial(_TokensOfSpectrogram, patch=10)


class _Vocoder(nn.Module):
    """From a spectrogram, channels first, to sound of one channel."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, grid: Tensor) -> Tensor:
        return self.network(grid.transpose(1, 2))[:, None]


_vocoder = _Vocoder

SQUARES = "CLIPVisionModel SiglipVisionModel SamVisionModel HieraModel HieraBackbone ViTForMaskedImageModeling PvtModel"
SQUARES += " DPTForDepthEstimation DPTForSemanticSegmentation LevitModel"
# Volumes of networks that do not take the first of their kind.
OTHERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(SQUARES.split(), (SQUARE, TILE)),
    "DepthAnythingForDepthEstimation": ((3, 112, 168), (56, 56)),
    "Swin2SRForImageSuperResolution": ((3, 32, 48), (16, 16)),
    "Swin2SRModel": ((3, 32, 48), (16, 16)),
    "VitMatteForImageMatting": ((4, 96, 160), TILE),
    "EncodecModel, encoder": ((1, 1024), (256,)),
    "EncodecModel, decoder": ((16, 128), (32,)),
    "DacModel, encoder": ((1, 1024), (256,)),
    "DacModel, decoder": ((32, 128), (32,)),
    "DacModel": ((1, 1024), (256,)),
    "MimiModel, encoder": ((1, 1024), (256,)),
    "MimiModel, decoder": ((16, 128), (32,)),
    "ASTModel": ((1, 64, 96), (64, 48)),
    "WhisperModel, encoder": ((80, 400), (100,)),
    "ParakeetEncoder": ((80, 200), (64,)),
    "Wav2Vec2BertModel": ((80, 100), (32,)),
    "SpeechT5HifiGan": ((80, 40), (16,)),
}


def transformers_networks() -> Iterator[tuple[str, Network]]:
    """Yield networks of transformers, by the name of the class."""
    for kind, shape, tile in (
        (images(), IMAGE, TILE),
        (videos(), (3, 4, 64, 64), (4, 32, 32)),
        (sounds(), SOUND, TILE_SOUND),
    ):
        for name, numbers, wrap, config in kind:
            build = partial(make, name.split(",")[0], numbers, wrap, config)
            yield name, Network(build, *OTHERS.get(name, (shape, tile)))
