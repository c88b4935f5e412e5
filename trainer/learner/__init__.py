"""The learner's processes: batches become gradients, optimizer steps and new weights."""
