"""The rows of the matrix, by section. Add a model here and in `models/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.sameness.case import FEW_WORLDS, Case

MODELS = (
    Case("convolutions", "Convolutions with BatchNorm and dropout, validation with metrics", "images:Convolutions"),
    Case("vit", "Vision transformer with drop-path and mixup", "images:VisionTransformer"),
    Case("unet", "U-Net with GroupNorm that removes noise", "images:UNet"),
    Case("lstm", "LSTM over packed sequences", "sequences:LSTM"),
    Case("rnn", "Recurrent network whose state is detached between pieces", "sequences:Detached"),
    Case(
        "tied_lm", "Language model with tied embeddings and masked tokens, counted in tokens", "sequences:TiedLanguage"
    ),
    Case("hf_encoder", "Hugging Face encoder (BERT), masked words", "sequences:Encoder"),
    Case("hf_decoder", "Hugging Face decoder (GPT-2), next words", "sequences:Decoder"),
    Case(
        "experts",
        "Mixture of experts, some unused (`find_unused_parameters`)",
        "sequences:MixtureOfExperts",
        {"distributed": {"find_unused_parameters": True}},
    ),
    Case("gan_joint", "GAN, both networks in every step", "two_sided:JointGAN"),
    Case(
        "gan_alternating",
        "GAN, alternating networks (own loop)",
        "two_sided:alternating_gan",
        {"distributed": {"find_unused_parameters": True}},
        is_loop=True,
    ),
    Case(
        "gan_alternating_task",
        "GAN, alternating networks (task, `batch.step`)",
        "two_sided:AlternatingGAN",
        {"distributed": {"find_unused_parameters": True}},
    ),
    Case(
        "contrastive",
        "Contrastive loss over the global batch (own loop, two passes)",
        "two_sided:contrastive",
        is_loop=True,
    ),
    Case(
        "layer_drop",
        "LayerDrop by Python's generator (`find_unused_parameters`)",
        "unusual:LayerDrop",
        {"distributed": {"find_unused_parameters": True}},
    ),
    Case("lazy", "Lazy modules", "unusual:LazyModules", worlds=FEW_WORLDS),
    Case("spectral_norm", "Spectral norm", "unusual:SpectralNorm"),
    Case("weight_norm", "Weight norm", "unusual:WeightNorm"),
    Case("gradient_penalty", "Gradient penalty (second derivatives)", "unusual:GradientPenalty"),
    Case("complex", "Complex parameters", "unusual:ComplexParameters"),
    Case("mixed_dtypes", "Parameters in bfloat16, float32 and float64 in one model", "unusual:MixedParameters"),
)

_LANE_WEIGHTS = {2: [3, 1], 3: [1, 4, 2], 4: [1, 3, 2, 2], 5: [4, 1, 1, 1, 1], 8: [1, 1, 1, 1, 1, 1, 1, 1]}

TRAINING = (
    Case(
        "averages",
        "EMA and SWA of the weights, with BatchNorm measured again",
        "images:Convolutions",
        {"ema": {"decay": 0.9}, "swa": {"start": 0.5, "every": 1}},
    ),
    Case(
        "checkpointing",
        "Activation checkpointing (`memory.checkpoint`)",
        "images:VisionTransformer",
        {"memory": {"checkpoint": ["blocks.*"]}},
    ),
    Case("micro_batches", "Micro-batches (`memory.lane_split`)", "images:Convolutions", {"memory": {"lane_split": 2}}),
    Case("clip_norm", "Clipping by the norm", "images:Convolutions", {"clip": {"norm": 0.05}}),
    Case(
        "clip_groups",
        "Clipping by the norm of each parameter group",
        "images:NamedConvolutions",
        {
            "clip": {"norm": 0.05, "per_group": True},
            "optimizer": {"name": "sgd", "groups": [{"match": ["last.*"], "lr": 0.1}]},
        },
    ),
    Case(
        "clip_adaptive",
        "Clipping by a multiple of the running norm",
        "images:Convolutions",
        {"clip": {"adaptive": 0.9}},
        worlds=FEW_WORLDS,
    ),
    Case("bf16", "bf16 autocast", "images:VisionTransformer", {"precision": "bf16"}),
    Case(
        "fp16_overflow",
        "fp16 with loss scaling and overflows",
        "images:Overflowing",
        {"precision": "fp16"},
        ways=("eager", "resumed", "workers", "launcher", "graphs"),
    ),
    Case(
        "lane_weights",
        "Uneven shares of the lanes (`distributed.lane_weights`)",
        "images:Convolutions",
        config_at={w: {"distributed": {"lane_weights": v}} for w, v in _LANE_WEIGHTS.items()},
    ),
    Case("two_lanes_each", "Sixteen lanes", "images:VisionTransformer", {"lanes": 16}),
)

DATA = (
    Case("augmented", "Draws from torch, NumPy and Python in the dataset", "reading:Augmented"),
    Case("collate", "CutMix in the collate function", "reading:MixedInCollate"),
    Case("weighted", "Weighted order, with replacement", "reading:Weighted"),
    Case("grouped", "Grouped order", "reading:Grouped", worlds=FEW_WORLDS),
    Case("tail", "A tail that leaves most lanes without samples", "reading:Augmented", {"params": {"samples": 67}}),
    Case(
        "drop_last",
        "Without the tail (`drop_last`)",
        "reading:Augmented",
        {"drop_last": True, "epochs": 3},
        worlds=FEW_WORLDS,
    ),
    Case("tiny", "Fewer samples than lanes", "reading:Augmented", {"params": {"samples": 5}, "epochs": 6}),
    Case("streams", "Iterable data with lane streams", "reading:Streamed"),
    Case(
        "stateful_streams", "Lane streams that save their position", "reading:StatefulStreamed", {"steps_per_epoch": 3}
    ),
    Case("hf_stream", "Hugging Face iterable dataset", "reading:HuggingFaceStream", worlds=FEW_WORLDS),
)

_BUFFERS = {
    "float32": "A float32 buffer that forward changes",
    "bf16": "A bfloat16 buffer that forward changes",
    "float64": "float32 and float64 buffers that forward changes",
    "int64": "An int64 buffer that counts in large numbers",
    "flag": "A bool flag that the first forward pass sets",
    "complex": "A complex buffer that forward changes",
    "infinite": "A buffer that starts at infinity (a running minimum)",
    "reassigned": "A buffer that forward assigns anew (`self.mean = ...`)",
    "not saved": "A buffer that forward changes and no state dict holds (`persistent=False`)",
}

STATE = (
    *(
        Case(
            f"buffer_{kind.replace(' ', '_')}",
            title,
            "followers:Buffers",
            {"params": {"kind": kind}},
            moves=() if kind == "not saved" else ("mean",),
        )
        for kind, title in _BUFFERS.items()
    ),
    Case(
        "cumulative_batchnorm",
        "BatchNorm over all batches so far (`momentum=None`)",
        "followers:CumulativeBatchNorm",
        worlds=FEW_WORLDS,
    ),
    Case(
        "tied_modules", "Model and extra module with a parameter in common", "followers:TiedModules", worlds=FEW_WORLDS
    ),
    Case("vq", "VQ codebook that follows by a moving average", "followers:VectorQuantised"),
    Case("teacher", "Momentum teacher that follows in `after_update`", "followers:MomentumTeacher"),
    Case("moco", "MoCo: momentum teacher and a queue of keys", "followers:MoCo"),
    Case("teacher_in_forward", "Momentum teacher that follows in forward", "followers:TeacherInForward"),
    Case("extra_module", "Extra module with BatchNorm and dropout, in validation too", "unusual:ExtraModule"),
    Case(
        "metric_wrappers",
        "Metrics around metrics",
        "unusual:WrappedMetrics",
        worlds=FEW_WORLDS,
        moves=("plain", "twice"),
    ),
    Case("max_norm", "Embedding with `max_norm`, which changes weights in forward", "unusual:MaxNormEmbedding"),
    Case(
        "validation_draws",
        "Dropout in validation (Monte Carlo dropout)",
        "unusual:DropoutInValidation",
        worlds=FEW_WORLDS,
    ),
    Case("hook_noise", "Noise drawn in gradient hooks", "unusual:HookNoise"),
    Case("optimizer_noise", "Noise drawn inside the optimizer", "unusual:OptimizerNoise"),
)

_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {"sgd": {"momentum": 0.9, "nesterov": True}}
_OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "muon", "nadam",
    "radam", "rmsprop", "rprop", "sgd",
)  # fmt: skip

OPTIMIZERS = tuple(
    Case(
        f"optimizer_{name}",
        f"`optimizer.name: {name}`",
        "unusual:NamedMatrices" if name == "muon" else "unusual:Named",
        {"optimizer": {"name": name, "lr": 1e-2, "args": dict(_ARGUMENTS.get(name, {}))}},
        worlds=FEW_WORLDS,
        ways=("eager", "resumed"),
    )
    for name in _OPTIMIZERS
)

_SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "linear": {"warmup": 2},
    "cosine": {"warmup": 2, "final": 0.1},
    "one_cycle": {},
    "step": {"args": {"step_size": 1, "gamma": 0.5}},
    "warm_restarts": {"args": {"T_0": 2}},
    "plateau": {"args": {"patience": 0, "threshold": 0.5}},
    "ExponentialLR": {"args": {"gamma": 0.8}},
    "CyclicLR": {"args": {"base_lr": 1e-3, "max_lr": 1e-1, "step_size_up": 2}},
    "MultiStepLR": {"args": {"milestones": [1]}},
    "PolynomialLR": {"every": "step", "args": {"total_iters": 5}},
}

SCHEDULES = tuple(
    Case(
        f"schedule_{name.lower()}",
        f"`schedule.name: {name}`",
        "unusual:Named",
        {"optimizer": {"name": "sgd", "lr": 1e-2, "args": {"momentum": 0.9}}, "schedule": {"name": name, **section}},
        worlds=FEW_WORLDS,
        ways=("eager", "resumed"),
    )
    for name, section in _SCHEDULES.items()
)

REFUSED = (
    Case(
        "few_lanes",
        "More ranks than lanes (`lanes: 4`)",
        "images:Convolutions",
        {"lanes": 4},
        ways=("eager", "workers", "launcher"),
    ),
    Case("plain_iterable", "Iterable data without lane streams", "reading:WithoutLaneStreams", worlds=FEW_WORLDS),
    Case("sparse", "Sparse gradients", "unusual:SparseGradients", worlds=FEW_WORLDS),
    Case("lbfgs", "LBFGS made by the task", "unusual:LBFGSByTask", worlds=FEW_WORLDS),
    Case("lbfgs_named", "LBFGS by name", "unusual:Named", {"optimizer": {"name": "lbfgs"}}, worlds=FEW_WORLDS),
    Case("sync_batchnorm", "SyncBatchNorm made by the task, on CPUs", "unusual:SyncBatchNormByTask", worlds=FEW_WORLDS),
)

MISTAKES = (
    Case(
        "generator",
        "Noise from a `torch.Generator` that lives as long as the process",
        "followers:LongLivedGenerator",
        mistake="where the generator stands depends on how many lanes the rank has run",
        worlds=FEW_WORLDS,
    ),
    Case(
        "python_counter",
        "A Python attribute that forward changes",
        "followers:CountedInPython",
        mistake="no checkpoint holds it, and it counts the rank's lanes",
        worlds=FEW_WORLDS,
    ),
    Case(
        "tensor_attribute",
        "A tensor that forward changes and that is no buffer",
        "followers:Buffers",
        {"params": {"kind": "attribute"}},
        mistake="no checkpoint holds it, and each rank has its own",
        worlds=FEW_WORLDS,
    ),
    Case(
        "dataset_generator",
        "A generator kept in the dataset (`numpy.random.default_rng`)",
        "reading:DatasetGenerator",
        mistake="where the generator stands depends on what this process has read before",
        worlds=FEW_WORLDS,
    ),
    Case(
        "cached_augmentation",
        "A dataset that keeps what it drew for a sample",
        "reading:CachedAugmentation",
        mistake="what a later epoch reads depends on which process read the sample first",
        worlds=FEW_WORLDS,
    ),
)

SECTIONS: Mapping[str, Sequence[Case]] = {
    "Models": MODELS,
    "Training": TRAINING,
    "Data": DATA,
    "State besides the weights": STATE,
    "Optimizers by name": OPTIMIZERS,
    "Schedules by name": SCHEDULES,
    "Refused": REFUSED,
    "Mistakes that verify finds": MISTAKES,
}
CASES = tuple(replace(case, section=section) for section, cases in SECTIONS.items() for case in cases)
