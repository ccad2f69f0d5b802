from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from passlora.config import ModelConfig
from passlora.network.factory import make_backbone
from passlora.network.lora_layer import Adapted, LoraLinear


class Net(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.one, self.two = nn.Linear(6, 9, bias=bias), nn.Linear(9, 5)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def pair(bias=True, dtype=torch.float64):
    """The same network with peft's layers and with ours, B other than 0."""
    networks = []
    for ours in (False, True):
        torch.manual_seed(0)
        config = LoraConfig(r=2, lora_alpha=3, target_modules=["one", "two"], init_lora_weights=False)
        if ours:
            config._register_custom_module({nn.Linear: LoraLinear})
        networks.append(get_peft_model(Net(bias).to(dtype), config, autocast_adapter_dtype=False).to(dtype))
    for layer in (networks[1].base_model.model.one, networks[1].base_model.model.two):
        layer.one_product = True
    return networks


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(1)
    x, a, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 6), (2, 6), (9, 2)))
    weight, bias = torch.randn(9, 6, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, a, b: Adapted.apply(x, weight, bias, a, b, 1.5), (x, a, b))
    frozen = x.detach()
    assert torch.autograd.gradcheck(lambda a, b: Adapted.apply(frozen, weight, None, a, b, 1.5), (a, b))


@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_what_peft_computes(bias):
    stock, ours = pair(bias)
    assert isinstance(ours.base_model.model.one, LoraLinear) and not isinstance(stock.base_model.model.one, LoraLinear)
    x = torch.randn(4, 7, 6, dtype=torch.float64)
    results = []
    for network in (stock, ours):
        y = network(x)
        y.square().sum().backward()
        results.append((y, {name: p.grad for name, p in network.named_parameters() if p.requires_grad}))
    torch.testing.assert_close(results[1], results[0])
    assert len(results[0][1]) == 4
    assert list(stock.state_dict()) == list(ours.state_dict())


def test_peft_s_own_ways_stay_open():
    """Switched off, merged and unloaded."""
    stock, ours = pair()
    x = torch.randn(4, 6, dtype=torch.float64)
    adapted = stock(x)
    with stock.disable_adapter(), ours.disable_adapter():
        torch.testing.assert_close(ours(x), stock(x))
        assert not torch.allclose(ours(x), adapted)
    ours.merge_adapter()
    torch.testing.assert_close(ours(x), adapted)
    ours.unmerge_adapter()
    torch.testing.assert_close(ours.merge_and_unload()(x), adapted)


def test_a_small_update_survives_mixed_precision():
    """W + s B A would be rounded to W in bfloat16; beside W it is not."""
    stock, ours = pair(dtype=torch.float32)
    with torch.no_grad():
        for network in (stock, ours):
            layer, signs = network.base_model.model.one, torch.tensor([1.0, -1.0] * 3)
            layer.base_layer.weight.fill_(1.0)
            layer.base_layer.bias.zero_()
            layer.lora_A["default"].weight.copy_(1e-2 * signs.expand(2, 6))
            layer.lora_B["default"].weight.fill_(1e-2)
    x = signs.expand(2, 6)  # what W makes of it is 0
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(x), stock(x))
        assert (ours.base_model.model.one(x).abs() > 1e-3).all()


def test_what_is_not_plain_lora_is_left_to_peft():
    config = LoraConfig(r=2, target_modules=["one"], init_lora_weights=False, use_dora=True)
    config._register_custom_module({nn.Linear: LoraLinear})
    network = get_peft_model(Net(), config)
    dropping = get_peft_model(Net(), LoraConfig(r=2, target_modules=["one"]))
    x = torch.rand(2, 6)
    assert not network.base_model.model.one._is_plain(x)
    torch.testing.assert_close(network.merge_and_unload()(x), network(x))
    assert type(dropping.base_model.model.one) is not LoraLinear


def test_training_takes_one_product_and_answers_do_not():
    backbone = make_backbone(ModelConfig())
    layers = [module for module in backbone.modules() if isinstance(module, LoraLinear)]
    assert len(layers) == 6 and not any(layer.one_product for layer in layers)
    backbone.train()
    assert all(layer.one_product and not layer.training for layer in layers)
    backbone.eval()
    assert not any(layer.one_product for layer in layers)
