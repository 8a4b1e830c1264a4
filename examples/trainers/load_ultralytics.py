"""ultralytics: load what train_ultralytics.py saved in a new process, export it to ONNX, and compare."""

import onnxruntime
import torch
from ultralytics import YOLO
from ultralytics.nn.tasks import DetectionModel

from farfield.insertion import apply_recipe

saved = torch.load("saved.pt")
net = DetectionModel("yolo11n.yaml", nc=10, verbose=False).eval()
net.load_state_dict(torch.load("weights.pt"), strict=False)
apply_recipe(net, ".")
whole = YOLO(saved["best"])
with torch.no_grad():
    expected = whole.model.float().eval()(saved["image"])[0]
    assert torch.equal(net(saved["image"])[0], expected)
session = onnxruntime.InferenceSession(whole.export(format="onnx", imgsz=64))
[output] = session.run(None, {session.get_inputs()[0].name: saved["image"].numpy()})
torch.testing.assert_close(torch.from_numpy(output), expected, rtol=1e-3, atol=1e-2)
