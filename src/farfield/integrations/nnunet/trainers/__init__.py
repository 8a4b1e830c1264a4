"""Trainers that nnU-Net finds by the variable nnUNet_extTrainer, which it imports as modules of their own."""
