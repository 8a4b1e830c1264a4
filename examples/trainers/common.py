"""What the programs of this folder share: images of digits, and a comparison with what the trained network returned."""

from functools import partial

import onnxruntime
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from farfield.nn import attention_for

make = partial(attention_for, operator="factorized_gaussian", inner_channels=16)


def digits(pixels, channels=3):
    """512 images (512, channels, pixels, pixels) from -1 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:512], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(images, (pixels, pixels), mode="bilinear").repeat(1, channels, 1, 1)
    return images, torch.tensor(labels[:512])


def compare(net, saved):
    """Compare a network, and its ONNX file, with what the trained one returned."""
    torch.onnx.export(net, (saved["images"],), "net.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession("net.onnx")
    output = session.run(None, {session.get_inputs()[0].name: saved["images"].numpy()})[0]
    with torch.no_grad():
        returned = net(saved["images"])
    returned = returned if isinstance(returned, torch.Tensor) else returned[0]
    assert torch.equal(returned, saved["output"])
    torch.testing.assert_close(torch.from_numpy(output), saved["output"], rtol=1e-3, atol=1e-4)
