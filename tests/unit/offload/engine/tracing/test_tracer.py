import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offload.engine.tracing.tracer import LiveBytes, Tracer, fake_copy


def counted(model: nn.Module, given: torch.Tensor) -> LiveBytes:
    memory = LiveBytes()
    with Tracer(memory):
        model(given).sum().backward()
    return memory


def test_fake_tensors_take_what_real_ones_take() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    real = counted(model, torch.randn(100, 8))
    mode = FakeTensorMode()
    fake_model = fake_copy(model, mode)
    with mode:
        fake = counted(fake_model, torch.empty(100, 8))
    assert real.peak_bytes == fake.peak_bytes > 2 * 4 * 100 * 32
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert real.live_bytes == fake.live_bytes == gradients


def test_a_storage_counts_once_and_until_its_last_view_is_gone() -> None:
    memory = LiveBytes()
    with Tracer(memory):
        whole = torch.ones(100)
        view = whole.view(10, 10)[2]
        del whole
        assert memory.live_bytes == 400
        del view
        assert memory.live_bytes == 0


def test_what_was_there_before_does_not_count_unless_it_is_held() -> None:
    before, held = torch.ones(10), torch.ones(20)
    memory = LiveBytes()
    tracer = Tracer(memory)
    tracer.hold([held])
    with tracer:
        before.add_(1)
        held.add_(1)
    assert memory.live_bytes == 80


def test_a_kernel_s_workspace_counts_beside_its_result() -> None:
    memory = LiveBytes()
    workspaces = {torch.ops.aten.relu.default: lambda args, _: 3 * args[0].nbytes}
    with Tracer(memory, workspaces):
        out = torch.relu(torch.ones(10))
    assert memory.peak_bytes == 40 + 40 + 120
    assert memory.live_bytes == out.nbytes


def test_a_copy_without_weights_shares_what_the_model_shares_and_leaves_it_alone() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    first.weight.requires_grad = False
    before = first.weight.clone()
    fake = fake_copy(nn.ModuleList([first, second]), FakeTensorMode())
    assert fake[0].weight is fake[1].weight
    assert not fake[0].weight.requires_grad
    assert fake[0].bias.requires_grad
    assert type(first.weight) is nn.Parameter
    assert torch.equal(first.weight, before)
