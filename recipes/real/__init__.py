"""The real model: SmolLM2-135M-Instruct learns tasks in real language on two CPU cores (README.md here)."""
