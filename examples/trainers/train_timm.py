"""timm: train with attention, save, and write a recipe beside; load_timm.py loads it."""

from pathlib import Path

import timm
import torch
from common import digits, make
from timm.models import register_model
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask, LogitDistillationTask
from timm.utils import CheckpointSaver

from farfield import insert, replace_attention
from farfield.insertion import save_recipe


@register_model
def resnet10t_attention(pretrained=False, **options):
    net = timm.create_model("resnet10t", pretrained=pretrained, **options)
    insert(net, ["layer2", "layer3"], make, example=torch.zeros(1, 3, 64, 64))
    return net


@register_model
def vit_linear(pretrained=False, **options):
    net = timm.create_model("vit_tiny_patch16_224", pretrained=pretrained, **options)
    replace_attention(net, "factorized_gaussian")
    return net


images, labels = digits(32)
small = {"img_size": 32, "patch_size": 4, "depth": 2, "embed_dim": 48, "num_classes": 10}
teacher = timm.create_model("vit_tiny_patch16_224", **small)
student = timm.create_model("vit_linear", **small)
net = timm.create_model("resnet10t_attention", num_classes=10)
loss = torch.nn.CrossEntropyLoss()
tasks = {"resnet10t": ClassificationTask(net, loss)}
tasks["vit"] = LogitDistillationTask(student, teacher, loss, task_loss_weight=0.7, temperature=2.0)
for folder, task in tasks.items():
    task.setup_ema(decay=0.9)
    model = task.get_trainable_module()
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3)
    Path(folder).mkdir()
    saver = CheckpointSaver(model, optimizer, task=task, checkpoint_dir=folder)
    for epoch in range(2):
        task.train()
        for image, label in zip(images.split(32), labels.split(32), strict=True):
            optimizer.zero_grad()
            task(image, label)["loss"].backward()
            optimizer.step()
            task.update_ema()
        saver.save_checkpoint(epoch, metric=float(epoch))
    average = task.get_eval_model(ema=True)
    save_recipe(average, folder)
    with torch.no_grad():
        torch.save({"images": images[:4], "output": average.eval()(images[:4])}, f"{folder}/saved.pt")
