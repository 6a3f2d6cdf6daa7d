"""File formats: safetensors files with a versioned header, torch.distributed checkpoints, and the Hugging Face Hub."""
