"""Fused FP32-exact policy loss for language models: log-prob, ratio and loss without the logits.

    from kernels import CISPO, policy_loss, linear_logprob
"""

from kernels.linear_logprob import linear_logprob
from kernels.objectives import CISPO, Objective, Term
from kernels.policy_loss import PolicyLossOutput, policy_loss

__all__ = ["CISPO", "Objective", "PolicyLossOutput", "Term", "linear_logprob", "policy_loss"]
