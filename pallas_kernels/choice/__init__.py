"""What share of a token's attention every resource would get, by pooled keys."""

from pallas_kernels.choice.interface import (
    IMPLEMENTATIONS,
    attention_shares,
    attention_shares_of_scores,
    scores_of_experts,
)

__all__ = ["IMPLEMENTATIONS", "attention_shares", "attention_shares_of_scores", "scores_of_experts"]
