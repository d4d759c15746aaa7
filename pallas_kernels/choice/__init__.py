"""What share of a token's attention every resource would get, by pooled keys."""

from pallas_kernels.choice.interface import (
    IMPLEMENTATIONS,
    Precision,
    attention_shares,
    attention_shares_of_scores,
    scores_of_experts,
)

__all__ = ["IMPLEMENTATIONS", "Precision", "attention_shares", "attention_shares_of_scores", "scores_of_experts"]
