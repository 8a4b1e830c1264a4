"""An addition goes where its host goes: copies, files, compilers, exporters, quantization, several processes."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farfield import insert, remove
from farfield.insertion import places
from helpers import distributed_additions
from helpers.partly import partly
from helpers.small_hosts import Net, Pyramid, Tokens, felt, image

HOSTS: dict[str, tuple[Callable[[], nn.Module], str | list[str], Any]] = {
    "in a Sequential": (Net, "stage", "channels_first"),
    "behind a block": (Net, ["stage.1", "stage.2"], "channels_first"),
    "behind layers of torch": (Net, ["stem", "stage.2.conv"], "channels_first"),
    "an entry": (lambda: Pyramid(dict), ["levels[0]", "levels[pool]"], "channels_first"),
    "an entry of a tuple": (lambda: Pyramid(tuple), "levels[1]", "channels_first"),
    "tokens": (Tokens, "blocks.0", "channels_last"),
    "tokens in a Sequential": (Tokens, "blocks", "channels_last"),
    "a Swin": (lambda: Tokens(flat=False), ["blocks", "blocks.1.linear"], "channels_last"),
}


def quick(*names: str) -> pytest.MarkDecorator:
    """Where a test takes seconds: these hosts in the fast tests, the others in the slow ones."""
    return pytest.mark.parametrize("net", partly(HOSTS, names), indirect=True)


# One of each kind: the last child, a hook, entries, tokens.
few = quick("in a Sequential", "behind layers of torch", "an entry", "tokens")


@pytest.fixture(params=HOSTS)
def net(request: pytest.FixtureRequest) -> nn.Module:
    build, where, layout = HOSTS[request.param]
    net = build().eval()
    before = net(image)
    insert(net, where, felt, example=image, layout=layout)
    assert not torch.allclose(net(image), before)
    return net


def saved(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), saved])
def test_copies_are_complete_and_apart(net: nn.Module, way: Callable[[nn.Module], nn.Module]) -> None:
    before, other = net(image), way(net)
    assert torch.equal(other(image), before)
    for weight in net.parameters():
        nn.init.zeros_(weight)
    assert torch.equal(other(image), before)
    remove(net)
    assert torch.equal(other(image), before)
    remove(other)
    assert not torch.allclose(other(image), before)


@pytest.mark.long
def test_a_saved_model_keeps_its_additions_in_another_process(tmp_path: Path) -> None:
    # There the numbers of hooks start anew: a hook of anybody's must not take the place of the addition's.
    net = Net().eval()
    insert(net, "stage.1", felt, example=image)
    torch.save({"net": net, "image": image, "answer": net(image)}, tmp_path / "net.pt")
    script = """if True:
        import sys, torch
        saved = torch.load(sys.argv[1], weights_only=False)
        net = saved["net"]
        for module in net.modules():
            for _ in range(50):
                module.register_forward_hook(lambda module, inputs, answer: None)
        # Not to the bit: a map that has a hook is asked, not read.
        torch.testing.assert_close(net(saved["image"]), saved["answer"])
    """
    folder = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "net.pt")], check=True, cwd=folder)


@pytest.mark.slow
@quick("an entry")
def test_compile(net: nn.Module) -> None:
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager")
    for example in (image, image[..., :8, :12]):
        torch.testing.assert_close(compiled(example), net(example))
    compiled(image).sum().backward()
    assert all(weight.grad is not None for name, weight in net.named_parameters() if "farfield" in name)


@pytest.mark.slow
def test_compile_with_inductor(net: nn.Module) -> None:
    torch.testing.assert_close(torch.compile(net, fullgraph=True)(image), net(image))


@pytest.mark.long
@quick("in a Sequential", "tokens")
@pytest.mark.parametrize("strict", partly([False, True], [False]))
def test_export(net: nn.Module, strict: bool) -> None:
    side = torch.export.Dim("side", min=2, max=64)
    program = torch.export.export(net, (image,), dynamic_shapes=({3: 4 * side},), strict=strict)
    names = {name for name, _ in net.named_parameters()}
    assert set(program.state_dict) >= {name for name in names if "farfield" in name}
    wide = torch.rand(2, 3, 12, 24)
    torch.testing.assert_close(program.module()(wide), net(wide))


@few
def test_trace(net: nn.Module) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(net, image)
    torch.testing.assert_close(traced(image), net(image))


def test_fx_calls_an_addition_and_traces_its_host(net: nn.Module) -> None:
    traced = torch.fx.symbolic_trace(net)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module" and "farfield" in node.target]
    assert len(called) == sum("farfield" in name and name.endswith("output") for name, _ in net.named_modules())
    assert torch.equal(traced(image), net(image))


def test_fx_refuses_a_host_that_it_cannot_look_into() -> None:
    # Called as a whole it would lose its addition to quantization without a word.
    net = Net().eval()
    insert(net, "stage.1.norm", felt, example=image)
    with pytest.raises(torch.fx.proxy.TraceError, match="symbolically traced variables cannot be used as inputs to"):
        torch.fx.symbolic_trace(net)
    remove(net)
    assert torch.equal(torch.fx.symbolic_trace(net)(image), net(image))


@pytest.mark.cpu("the engines for quantized tensors are CPUs'")
@few
def test_quantization_keeps_additions(net: nn.Module) -> None:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    if "qnnpack" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch has no engine for quantized tensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(copy.deepcopy(net), get_default_qconfig_mapping("x86"), (image,))
        prepared(image)
        quantized = convert_fx(prepared)
    wanted, bare = net(image), copy.deepcopy(net)
    remove(bare)
    # Eight bits are far closer to the truth than the host alone.
    error, without = ((answer - wanted).norm().item() for answer in (quantized(image), bare(image)))
    assert error < without / 3


@few
def test_distributed_training(net: nn.Module, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if hasattr(net, "unused"):
            del net.unused
        parallel = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        before = {name: weight.clone() for name, weight in net.named_parameters() if "farfield.output" in name}
        for _ in range(2):
            optimizer.zero_grad()
            parallel(image).square().sum().backward()
            optimizer.step()
        now = dict(net.named_parameters())
        assert all(not torch.equal(now[name], weight) for name, weight in before.items())
        text = "the model is wrapped in DistributedDataParallel, which misses weights that are added later; fix: "
        with pytest.raises(ValueError, match=rf"^remove: {text}remove\(model\.module\), and wrap that anew\.$"):
            remove(parallel)
        with pytest.raises(ValueError, match=rf"^insert: {text}insert\(model\.module, .*\), and wrap that anew\.$"):
            insert(parallel, "module.blocks", felt, example=image)
        with pytest.raises(ValueError, match=rf"^places: {text}places\(model\.module, example\)\.$"):
            places(parallel, image)
        assert places(parallel.module, image)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.long
def test_two_processes_learn_as_one(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.multiprocessing.spawn(distributed_additions.run, (2, str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    net, images = distributed_additions.problem()
    net(images).square().mean().backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, weight in net.named_parameters():
            torch.testing.assert_close(found[name], weight.grad, rtol=1e-10, atol=1e-14)


def test_lora_finds_the_maps_of_an_addition() -> None:
    peft = pytest.importorskip("peft")
    net = Net().eval()
    insert(net, "stage.1", felt, example=image)
    before = net(image)
    tuned = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=r".*\.farfield\.(query|value)"))
    assert torch.equal(tuned(image), before) or torch.allclose(tuned(image), before, atol=1e-6)
    names = [name for name, weight in tuned.named_parameters() if weight.requires_grad]
    assert len(names) == 4
    assert all("stage.1.farfield" in name and "lora" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(net: nn.Module, dtype: torch.dtype) -> None:
    wanted = net(image)
    with torch.autocast(torch.get_default_device().type, dtype=dtype):
        answer: Tensor = net(image)
    assert (answer - wanted).norm() <= 16 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_additions_are_where_their_host_is() -> None:
    net, example = Net().cuda().half().eval(), image.cuda().half()
    before, state = net(example), torch.cuda.get_rng_state()
    added = insert(net, "stage.*", felt, example=example)
    assert {module.query.weight.device.type for module in added.values()} == {"cuda"}
    for module in added.values():
        nn.init.zeros_(module.output.weight)
        nn.init.zeros_(module.output.bias)
    assert torch.equal(net(example), before)
    assert torch.equal(torch.cuda.get_rng_state(), state)
