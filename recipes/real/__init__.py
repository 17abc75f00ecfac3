"""The real model: SmolLM2-135M-Instruct learns tasks in real language on two CPU cores (README.md
here)."""

MAKES = {
    "outputs/real/teacher": "bash recipes/opd/run_smollm2_135m.sh",
    "outputs/real": "bash recipes/real/start.sh sft [passages|arithmetic|search]",
}
