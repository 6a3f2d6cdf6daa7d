"""Files: safetensors with a versioned header, checkpoints of torch.distributed, the Hugging Face hub."""
