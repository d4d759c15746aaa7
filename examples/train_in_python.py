"""An experiment as a Python value: train on Python source code, evaluate on held-out text, continue a prompt."""

from aamoe_jax import (
    AAMoEConfig,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    TrainingConfig,
    evaluate,
    generate,
    load_checkpoint,
    train,
)

config = ExperimentConfig(
    model=ModelConfig(d_model=64, num_heads=2, num_layers=2, aamoe=AAMoEConfig(chunk_size=32, num_experts=16)),
    data=DataConfig(mixture=(("code", 1.0),), seq_len=256),
    training=TrainingConfig(steps=200, batch_size=4),
)
result = train(config, "runs/python")
checkpoint = load_checkpoint("runs/python")
evaluation = evaluate(checkpoint, max_batches=20)
print(f"step {result.step}: {evaluation.bits_per_byte:.2f} bits per byte, {evaluation.spent:.2f} resources per token")
print(generate(checkpoint, "def main(", new_tokens=100))
