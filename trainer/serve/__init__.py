"""`python -m trainer.serve`: an HTTP server over the engine pool; token ids in, ids and log-probs out."""
