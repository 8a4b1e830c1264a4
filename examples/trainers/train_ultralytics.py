"""ultralytics: train with attention, save, and write a recipe beside; load_ultralytics.py loads it."""

from pathlib import Path

import torch
from common import digits, make
from PIL import Image
from ultralytics.models.yolo.detect import DetectionTrainer

from farfield import insert
from farfield.insertion import save_recipe

images, labels = digits(24)
lines = ["path: .", "train: images", "val: images", "names: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"]
Path("digits.yaml").write_text("\n".join(lines))
for folder in ("images", "labels"):
    Path(folder).mkdir()
for index, (image, label) in enumerate(zip(images[:64], labels[:64], strict=True)):
    x, y = torch.randint(0, 40, (2,)).tolist()
    canvas = Image.new("RGB", (64, 64))
    canvas.paste(Image.fromarray((127 * (image + 1)).byte().movedim(0, -1).numpy()), (x, y))
    canvas.save(f"images/{index}.png")
    box = f"{(x + 12) / 64} {(y + 12) / 64} {24 / 64} {24 / 64}"
    Path(f"labels/{index}.txt").write_text(f"{label} {box}")


class Trainer(DetectionTrainer):
    def get_model(self, cfg=None, weights=None, verbose=True):
        model = super().get_model(cfg, None, verbose)
        insert(model, "model.9", make, example=torch.zeros(1, 3, 64, 64))
        if weights:  # only now, so that those of a file with additions are read too
            model.load(weights)
        return model


options = {"data": str(Path("digits.yaml").resolve()), "epochs": 2, "imgsz": 64, "batch": 16, "workers": 0}
trainer = Trainer(overrides=options | {"model": "yolo11n.yaml", "device": "cpu", "plots": False, "project": "runs"})
trainer.train()
best = torch.load(trainer.best, weights_only=False)
model = (best["ema"] or best["model"]).float().eval()
save_recipe(model, ".")
torch.save(model.state_dict(), "weights.pt")
with torch.no_grad():
    torch.save({"best": str(trainer.best), "image": torch.rand(1, 3, 64, 64)}, "saved.pt")
