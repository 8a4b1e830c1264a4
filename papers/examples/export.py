"""Ship one network three ways: a file that ONNX Runtime runs, an exported program, and a folder with its card."""

import tempfile
import warnings
from pathlib import Path

import onnxruntime
import torch
from torch import nn
from torch.export import Dim

from farfield_papers import models
from farfield_papers.nn import AttentionBlock, BaseBlock

warnings.filterwarnings("ignore")  # torch.onnx warns of operators of packages that it does not know
network = nn.Sequential(BaseBlock(3, 16, stride=2), AttentionBlock(16, 24, "kronecker_qkv")).eval()
example, other = torch.randn(2, 3, 48, 64), torch.randn(1, 3, 97, 120)
free = {0: Dim("batch"), 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}

with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    file = Path(folder) / "network.onnx"
    shapes = ({0: "batch", 2: "height", 3: "width"},)
    torch.onnx.export(network, (example,), file, dynamic_shapes=shapes, dynamo=True, external_data=False, verbose=False)
    session = onnxruntime.InferenceSession(file)
    [output] = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    error = (torch.from_numpy(output) - network(other)).abs().max()
    print(f"network.onnx: {file.stat().st_size:,} bytes, off by {error:.0e}")

    program = torch.export.export(network, (example,), dynamic_shapes=(free,))
    torch.export.save(program, file.with_suffix(".pt2"))
    error = (torch.export.load(file.with_suffix(".pt2")).module()(other) - network(other)).abs().max()
    print(f"network.pt2: {file.with_suffix('.pt2').stat().st_size:,} bytes, off by {error:.0e}")

    net = models.sanet(num_classes=10, width=0.25)
    net.save_pretrained(folder, model_card_kwargs={"training_data": "none: random weights", "license": "apache-2.0"})
    assert models.from_pretrained(folder).config == net.config
    print(*(line for line in (Path(folder) / "README.md").read_text().splitlines() if line.startswith("| m")), sep="\n")
