"""Trained model folders of nnU-Net, predicted in tiles: plans, preprocessing, resampling and export are nnU-Net's own.

`TRAINERS` is the folder of `nnUNetTrainer_farfield`, for nnU-Net's variable nnUNet_extTrainer. Nothing here imports
nnunetv2 before it is called.
"""

from pathlib import Path

from farfield.integrations.nnunet.model import NnunetModel, load_nnunet
from farfield.integrations.nnunet.prediction import predict_nnunet

__all__ = ["TRAINERS", "NnunetModel", "load_nnunet", "predict_nnunet"]

TRAINERS = Path(__file__).parent / "trainers"
