"""nnU-Net's trainer with global attention in the bottleneck of the network that it plans."""

from __future__ import annotations

import math
from typing import Any

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn

from farfield._refusals import door, refusal
from farfield.insertion import insert
from farfield.nn import GridAttention


class nnUNetTrainer_farfield(nnUNetTrainer):  # noqa: N801  # nnU-Net finds trainers by names like this
    """Train the planned network with `flare` attention behind the last stage of its encoder.

        export nnUNet_extTrainer=$(python -c "from farfield.integrations.nnunet import TRAINERS; print(TRAINERS)")
        nnUNetv2_train 901 3d_fullres 0 -tr nnUNetTrainer_farfield

    Attention starts as the identity, so training starts from the network as nnU-Net plans it, and weights of such a
    network load with `-pretrained_weights`. All else is nnU-Net's own trainer.

    Cost:
        The MACs of attention over the positions of the bottleneck, through 64 latents.
    """

    @staticmethod
    def build_network_architecture(
        plans_manager: Any,
        configuration_manager: Any,
        num_input_channels: int,
        num_output_channels: int,
        enable_deep_supervision: bool = True,
    ) -> nn.Module:
        """Build the planned network and insert attention, with nnU-Net's arguments.

        Raises:
            TypeError: If the planned network has no stages of an encoder.
        """
        network: nn.Module = nnUNetTrainer.build_network_architecture(
            plans_manager, configuration_manager, num_input_channels, num_output_channels, enable_deep_supervision
        )
        stages = getattr(getattr(network, "encoder", None), "stages", None)
        if not isinstance(stages, nn.ModuleList | nn.Sequential):
            with door("nnUNetTrainer_farfield"):
                name = type(network).__name__
                raise refusal(
                    TypeError,
                    f"{name} has no encoder.stages behind which attention goes; fix: plans of PlainConvUNet or "
                    "ResidualEncoderUNet.",
                )
        # Two positions of the bottleneck along each axis, as a norm over one position is refused.
        strides = zip(*configuration_manager.pool_op_kernel_sizes, strict=True)
        example = torch.zeros(1, num_input_channels, *(2 * math.prod(axis) for axis in strides))
        insert(network, f"encoder.stages.{len(stages) - 1}", _make_attention, example=example)
        return network


def _make_attention(channels: int) -> GridAttention:
    return GridAttention(channels, "flare", heads=math.gcd(channels, 8), project="kvo", residual=True)
