"""Fine-tuning and pre-training, on one machine or many, on torch.distributed."""
