"""Programs of libraries for special purposes: graphs, proteins, sound, volumes, and others.

Like those of nets.py: each returns a function that does one step and returns a tensor. Their models
are as a library's own examples build them, with random weights and data.
"""

from __future__ import annotations

from typing import Any

from programs.nets import Program, Step, images, train


def graph() -> Step:
    """Classify the nodes of a graph by attention to their neighbours."""
    import torch
    from torch_geometric.nn import GATv2Conv, GCNConv

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = GATv2Conv(128, 32, heads=4)
            self.two = GCNConv(128, 10)

        def forward(self, x: Any, edges: Any) -> Any:
            return self.two(torch.relu(self.one(x, edges)), edges)

    net, x = Net(), torch.randn(8_000, 128)
    edges, y = torch.randint(0, 8_000, (2, 40_000)), torch.randint(0, 10, (8_000,))
    return train(net, lambda _: torch.nn.functional.cross_entropy(net(x, edges), y))


def quantizer() -> Step:
    """Train codebooks, which are buffers that each step updates."""
    import torch
    from vector_quantize_pytorch import ResidualVQ

    net = torch.nn.ModuleDict({
        "into": torch.nn.Linear(256, 256),
        "codes": ResidualVQ(dim=256, num_quantizers=6, codebook_size=1024),
        "out": torch.nn.Linear(256, 256),
    })  # fmt: skip
    x = torch.randn(4, 512, 256)

    def loss(_: int) -> Any:
        coded, _, commit = net["codes"](net["into"](x))
        return (net["out"](coded) - x).square().mean() + commit.sum()

    return train(net, loss)


def gaussian_process() -> Step:
    """Fit the kernel of a Gaussian process, by a Cholesky factor of all data."""
    import gpytorch
    import torch

    x = torch.randn(1200, 8)
    y = x.sin().sum(1)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Model(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=8))

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    model = Model()
    likely = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return train(model, lambda _: -likely(model(x), y))


def neural_ode() -> Step:
    """Train by solving an ordinary differential equation, and its adjoint."""
    import torch
    from torchdiffeq import odeint_adjoint

    class Field(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(256, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 256)
            )

        def forward(self, _t: Any, x: Any) -> Any:
            return self.net(x)

    field, x, times = Field(), torch.randn(512, 256), torch.linspace(0, 1, 5)
    return train(field, lambda _: odeint_adjoint(field, x, times, method="rk4")[-1].square().mean())


def private() -> Step:
    """Train with a clipped gradient of each sample, and noise."""
    import torch
    from opacus import PrivacyEngine

    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.GroupNorm(8, 32), torch.nn.ReLU(),
        torch.nn.MaxPool2d(4), torch.nn.Flatten(), torch.nn.Linear(2048, 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )  # fmt: skip
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model, optimizer, _ = PrivacyEngine().make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), data_loader=data,
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(0),
    )  # fmt: skip

    def step(_: int) -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def whisper() -> Step:
    """Train an encoder of sound and a decoder of text."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=4096, d_model=256, encoder_layers=2, decoder_layers=2, num_mel_bins=40,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=1024,
            decoder_ffn_dim=1024, max_source_positions=200, max_target_positions=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip
    sound, text = torch.randn(4, 40, 400), torch.randint(3, 4096, (4, 64))
    return train(model, lambda _: model(input_features=sound, labels=text).loss)


def t5_beams() -> Step:
    """Generate with beams: caches are reordered after each token."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=4096, d_model=512, d_kv=64, d_ff=2048, num_layers=4, num_heads=8,
            decoder_start_token_id=0,
        )
    ).eval()  # fmt: skip
    text = torch.randint(3, 4096, (4, 64))

    def step(_: int) -> Any:
        with torch.no_grad():
            return model.generate(text, num_beams=4, max_new_tokens=8, min_new_tokens=8)

    return step


def masked_autoencoder() -> Step:
    """Train a vision transformer on hidden patches."""
    import torch
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    model = ViTMAEForPreTraining(
        ViTMAEConfig(
            hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
            decoder_hidden_size=128, decoder_num_hidden_layers=2, decoder_num_attention_heads=4,
            decoder_intermediate_size=512, image_size=96, patch_size=8,
        )
    )  # fmt: skip
    x = torch.randn(8, 3, 96, 96)
    return train(model, lambda _: model(x).loss)


