"""What runs the model (`workers.vllm`), or stands in for it (`workers.simulated`)."""
