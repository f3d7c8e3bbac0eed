"""What the adapters for Transformers and Accelerate share."""
