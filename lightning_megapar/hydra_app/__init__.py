"""What a Hydra application around a Trainer needs: refusal of unknown settings, a claimed run directory, exit codes."""