def clip() -> Step:
    """Train an encoder of images and one of texts to agree."""
    import torch
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    model = CLIP(
        256,
        CLIPVisionCfg(layers=4, width=256, head_width=64, patch_size=16, image_size=96),
        CLIPTextCfg(context_length=32, vocab_size=4096, width=256, heads=4, layers=4),
    )
    x, text = torch.randn(16, 3, 96, 96), torch.randint(1, 4096, (16, 32))

    def loss(_: int) -> Any:
        a, b, scale = model(x, text)[:3]
        return torch.nn.functional.cross_entropy(scale * a @ b.T, torch.arange(16))

    return train(model, loss)


def diffusion_with_samples() -> Step:
    """Train a diffusion network, and sample from it in every fourth step."""
    import torch
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    net = Unet(dim=32, dim_mults=(1, 2, 4), flash_attn=False)
    diffusion = GaussianDiffusion(net, image_size=32, timesteps=100, sampling_timesteps=4)
    x = torch.rand(4, 3, 32, 32)
    update = train(diffusion, lambda _: diffusion(x))

    def step(number: int) -> Any:
        loss = update(number)
        if number % 4 == 3:
            with torch.inference_mode():
                net.eval()
                loss = loss + diffusion.sample(batch_size=2).sum()
                net.train()
        return loss.clone()

    return step


def actor_critic() -> Step:
    """Train actor and critics from a buffer of experience."""
    import gymnasium
    import numpy as np
    import torch
    from stable_baselines3 import SAC

    class World(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (64,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 1, (8,), np.float32)

        def reset(self, **_: Any) -> Any:
            return np.zeros(64, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.tile(action, 8).astype(np.float32), float(action.sum()), False, False, {}

    agent = SAC(
        "MlpPolicy", World(), buffer_size=2000, batch_size=256, learning_starts=8, seed=0,
        policy_kwargs={"net_arch": [1024, 1024]}, device="cpu",
    )  # fmt: skip

    def step(number: int) -> Any:
        agent.learn(4, reset_num_timesteps=number == 0)
        return torch.cat([p.detach().flatten() for p in agent.actor.parameters()])

    return step


def keypoints() -> Step:
    """Find people in images: sizes depend on what is found."""
    import torch
    from torchvision.models.detection import keypointrcnn_resnet50_fpn

    model = keypointrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, min_size=160, max_size=256,
        rpn_pre_nms_top_n_test=100, rpn_post_nms_top_n_test=50,
    ).eval()  # fmt: skip
    x = [torch.rand(3, 160, 224)]

    def step(_: int) -> Any:
        with torch.no_grad():
            return model(x)[0]["keypoints"].float().reshape(-1)

    return step


def optical_flow() -> Step:
    """Train a network that refines the motion between two images again and again."""
    import torch
    from torchvision.models.optical_flow import raft_small

    model = raft_small(weights=None)
    one, two = torch.rand(2, 2, 3, 128, 128)
    return train(model, lambda _: model(one, two, num_flow_updates=4)[-1].square().mean())


def volumes() -> Step:
    """Segment volumes: convolutions in three dimensions."""
    import torch
    from monai.losses import DiceCELoss
    from monai.networks.nets import DynUNet

    model = DynUNet(
        3, 1, 2, kernel_size=[3] * 4, strides=[1, 2, 2, 2], upsample_kernel_size=[2] * 3,
        filters=[16, 32, 64, 128], norm_name="instance",
    )  # fmt: skip
    x, y = torch.randn(2, 1, 32, 32, 32), torch.randint(0, 2, (2, 1, 32, 32, 32))
    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    return train(model, lambda _: loss(model(x), y))


def nested_unet() -> Step:
    """Segment images by a network with many long connections."""
    import segmentation_models_pytorch as smp
    import torch

    model = smp.UnetPlusPlus("resnet18", encoder_weights=None, classes=4)
    x, y = torch.randn(2, 3, 128, 128), torch.randint(0, 4, (2, 128, 128))
    return train(model, lambda _: torch.nn.functional.cross_entropy(model(x), y))


def protein() -> Step:
    """Train a masked language model of proteins."""
    import torch
    from transformers import EsmConfig, EsmForMaskedLM

    model = EsmForMaskedLM(
        EsmConfig(
            vocab_size=33, hidden_size=320, num_hidden_layers=6, num_attention_heads=8,
            intermediate_size=1280, max_position_embeddings=256, pad_token_id=1,
            position_embedding_type="rotary", token_dropout=False,
        )
    )  # fmt: skip
    text = torch.randint(4, 24, (4, 128))
    return train(model, lambda _: model(text, labels=text).loss)


def preferences() -> Step:
    """Compare a model's preference with that of a frozen copy (DPO)."""
    import copy

    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    texts = torch.randint(0, 4096, (2, 4, 64))

    def score(net: Any, text: Any) -> Any:
        logits = net(text).logits[:, :-1].log_softmax(-1)
        return logits.gather(-1, text[:, 1:, None]).sum((1, 2))

    def loss(_: int) -> Any:
        with torch.no_grad():
            base = [score(reference, text) for text in texts]
        good, bad = (score(model, text) - old for text, old in zip(texts, base, strict=True))
        return -torch.nn.functional.logsigmoid(0.1 * (good - bad)).mean()

    return train(model, loss)


def lightning_trainer() -> Step:
    """Train by a Trainer, two batches a call."""
    import logging

    import lightning
    import torch

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                *(layer for _ in range(6) for layer in (torch.nn.Linear(768, 768), torch.nn.GELU()))
            )

        def training_step(self, batch: Any) -> Any:
            return (self.net(batch[0]) - batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module, x = Module(), torch.randn(512, 768)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=256)

    def step(_: int) -> Any:
        lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, data)  # fmt: skip
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    return step


