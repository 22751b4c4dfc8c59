"""Missing entries leave the bound exactly; a latent known in some rows is clamped there. All under
the same noise.
"""

import math

import pytest
import torch

from aevb import Beta, Exact, Model, MultivariateNormal, Normal, OneHot, conv, deconv, linear, mlp
from aevb.zoo import gmvae, m2

NAN = float("nan")


def two_views(d: int) -> Model:
    """A VAE over d columns."""
    torch.manual_seed(0)
    return Model(
        p={"z": Normal(2), "x | z": Normal(d, net=mlp(5))},
        q={"z | x": Normal(net=mlp(5))},
    ).double()


def test_missing_columns_equal_the_model_without_them():
    full, kept = two_views(5), [0, 2, 4]
    part = two_views(3)
    with torch.no_grad():  # the same weights, rows and columns of the missing entries taken out
        for side in ("p(x|z)", "q(z|x)"):
            for (name, target), (_, source) in zip(
                part.factors[side].named_parameters(),
                full.factors[side].named_parameters(),
                strict=True,
            ):
                value = source
                if side == "p(x|z)" and name.startswith("net.heads"):
                    value = source[[*kept, *(5 + k for k in kept)]]
                if side == "q(z|x)" and name == "net.blocks.weights.x":
                    value = source[:, kept]
                target.copy_(value)
    x = torch.randn(6, 5, dtype=torch.float64)
    holes = x.clone()
    holes[:, [1, 3]] = NAN
    noise = full.draw_noise(full.plan(), full.prepare(x=x), seed=0)
    bound, other = full.elbo(x=holes, noise=noise), part.elbo(x=x[:, kept], noise=noise)
    assert torch.allclose(bound.value, other.value, rtol=0, atol=1e-12)
    assert torch.allclose(bound.terms["x"], other.terms["x"], rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(bound.value.sum(), list(full.parameters()))
    assert all(g.isfinite().all() for g in gradients)


def test_each_row_may_miss_other_entries():
    model = two_views(4)
    x = torch.randn(3, 4, dtype=torch.float64)
    holes = x.clone()
    holes[0, 1] = holes[1, 0] = holes[1, 3] = NAN
    noise = model.draw_noise(model.plan(), model.prepare(x=x), seed=0)
    together = model.elbo(x=holes, noise=noise).value
    for i in range(3):
        alone = model.elbo(x=holes[i : i + 1], noise={"z": noise["z"][..., i : i + 1, :]}).value
        assert torch.allclose(together[i : i + 1], alone, rtol=0, atol=1e-12)
    assert torch.equal(together[2], model.elbo(x=x, noise=noise).value[2])


def test_a_full_covariance_is_marginalised():
    torch.manual_seed(1)
    model = Model(
        p={"z": Normal(2), "x | z": MultivariateNormal(3)}, q={"z | x": Normal(net=linear())}
    ).double()
    x = torch.tensor([[0.5, NAN, -1.0]], dtype=torch.float64)
    noise = model.draw_noise(model.plan(), model.prepare(x=x), seed=0)
    posterior = model.posterior(x=x)["z"].base_dist
    z = posterior.loc + posterior.scale * noise["z"][0, 0]
    factor = model.factors["p(x|z)"]
    dist = factor.distribution(factor({"z": z}))
    covariance = (dist.scale_tril @ dist.scale_tril.mT)[0][[0, 2]][:, [0, 2]]
    reference = torch.distributions.MultivariateNormal(dist.loc[0, [0, 2]], covariance).log_prob(
        x[0, [0, 2]]
    )
    assert torch.allclose(model.elbo(x=x, noise=noise).terms["x"], reference, rtol=0, atol=1e-12)


def test_missing_entries_are_put_inside_the_support_before_the_density():
    """Beta's log density at 0 is infinite: a masked infinity would still poison the gradients."""
    torch.manual_seed(0)
    model = Model(p={"z": Normal(1), "x | z": Beta(2)}, q={"z | x": Normal(net=linear())}).double()
    bound = model.elbo(x=torch.tensor([[0.3, NAN]], dtype=torch.float64)).value
    gradients = torch.autograd.grad(bound.sum(), list(model.parameters()))
    assert bound.isfinite().all()
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("image", [False, True])
def test_the_mask_is_an_input_whose_weights_start_at_zero(image):
    size = (1, 4, 4) if image else 16
    nets = {
        "p": deconv(3, hidden=5) if image else mlp(5),
        "q": conv(3, hidden=5) if image else mlp(5),
    }
    models = []
    for missing in ("zeros", "mask"):
        torch.manual_seed(2)
        models.append(
            Model(
                p={"z": Normal(2), "x | z": Normal(size, net=nets["p"])},
                q={"z | x": Normal(net=nets["q"])},
                missing=missing,
            ).double()
        )
    plain, told = models
    state = plain.state_dict()
    with torch.no_grad():
        for name, parameter in told.named_parameters():
            if name in state and parameter.shape == state[name].shape:
                parameter.copy_(state[name])
            elif name in state:  # the convolution's extra channel
                parameter[:, :1].copy_(state[name])
    x = torch.randn(3, 16, dtype=torch.float64)
    x[0, 3] = x[1, 7] = NAN
    noise = plain.draw_noise(plain.plan(), plain.prepare(x=x), seed=0)
    values = [model.elbo(x=x, noise=noise).value for model in models]
    assert torch.allclose(values[0], values[1], rtol=0, atol=1e-12)
    gradients = dict(
        zip(
            [n for n, _ in told.named_parameters()],
            torch.autograd.grad(values[1].sum(), list(told.parameters())),
            strict=True,
        )
    )
    extra = [g for name, g in gradients.items() if ".missing." in name] or [
        gradients["factors.q(z|x).net.stacks.x.0.weight"][:, 1:]
    ]
    assert all(g.abs().sum() > 0 for g in extra)  # and they learn


@pytest.mark.parametrize("build", [gmvae, m2])
@pytest.mark.parametrize("choices", [{}, {"samples": 3}, {"bound": "iwae", "samples": 3}])
def test_a_half_labelled_batch_is_its_labelled_half_clamped_and_its_other_half_enumerated(
    build, choices
):
    torch.manual_seed(0)
    model = build(x=6, z=2, y=3, hidden=(8,)).double()
    x = (torch.rand(6, 6) > 0.5).double()
    y = torch.tensor([2, 0, 1, -1, -1, -1])
    noise = model.draw_noise(model.plan(**choices), model.prepare(x=x), seed=0)
    mixed = model.elbo(x=x, y=y, noise=noise, **choices).value
    # a labelled row uses its own class's noise
    picked = torch.stack([noise["z"][y[i], :, :, i] for i in range(3)], -2)
    labelled = model.elbo(x=x[:3], y=y[:3], noise={"z": picked}, **choices)
    free = model.elbo(x=x[3:], noise={"z": noise["z"][..., 3:, :]}, **choices)
    assert torch.allclose(mixed, torch.cat([labelled.value, free.value]), rtol=0, atol=1e-12)
    if choices.get("bound") != "iwae":
        # log p(y) is there, −log q(y|x) is not
        assert torch.allclose(
            labelled.terms["y"], torch.full((3,), -math.log(3), dtype=torch.float64)
        )
    gradients = torch.autograd.grad(
        labelled.value.sum(), list(model.factors["q(y|x)"].parameters()), allow_unused=True
    )
    assert all(g is None for g in gradients)


@pytest.mark.parametrize("draw", ["gumbel", "relaxed", "straight-through", "score"])
def test_labels_clamp_drawn_latents_too(draw):
    torch.manual_seed(0)
    model = gmvae(x=6, z=2, y=3, hidden=(8,)).double()
    x, y = (torch.rand(4, 6) > 0.5).double(), torch.tensor([2, -1, 0, -1])
    choices = {"how": {"y": draw}, "samples": 2}
    noise = model.draw_noise(model.plan(**choices), model.prepare(x=x), seed=0)
    mixed = model.elbo(x=x, y=y, noise=noise, **choices).value
    rows = {name: value[..., [0, 2], :] for name, value in noise.items()}
    clamped = model.elbo(x=x[[0, 2]], y=y[[0, 2]], samples=2, noise={"z": rows["z"]}).value
    free = model.elbo(
        x=x[[1, 3]], noise={name: value[..., [1, 3], :] for name, value in noise.items()}, **choices
    ).value
    assert torch.allclose(mixed[[0, 2]], clamped, rtol=0, atol=1e-12)
    assert torch.allclose(mixed[[1, 3]], free, rtol=0, atol=1e-12)


def test_a_continuous_latent_may_be_known_in_some_rows():
    model = two_views(3)
    x, z = torch.randn(3, 3, dtype=torch.float64), torch.full((3, 2), NAN, dtype=torch.float64)
    z[1] = torch.tensor([0.3, -0.7])
    noise = model.draw_noise(model.plan(), model.prepare(x=x), seed=0)
    mixed = model.elbo(x=x, z=z, noise=noise).value
    free = model.elbo(x=x, noise=noise).value
    assert torch.allclose(mixed[[0, 2]], free[[0, 2]], rtol=0, atol=1e-12)
    assert torch.allclose(mixed[1], model.log_prob(x=x[1:2], z=z[1:2])[0], rtol=0, atol=1e-12)


def test_exact_takes_labels_as_well():
    torch.manual_seed(0)
    model = Model(
        p={"y": OneHot(3), "z | y": Normal(2), "x | z": Normal(4)},
        q={"z | x": Normal(net=linear()), "y | z": Exact()},
    ).double()
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.tensor([1, -1, 2, -1])
    noise = model.draw_noise(model.plan(), model.prepare(x=x), seed=0)
    mixed = model.elbo(x=x, y=y, noise=noise).value
    clamped = model.elbo(
        x=x[[0, 2]], y=y[[0, 2]], how={"z": "entropy"}, noise={"z": noise["z"][..., [0, 2], :]}
    ).value
    assert torch.allclose(mixed[[0, 2]], clamped, rtol=0, atol=1e-12)
    assert torch.allclose(
        mixed[[1, 3]], model.elbo(x=x, noise=noise).value[[1, 3]], rtol=0, atol=1e-12
    )
