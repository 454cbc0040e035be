"""Peaks of training that others measured: the model, the training, the figure and its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from umem.base.units import GIB, MIB
from umem.capture.models.training import Setup

GB = 10**9
SOURCES = {
    "rasbt": "https://github.com/rasbt/pytorch-memory-optim/blob/main/logs.md",
    "litgpt": "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md",
    "fitcheck": "https://pypi.org/project/fitcheck-llm/0.2.0/",
    "torchtune": "https://github.com/pytorch/torchtune/blob/main/README.md",
    "fms": "https://github.com/foundation-model-stack/fms-acceleration/blob/main/scripts/benchmarks"
    "/refs/a100_80gb.csv",
    "anatomy": "https://huggingface.co/docs/transformers/v4.49.0/model_memory_anatomy",
    "one-gpu": "https://huggingface.co/docs/transformers/v4.27.2/en/perf_train_gpu_one",
    "qwen": "https://github.com/QwenLM/Qwen/blob/main/README.md",
}
HELD = "the loop clears the gradients after forward, so those of the step before are held"
ACCUMULATED = "gradients of the batches before are held"
LOGITS = "the loop keeps the model's output, and so float32 logits, during backward"
CHUNKS = (
    "litgpt computes the loss in chunks, and its adapters in bfloat16; the loss of transformers "
    "holds float32 copies of all logits, and peft casts the inputs of adapters to float32"
)
# The context of that GPU, which the same page measures.
CONTEXT = 1343 * MIB


@dataclass(frozen=True)
class Case:
    """One published peak."""

    model: str
    config: str | dict[str, Any]  # a name, or the configuration
    said: str  # the training in words
    batch: int
    sequence: int | None
    how: Setup
    measured: float  # bytes
    counter: str  # what was read: allocated, or reserved (also by nvidia-smi less the context)
    source: str
    reason: str = ""  # of a difference above 10 %
    also: str = ""  # what else their loop holds at the peak: gradients, or logits in float32


def _llama(
    hidden: int, layers: int, heads: int, inner: int, vocab: int = 32000, **more: Any
) -> Any:
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "intermediate_size": inner, "vocab_size": vocab,
        "max_position_embeddings": 8192,
    } | more  # fmt: skip


VIT = "torchvision.vit_l_16"
PHI = {
    "model_type": "phi", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
    "intermediate_size": 8192, "vocab_size": 51200, "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
LLAMA_7B = _llama(4096, 32, 32, 11008)
LLAMA_13B = _llama(5120, 40, 40, 13824)
LLAMA_3B = _llama(
    3072, 28, 24, 8192, 128256, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True
)
TINY = _llama(2048, 22, 32, 5632, num_key_value_heads=4)
SMOL = _llama(2048, 24, 32, 8192, 49152, tie_word_embeddings=True)
QWEN_2B = {
    "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 151936,
}  # fmt: skip
MISTRAL = _llama(4096, 32, 32, 14336, num_key_value_heads=8)
BERT = {
    "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "architectures": ["BertForSequenceClassification"],
    "attn_implementation": "eager",
}  # fmt: skip


def _lora_of_two(train: str = "lora") -> Setup:
    return Setup(train, "bf16", rank=8, targets=("q_proj", "v_proj"))


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
QLORA = Setup("qlora", "fp32", "adamw-foreach", True, 32, ATTENTION)
ALL_64 = Setup("lora", "bf16", "adamw-foreach", True, 64)
FP32, AMP, BF16 = (Setup("full", name, "adam-foreach") for name in ("fp32", "amp", "bf16"))
SGD = Setup("full", "bf16", "sgd")
BERTS = Setup("full", "fp32")
CHECKPOINTED = Setup("full", "fp32", checkpointing=True)

CASES = (
    Case("ViT-L/16", VIT, "float32, Adam, batch 64", 64, None, FP32, 26.79 * GB, "reserved",
         "rasbt", HELD, "gradients"),
    Case("ViT-L/16", VIT, "mixed precision, Adam, batch 64", 64, None, AMP, 18.21 * GB,
         "reserved", "rasbt", HELD, "gradients"),
    Case("ViT-L/16", VIT, "bfloat16, Adam, batch 64", 64, None, BF16, 13.82 * GB, "reserved",
         "rasbt", HELD, "gradients"),
    Case("ViT-L/16", VIT, "bfloat16, Adam, batch 16", 16, None, BF16, 5.69 * GB, "reserved",
         "rasbt", HELD, "gradients"),
    Case("ViT-L/16", VIT, "bfloat16, Adam, 4 batches of 4", 4, None, BF16, 3.91 * GB, "reserved",
         "rasbt", ACCUMULATED, "gradients"),
    Case("ViT-L/16", VIT, "bfloat16, SGD, 4 batches of 4", 4, None, SGD, 2.02 * GB, "reserved",
         "rasbt", ACCUMULATED, "gradients"),
    Case("phi-1.5", PHI, "LoRA of q, v, rank 8, bfloat16, 1 x 1044", 1, 1044, _lora_of_two(),
         4.82 * GB, "allocated", "litgpt", CHUNKS),
    Case("phi-1.5", PHI, "LoRA, 2 x 1044", 2, 1044, _lora_of_two(), 6.76 * GB, "allocated",
         "litgpt", CHUNKS),
    Case("phi-1.5", PHI, "LoRA, 4 x 1044", 4, 1044, _lora_of_two(), 10.68 * GB, "allocated",
         "litgpt", CHUNKS),
    Case("phi-1.5", PHI, "QLoRA, 1 x 1044", 1, 1044, _lora_of_two("qlora"), 3.72 * GB,
         "allocated", "litgpt", CHUNKS),
    Case("Llama 2 7B", LLAMA_7B, "LoRA of q, v, rank 8, bfloat16, 1 x 1304", 1, 1304,
         _lora_of_two(), 21.30 * GB, "allocated", "litgpt"),
    Case("Llama 2 7B", LLAMA_7B, "LoRA, 2 x 1304", 2, 1304, _lora_of_two(), 29.07 * GB,
         "allocated", "litgpt"),
    Case("Llama 2 7B", LLAMA_7B, "QLoRA, 1 x 1304", 1, 1304, _lora_of_two("qlora"), 13.84 * GB,
         "allocated", "litgpt", "not explained: litgpt's layers of 4 bits keep about 2 GB more"),
    Case("Llama 2 13B", LLAMA_13B, "LoRA, 1 x 1304", 1, 1304, _lora_of_two(), 38.12 * GB,
         "allocated", "litgpt"),
    Case("TinyLlama 1.1B", TINY, "QLoRA of attention, rank 32, checkpoints, 2 x 512", 2, 512,
         QLORA, 1847 * MIB, "allocated", "fitcheck", LOGITS, "logits"),
    Case("TinyLlama 1.1B", TINY, "QLoRA, 2 x 2048", 2, 2048, QLORA, 3897 * MIB, "allocated",
         "fitcheck", LOGITS, "logits"),
    Case("TinyLlama 1.1B", TINY | {"attn_implementation": "eager"},
         "QLoRA, 2 x 2048, scores of attention written", 2, 2048, QLORA, 6655 * MIB, "allocated",
         "fitcheck", LOGITS + "; one more copy of the scores is not explained", "logits"),
    Case("SmolLM2 1.7B", SMOL, "QLoRA, 4 x 1024", 4, 1024, QLORA, 5281 * MIB, "allocated",
         "fitcheck", LOGITS, "logits"),
    Case("Qwen2.5 1.5B", QWEN_2B, "QLoRA, 2 x 1024", 2, 1024, QLORA, 6823 * MIB, "allocated",
         "fitcheck", LOGITS, "logits"),
    Case("Llama 3.2 3B", LLAMA_3B, "bfloat16, AdamW, 2 x 4096", 2, 4096,
         Setup("full", "bf16"), 60.0 * GIB, "allocated", "torchtune"),
    Case("Mistral 7B", MISTRAL,
         "bfloat16, AdamW (foreach), checkpoints; the peak is in the update", 4, 512,
         Setup("full", "bf16", "adamw-foreach", True), 72434837504, "allocated", "fms"),
    Case("BERT large", BERT, "float32, AdamW, 4 x 512", 4, 512, BERTS, 14949 * MIB - CONTEXT,
         "reserved", "anatomy",
         "nvidia-smi, which counts kernels loaded after the context was read; the rest is not "
         "explained"),
    Case("BERT large", BERT, "float32, AdamW, 4 accumulated batches of 1 x 512", 1, 512, BERTS,
         8681 * MIB - CONTEXT, "reserved", "one-gpu", ACCUMULATED, "gradients"),
    Case("BERT large", BERT, "the same with checkpoints", 1, 512, CHECKPOINTED,
         6775 * MIB - CONTEXT, "reserved", "one-gpu"),
    Case("Qwen 7B", QWEN_7B, "LoRA of all layers, rank 64, bfloat16, checkpoints, 1 x 1024", 1,
         1024, ALL_64, 21.5 * GB, "reserved", "qwen"),
    Case("Qwen 7B", QWEN_7B, "the same, 1 x 8192", 1, 8192, ALL_64, 36.6 * GB, "reserved", "qwen"),
)  # fmt: skip