def variational() -> Step:
    """Fit a posterior distribution; parameters live in a store of the library."""
    import pyro
    import torch
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoDiagonalNormal

    x, y = torch.randn(512, 256), torch.randn(512, 32)

    def model(x: Any, y: Any) -> None:
        one = pyro.sample("one", pyro.distributions.Normal(0.0, torch.ones(256, 1024)).to_event(2))
        two = pyro.sample("two", pyro.distributions.Normal(0.0, torch.ones(1024, 32)).to_event(2))
        mean = torch.tanh(x @ one) @ two
        pyro.sample("y", pyro.distributions.Normal(mean, 1.0).to_event(2), obs=y)

    guide = AutoDiagonalNormal(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), Trace_ELBO())
    return lambda _: torch.tensor(svi.step(x, y))


def equivariant() -> Step:
    """Train layers that rotate with their input; they are compiled by TorchScript."""
    import torch
    from e3nn import o3

    hidden = o3.Irreps("32x0e+32x1o+16x2e")
    first = o3.FullyConnectedTensorProduct("16x0e+16x1o", "1x0e+1x1o+1x2e", hidden)
    second = o3.FullyConnectedTensorProduct(hidden, "1x0e+1x1o+1x2e", "16x0e")
    net = torch.nn.ModuleList([first, second])
    x, direction = torch.randn(4096, 64), torch.randn(4096, 3)

    def loss(_: int) -> Any:
        angles = o3.spherical_harmonics([0, 1, 2], direction, normalize=True)
        return second(first(x, angles), angles).square().mean()

    return train(net, loss)


def flow() -> Step:
    """Train a chain of invertible layers (RealNVP)."""
    import normflows as nf

    layers = []
    for _ in range(8):
        layers += [
            nf.flows.AffineCouplingBlock(nf.nets.MLP([128, 512, 512, 256], init_zeros=True)),
            nf.flows.Permute(256, mode="swap"),
        ]
    model = nf.NormalizingFlow(nf.distributions.DiagGaussian(256), layers)
    import torch

    x = torch.randn(512, 256)
    return train(model, lambda _: model.forward_kld(x))


def video() -> Step:
    """Classify videos by attention in time and space."""
    import torch
    from vit_pytorch.vivit import ViViT

    model = ViViT(
        image_size=64, image_patch_size=8, frames=8, frame_patch_size=2, num_classes=10, dim=256,
        spatial_depth=3, temporal_depth=3, heads=4, mlp_dim=1024,
    )  # fmt: skip
    x, y = torch.randn(4, 3, 8, 64, 64), torch.randint(0, 10, (4,))
    return train(model, lambda _: torch.nn.functional.cross_entropy(model(x), y))


def memories() -> Step:
    """Train a decoder with rotary positions, gated layers and RMS norm."""
    import torch
    from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=4096, max_seq_len=128,
        attn_layers=Decoder(
            dim=256, depth=4, heads=4, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True
        ),
    )  # fmt: skip
    text = torch.randint(0, 4096, (4, 128))

    def loss(_: int) -> Any:
        return torch.nn.functional.cross_entropy(model(text[:, :-1]).mT, text[:, 1:])

    return train(model, loss)


def shampoo() -> Step:
    """Update by an optimizer that keeps factors of matrices."""
    import torch
    from pytorch_optimizer import SOAP

    net = torch.nn.Sequential(
        *(layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.Tanh()))
    )
    optimizer = SOAP(net.parameters(), lr=1e-3, precondition_frequency=4)
    x = torch.randn(256, 512)
    return train(net, lambda _: (net(x) - x).square().mean(), optimizer=optimizer)


