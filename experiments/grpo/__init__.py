"""Reinforcement learning by GRPO, with rollouts that decode speculatively."""