def separation() -> Step:
    """Separate two voices: dilated convolutions over a long sequence."""
    import torch
    from speechbrain.lobes.models.conv_tasnet import MaskNet
    from speechbrain.lobes.models.dual_path import Encoder

    encoder = Encoder(kernel_size=16, out_channels=64)
    mask = MaskNet(64, 64, 128, 3, 4, 2, C=2, norm_type="gLN")
    net, x = torch.nn.ModuleList([encoder, mask]), torch.randn(2, 16_000)

    def loss(_: int) -> Any:
        coded = encoder(x)
        return (mask(coded) * coded).square().mean()

    return train(net, loss)


def augmented() -> Step:
    """Train on images that are rotated and blurred within the step."""
    import kornia.augmentation as augment
    import timm
    import torch

    change = augment.AugmentationSequential(
        augment.RandomAffine(20.0, p=1.0), augment.RandomGaussianBlur((5, 5), (0.5, 1.0), p=1.0),
        data_keys=["input"],
    )  # fmt: skip
    model = timm.create_model("efficientnet_lite0", num_classes=10)
    x, y = torch.rand(4, 3, 96, 96), torch.randint(0, 10, (4,))
    return train(model, lambda _: torch.nn.functional.cross_entropy(model(change(x)), y))


def attributions() -> Step:
    """Explain a model's answer by gradients of its input."""
    import timm
    import torch
    from captum.attr import IntegratedGradients

    model = timm.create_model("resnet18", num_classes=10).eval()
    explain, x = IntegratedGradients(model), torch.randn(2, 3, 96, 96)
    return lambda _: explain.attribute(x, target=3, n_steps=8).float().sum((1, 2, 3))


def mixed_lengths() -> Step:
    """Train sentence embeddings by pairs, of a length that changes each time."""
    import torch
    from sentence_transformers.util import cos_sim
    from transformers import MPNetConfig, MPNetModel

    model = MPNetModel(
        MPNetConfig(
            vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=1024,
        )
    )  # fmt: skip
    texts = [torch.randint(3, 4096, (2, 16, length)) for length in (24, 40, 56)]

    def loss(number: int) -> Any:
        a, b = (model(text).last_hidden_state.mean(1) for text in texts[number % 3])
        return torch.nn.functional.cross_entropy(20 * cos_sim(a, b), torch.arange(16))

    return train(model, loss)


def keypoint_heatmaps() -> Step:
    """Train a network that keeps four resolutions at once."""
    import timm

    model = timm.create_model("hrnet_w18_small", num_classes=10)
    return images(model, 4, 96)


LIBRARIES = {
    "graph": Program(graph, ("torch_geometric",)),
    "quantizer": Program(quantizer, ("vector_quantize_pytorch",)),
    "gaussian_process": Program(gaussian_process, ("gpytorch",)),
    "neural_ode": Program(neural_ode, ("torchdiffeq",)),
    "private": Program(private, ("opacus",)),
    "whisper": Program(whisper, ("transformers",)),
    "t5_beams": Program(t5_beams, ("transformers",), steady=False),
    "masked_autoencoder": Program(masked_autoencoder, ("transformers",)),
    "clip": Program(clip, ("open_clip",)),
    "diffusion_with_samples": Program(
        diffusion_with_samples, ("denoising_diffusion_pytorch",), steady=False, first=24
    ),
    "actor_critic": Program(actor_critic, ("stable_baselines3",), steady=False),
    "keypoints": Program(keypoints, ("torchvision",), steady=False),
    "optical_flow": Program(optical_flow, ("torchvision",)),
    "volumes": Program(volumes, ("monai",)),
    "nested_unet": Program(nested_unet, ("segmentation_models_pytorch",)),
    "protein": Program(protein, ("transformers",)),
    "preferences": Program(preferences, ("transformers",)),
    "lightning_trainer": Program(lightning_trainer, ("lightning",)),
    "variational": Program(variational, ("pyro",)),
    "equivariant": Program(equivariant, ("e3nn",)),
    "flow": Program(flow, ("normflows",)),
    "video": Program(video, ("vit_pytorch",)),
    "memories": Program(memories, ("x_transformers",)),
    "shampoo": Program(shampoo, ("pytorch_optimizer",)),
    "separation": Program(separation, ("speechbrain",)),
    "augmented": Program(augmented, ("kornia", "timm"), steady=False),
    "attributions": Program(attributions, ("captum", "timm")),
    "mixed_lengths": Program(mixed_lengths, ("sentence_transformers",), steady=False, first=56),
    "keypoint_heatmaps": Program(keypoint_heatmaps, ("timm",)),
}
